"""What can go wrong with a run's folder, by who can act on it."""

from __future__ import annotations


class RunError(Exception):
    """Base of everything this package raises on purpose."""


class CodecError(RunError):
    """A record that is not what its schema says; names the field."""


class StoreError(RunError):
    """A run folder that is absent, damaged, taken or locked; names it."""


class ExportError(RunError):
    """Runs that cannot be exported together, or a folder that cannot be written."""


class NothingToExport(ExportError):
    """Runs without a right kernel."""
