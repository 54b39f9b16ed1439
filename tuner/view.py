"""Who looks on at a run: the one interface of the terminal and of JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from runs.record import Finalist, History, RunSpec, TrialRecord
from tuner.briefing import Briefing


class View(Protocol):
    """Shows a run as it goes."""

    def briefing(self, briefing: Briefing) -> None:
        """Show what is known before the first compile."""

    def start(self, spec: RunSpec, history: History) -> None:
        """The search begins, or goes on after `history`."""

    def peers(self, peers: Sequence[Finalist]) -> None:
        """The peers of this machine were timed."""

    def trial(self, record: TrialRecord) -> None:
        """A trial was recorded."""

    def note(self, text: str) -> None:
        """Something worth a line happened."""

    def results(self, spec: RunSpec, history: History, finalists: Sequence[Finalist]) -> None:
        """The best of each shape is known."""

    def files(self, run: Path, export: Path | None) -> None:
        """Everything is written."""

    def close(self) -> None:
        """Leave the terminal as it was."""
