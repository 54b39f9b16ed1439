"""What ends a command, by the exit code it gives."""

from __future__ import annotations


class TuneError(Exception):
    """Base of what a command raises on purpose; one line for the user."""

    exit_code = 1


class NothingFound(TuneError):
    """The search ended without a right kernel."""

    exit_code = 1


class UsageError(TuneError):
    """The command line, a shape, a sketch or a run folder is at fault."""

    exit_code = 2


class MachineError(TuneError):
    """The machine lacks what was asked: a GPU, a compiler wheel."""

    exit_code = 3
