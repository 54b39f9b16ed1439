"""The TL language: parser, checker, binder, printer and interpreter; it never imports cute/."""
