"""A run as JSON lines on standard output, one event a line, for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from runs import codec
from runs.record import Finalist, History, RunSpec, TrialRecord
from tuner.briefing import Briefing


class JsonView:
    """Writes what a TerminalView would show, as it happens."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._summary: list[dict[str, Any]] = []

    def briefing(self, briefing: Briefing) -> None:
        """Write the facts."""
        spaces = [asdict(s) for s in briefing.spaces]
        self._line("briefing", run=briefing.run, facts=dict(briefing.lines), spaces=spaces)

    def start(self, spec: RunSpec, history: History) -> None:
        """Write the specification."""
        self._line("start", spec=codec.to_json(spec), trials=len(history), spent=history.spent())

    def peers(self, peers: Sequence[Finalist]) -> None:
        """Write the peers' times."""
        for peer in peers:
            self._line("peer", **codec.to_json(peer))

    def trial(self, record: TrialRecord) -> None:
        """Write the record and its class."""
        self._line("trial", trial_class=record.outcome.trial_class, **codec.to_json(record))

    def note(self, text: str) -> None:
        """Write the text."""
        self._line("note", text=text)

    def results(self, spec: RunSpec, history: History, finalists: Sequence[Finalist]) -> None:
        """Write every finalist; keep the chosen ones for the summary."""
        for finalist in finalists:
            self._line("finalist", **codec.to_json(finalist))
        self._summary = [
            {
                "shape": f.shape.key,
                "trial": f.trial,
                "point": None if f.trial is None else history.records[f.trial].point.as_dict(),
                "median_us": f.timing.median_us,
                "basis": f.timing.basis,
            }
            for f in finalists
            if f.chosen
        ]

    def files(self, run: Path, export: Path | None) -> None:
        """Write the summary: the best of each shape and where the files are."""
        self._line(
            "summary",
            run=str(run),
            export=None if export is None else str(export),
            best=self._summary,
        )

    def close(self) -> None:
        """Nothing to put back."""

    def _line(self, event: str, **values: Any) -> None:
        self._out.write(json.dumps({"event": event, **values}) + "\n")
        self._out.flush()
