"""Looks at what every timed window left: a kernel may work when it is judged and not when timed.

Launches that are timed follow each other at a steady pace, those that are judged do not, and a
kernel can tell by the device's clock. So no launch of a final timing goes unseen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from runs.record import Rejected, Stage, TrialClass
from tuner.evaluate.output import Output, same_bits


@dataclass(slots=True)
class Witness:
    """Compares on the device; the host asks once, at the end."""

    output: Output
    _right: dict[str, torch.Tensor] = field(default_factory=dict)
    _same: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def remember(self, name: str) -> None:
        """Take what the output holds for the right answer of `name`; it was judged."""
        self._right[name] = self.output.tensor.clone()
        self._same[name] = []

    def look(self, name: str | None) -> None:
        """Compare what the window of `name` left, if it is known, and spoil the output."""
        if name is not None and (right := self._right.get(name)) is not None:
            self._same[name].append(same_bits(self.output.tensor, right))
        self.output.spoil()

    def against(self, name: str, place: str) -> Rejected | None:
        """Return the rejection of `name` when a window of its left something else."""
        seen = self._same[name]
        wrong = len(seen) - int(torch.stack(seen).sum()) if seen else 0
        if not wrong:
            return None
        return Rejected(
            TrialClass.NONDETERMINISTIC, Stage.TIME,
            f"{place}: {wrong} of {len(seen)} timed launches gave other bits than the first, which "
            "was right",
        )  # fmt: skip
