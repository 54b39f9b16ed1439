"""The subcommands of `tune`, one module each; `tuner.cli` only parses and dispatches."""
