"""`tune ablate`: what each parameter of a winner is worth, one changed at a time.

The winner of a shape and every point that differs from it in one parameter are built, and timed
interleaved on that shape, so that the card's state falls on all alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from runs.record import Broken, Finalist, Rejected, RunSpec, TrialRecord
from runs.store import Replay, RunStore
from space.constraints import Backend, space_for
from space.gpu import GpuSpec, gpu_named
from space.legal import LegalPoints, legal_points
from space.params import Point
from space.variant import Shape, flops
from tuner.errors import UsageError
from tuner.job import Built, CompileJob, Entry, FinalsJob, FinalsResult
from tuner.reference import answers_of

NEAREST = 3  #: other choices of a parameter that are tried, nearest first
ROUNDS = 15


class Compiles(Protocol):
    """Builds kernels elsewhere."""

    def submit(self, job: CompileJob) -> Future[Built | Rejected | Broken]:
        """Start to build."""


class Judges(Protocol):
    """Times kernels elsewhere."""

    def finals(self, job: FinalsJob) -> Future[FinalsResult]:
        """Start to time entries, interleaved."""


@dataclass(frozen=True, slots=True)
class Change:
    """A winner's point with one parameter changed; others follow where legality ties them."""

    name: str
    value: int
    point: Point


@dataclass(frozen=True, slots=True)
class Effect:
    """What a change did on a shape: its rate beside the winner's, or why it could not run."""

    shape: Shape
    name: str
    best: int  #: the winner's value
    value: int  #: the value tried instead
    best_tflops: float
    tflops: float | None
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """The winner's rate over the changed one's: above 1, the winner's value is worth it."""
        return None if not self.tflops else self.best_tflops / self.tflops


def winners(replay: Replay, spec: RunSpec, only: Sequence[str]) -> list[tuple[Shape, TrialRecord]]:
    """Return the winner of each shape named (all when none is), in the run's order.

    Raises UsageError naming a shape that the run does not have.
    """
    keys = {s.key for s in spec.shapes}
    if unknown := [k for k in only if k not in keys]:
        raise UsageError(f"{unknown[0]} is no shape of this run; it has {', '.join(sorted(keys))}")
    chosen: dict[Shape, Finalist] = {f.shape: f for f in replay.finalists if f.chosen}
    records = {r.index: r for r in replay.history}
    return [
        (shape, records[chosen[shape].trial or 0])
        for shape in spec.shapes
        if shape in chosen and (not only or shape.key in only)
    ]


def changes(legal: LegalPoints, point: Point) -> Iterator[Change]:
    """Yield the legal points that differ from `point` in one parameter, nearest values first."""
    for param in legal.space.params:
        at = param.choices.index(point[param.name])
        others = sorted(
            (c for c in param.choices if c != point[param.name]),
            key=lambda c: (abs(param.choices.index(c) - at), param.choices.index(c)),
        )
        found = 0
        for value in others:
            mended = legal.mended(point.replace(**{param.name: value}))
            if mended is not None and mended[param.name] == value and found < NEAREST:
                found += 1
                yield Change(param.name, value, mended)


def effects(
    spec: RunSpec, shape: Shape, winner: TrialRecord, compiles: Compiles, judges: Judges,
    arch: str,
) -> list[Effect]:  # fmt: skip
    """Measure every change of a winner on one shape.

    Raises UsageError when the winner itself cannot be built or timed here.
    """
    gpu = gpu_named(spec.gpu)
    legal = _legal(spec, winner, gpu)
    text = dict(spec.sketches)[winner.sketch]
    tried = list(changes(legal, winner.point))
    answers = answers_of(spec, winner.problem)

    def submit(point: Point) -> Future[Built | Rejected | Broken]:
        return compiles.submit(
            CompileJob(text, winner.problem, point, gpu.name, arch, answers=answers)
        )

    futures = [submit(winner.point), *(submit(c.point) for c in tried)]
    built = [f.result() for f in futures]
    entries = tuple(
        Entry(k, b.source, b.cubin.image, (shape,))
        for k, b in enumerate(built)
        if isinstance(b, Built)
    )
    job = FinalsJob(winner.problem, entries, (shape,), spec.seed, ROUNDS, with_peers=False,
                    reference=spec.reference)  # fmt: skip
    result = judges.finals(job).result()
    rates = {
        f.trial: flops(shape) / f.timing.median_us / 1e6
        for f in result.finalists
        if f.trial is not None
    }
    if 0 not in rates:
        raise UsageError(
            f"the winner of {shape.key} does not run here: {_why(built[0], result, 0)}"
        )
    return [
        Effect(
            shape, c.name, winner.point[c.name], c.value, rates[0], rates.get(k),
            "" if k in rates else _why(built[k], result, k),
        )
        for k, c in enumerate(tried, start=1)
    ]  # fmt: skip


def _legal(spec: RunSpec, winner: TrialRecord, gpu: GpuSpec) -> LegalPoints:
    space = space_for(winner.problem, gpu, Backend(spec.backend))
    return legal_points(winner.problem, gpu, space)


def _why(built: Built | Rejected | Broken, result: FinalsResult, trial: int) -> str:
    if not isinstance(built, Built):
        return " ".join(built.reason.split())[:160]
    return next((" ".join(r.reason.split())[:160] for t, r in result.rejected if t == trial), "")


def table(found: Sequence[Effect]) -> list[str]:
    """Return a Markdown table: shape, parameter, the winner's value and the others'."""
    lines = [
        "| shape | parameter | best | TFLOP/s | instead | TFLOP/s | best over instead |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for e in found:
        rate = f"{e.tflops:.0f}" if e.tflops else f"not built: {e.reason}"
        ratio = f"{e.ratio:.3f}" if e.ratio else ""
        lines.append(
            f"| {e.shape.key} | {e.name} | {e.best} | {e.best_tflops:.0f} | {e.value} | {rate} "
            f"| {ratio} |"
        )
    return lines


def open_run(path: Path) -> tuple[RunSpec, Replay]:
    """Read a run's specification and journal. Raises StoreError when it is none."""
    store = RunStore.open(path)
    return store.spec, store.replay()
