"""How well the analytic model orders the trials of finished runs: `python -m ...ranking RUN ...`.

Every right trial with a measured time is predicted again from its point, its resources and the
shape. Within a group, the trials of one run on one problem and shape, predicted and measured times
are ranked; ranks are pooled over groups, so that a long shape does not order itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runs.errors import RunError
from runs.record import Basis, Measured, RunSpec, TrialRecord
from runs.store import RunStore
from space.gpu import GpuSpec, gpu_named
from space.variant import Problem, Shape, SpaceError
from tuner.evaluate.model import Candidate, predict_us

Times = NDArray[np.float64]
LEAST_TRIALS = 3  #: of a group: the order of two says little


@dataclass(frozen=True, slots=True)
class Group:
    """Trials of one run on one problem and shape: microseconds, by trial."""

    problem: Problem
    shape: Shape
    predicted: Times
    measured: Times


@dataclass(frozen=True, slots=True)
class Agreement:
    """How predicted and measured times agree over some groups."""

    name: str
    trials: int  #: distinct trials
    pairs: int  #: trials times shapes that were ranked
    spearman: float | None  #: None when nothing can be ranked
    rms_log: float | None  #: root mean square of the log of predicted over measured time


def average_ranks(values: Times) -> Times:
    """Return ranks from 1; equal values share the mean of theirs."""
    _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    shared: Times = (last - (counts - 1) / 2)[at]
    return shared


def spearman(groups: Iterable[tuple[Times, Times]]) -> float | None:
    """Return the correlation of ranks within groups, pooled over them; None when none varies."""
    pairs = [(_centred(x), _centred(y)) for x, y in groups if len(x) >= LEAST_TRIALS]
    if not pairs:
        return None
    x, y = (np.concatenate(side) for side in zip(*pairs, strict=True))
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm > 0 else None


def _centred(values: Times) -> Times:
    """Ranks around zero, scaled so that large groups do not outweigh the others' order."""
    ranks = average_ranks(values)
    centred: Times = (ranks - ranks.mean()) / len(ranks)
    return centred


def groups_of(spec: RunSpec, records: Iterable[TrialRecord]) -> tuple[Group, ...]:
    """Return the measured trials of a run, predicted again. Raises SpaceError: unknown GPU."""
    gpu = gpu_named(spec.gpu)
    found: dict[tuple[Problem, Shape], list[tuple[float, float]]] = {}
    for record in records:
        for shape, predicted, measured in _pairs(record, gpu):
            found.setdefault((record.problem, shape), []).append((predicted, measured))
    return tuple(
        Group(problem, shape, np.array([p for p, _ in times]), np.array([m for _, m in times]))
        for (problem, shape), times in found.items()
    )


def _pairs(record: TrialRecord, gpu: GpuSpec) -> Iterable[tuple[Shape, float, float]]:
    """Yield (shape, predicted, measured microseconds) of a right trial that was measured."""
    if not isinstance(record.outcome, Measured) or not record.resources:
        return
    candidate = Candidate.of(record.problem, record.point, record.resources, record.smem_bytes)
    for timing in record.outcome.timings:
        if timing.basis is Basis.MEASURED:
            yield timing.shape, predict_us(candidate, timing.shape, gpu), timing.median_us


def agreements(groups: Sequence[Group]) -> tuple[Agreement, ...]:
    """Return how far each problem agrees, and last all of them pooled."""
    problems = dict.fromkeys(g.problem for g in groups)
    each = [_agreement(p.key, [g for g in groups if g.problem == p]) for p in problems]
    return (*each, _agreement("all", groups))


def _agreement(name: str, groups: Sequence[Group]) -> Agreement:
    errors = [np.log(g.predicted / g.measured) for g in groups]
    every = np.concatenate(errors) if errors else np.array([])
    most: dict[Problem, int] = {}
    for g in groups:
        most[g.problem] = max(most.get(g.problem, 0), len(g.measured))
    return Agreement(
        name,
        sum(most.values()),
        len(every),
        spearman((g.predicted, g.measured) for g in groups),
        float(np.sqrt(np.mean(every**2))) if len(every) else None,
    )


def read_groups(folders: Sequence[Path]) -> tuple[Group, ...]:
    """Return the groups of all runs; those of different runs stay apart. Raises RunError."""
    found: list[Group] = []
    for folder in folders:
        store = RunStore.open(folder)
        found.extend(groups_of(store.spec, store.replay().sound))
    return tuple(found)


def table(found: Sequence[Agreement]) -> str:
    """Return the agreements as lines of text."""
    width = max(len(a.name) for a in found)
    lines = [f"{'':{width}}  trials   pairs  spearman  rms log"]
    lines += [
        f"{a.name:{width}}  {a.trials:6}  {a.pairs:6}  {_number(a.spearman):>8}  "
        f"{_number(a.rms_log):>7}"
        for a in found
    ]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how the model orders the trials of run folders; 0 when there is something to order."""
    parser = argparse.ArgumentParser(
        prog="python -m tuner.evaluate.ranking",
        description="Rank correlation of predicted and measured times of runs' trials.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of text")
    options = parser.parse_args(arguments)
    try:
        groups = read_groups(options.runs)
    except (RunError, SpaceError) as error:
        print(error, file=sys.stderr)
        return 2
    if not groups:
        print("no measured trial in these runs; tune with --measure gpu", file=sys.stderr)
        return 1
    found = agreements(groups)
    print(json.dumps([asdict(a) for a in found]) if options.json else table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
