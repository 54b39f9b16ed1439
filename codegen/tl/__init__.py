"""The TL language: parser, checker, binder, printer and interpreter. Never imports `codegen.cute`."""
