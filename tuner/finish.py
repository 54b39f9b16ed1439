"""The end of a run: finalists, the winner of each shape, the exported folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runs.record import (
    REJECTED_IN_FINAL,
    Finalist,
    History,
    Measured,
    Note,
    Rejected,
    RunSpec,
    Timing,
    TrialRecord,
)
from space.variant import Shape

CONTENDERS = 3  #: trials of each shape that are timed again
NEAR = 1.06  #: and only those within this factor of the best


@dataclass(frozen=True, slots=True)
class Contender:
    """A trial that is in the final timing of some shapes."""

    record: TrialRecord
    shapes: tuple[Shape, ...]

    @property
    def name(self) -> str:
        """How tables call it."""
        return f"trial {self.record.index}"


@dataclass(frozen=True, slots=True)
class PeerTimes:
    """The peers of this machine on every shape, and a line for each that is not there."""

    finalists: tuple[Finalist, ...] = ()
    remarks: tuple[str, ...] = ()


def rejection(trial: int, why: Rejected) -> Note:
    """Return the journal's note that a finalist failed the harder checks of the final timing."""
    values = (("trial", trial), ("class", str(why.trial_class)), ("reason", why.reason))
    return Note(REJECTED_IN_FINAL, values)


def ranked(history: History, shape: Shape) -> list[tuple[TrialRecord, Timing]]:
    """Return the right trials of a shape, fastest first; ties go to the earlier trial."""
    found = [
        (r, t)
        for r in history
        if isinstance(r.outcome, Measured)
        for t in r.outcome.timings
        if t.shape == shape
    ]
    return sorted(found, key=lambda f: (f[1].median_us, f[0].index))


def contenders(spec: RunSpec, history: History) -> tuple[Contender, ...]:
    """Return the trials to time again, each with the shapes it is among the best of."""
    found: dict[int, tuple[TrialRecord, list[Shape]]] = {}
    for shape in spec.shapes:
        best = ranked(history, shape)[:CONTENDERS]
        for record, timing in best:
            if timing.median_us <= NEAR * best[0][1].median_us:
                found.setdefault(record.index, (record, []))[1].append(shape)
    return tuple(Contender(record, tuple(shapes)) for _, (record, shapes) in sorted(found.items()))


def choose(finalists: Sequence[Finalist]) -> tuple[Finalist, ...]:
    """Mark the winner of each shape among the trials of one final timing.

    Times whose intervals meet that of the fastest are a tie, unless the interval is a disturbed
    one's whose median is further off than a contender's may be; the earliest trial of a tie wins,
    so that another run of the same timing names the same kernel.
    """
    winners: dict[Shape, int] = {}
    for shape in dict.fromkeys(f.shape for f in finalists):
        ours = [f for f in finalists if f.shape == shape and f.trial is not None]
        if ours:
            best = min(ours, key=lambda f: f.timing.median_us)
            near = [f for f in ours if f.timing.median_us <= NEAR * best.timing.median_us]
            tied = [f for f in near if f.timing.low_us <= best.timing.high_us]
            winners[shape] = min(f.trial for f in tied if f.trial is not None)
    return tuple(
        replace(f, chosen=f.trial is not None and winners.get(f.shape) == f.trial)
        for f in finalists
    )


def unfinished(spec: RunSpec, history: History) -> tuple[Finalist, ...]:
    """Return the best few of each shape by the search's own times, the first chosen.

    It stands in for a final timing where there is none: in a predicted run, whose shortlist it
    is, and in a run that was interrupted.
    """
    return tuple(
        Finalist(shape, record.index, f"trial {record.index}", timing, chosen=place == 0)
        for shape in spec.shapes
        for place, (record, timing) in enumerate(ranked(history, shape)[:CONTENDERS])
    )
