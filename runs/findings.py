"""What a run's records say when they are read together: curves, importances, failures."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from runs.record import (
    Broken,
    Event,
    Finalist,
    History,
    Measured,
    Rejected,
    Resumed,
    TrialRecord,
)
from space.gpu import GpuSpec
from space.variant import DType, Problem, Shape, flops, io_bytes

LEAST_TRIALS = 12  #: right kernels below which no importance is given


def ceiling_tflops(shape: Shape, dtype: DType, gpu: GpuSpec) -> float:
    """Return the rate that the datasheet allows on `shape`: of tensor cores or of memory."""
    seconds = io_bytes(shape, dtype) / (gpu.bandwidth_gbs * 1e9)
    return min(gpu.tensor_tflops, flops(shape) / seconds / 1e12)


def rate_tflops(shape: Shape, us: float) -> float:
    """Return the rate over visible pairs, in TFLOP/s."""
    return flops(shape) / us / 1e6


def elapsed_s(events: Sequence[tuple[datetime, Event]]) -> dict[int, float]:
    """Return for each trial the seconds from the run's first event; stops are taken out."""
    found: dict[int, float] = {}
    total, before = 0.0, None
    for at, event in events:
        if before is not None and not isinstance(event, Resumed):
            total += max(0.0, (at - before).total_seconds())
        before = at
        if isinstance(event, TrialRecord):
            found[event.index] = total
    return found


@dataclass(frozen=True, slots=True)
class Step:
    """The best so far after a trial: rate, geometric mean over the problem's shapes."""

    trial: int  #: how many trials of this problem had ended
    seconds: float
    tflops: float


def best_so_far(
    history: History, problem: Problem, shapes: Sequence[Shape], seconds: dict[int, float]
) -> tuple[Step, ...]:
    """Return one step for each trial of `problem` from the first that timed all its shapes."""
    wanted = [s for s in shapes if problem.serves(s)]
    best: dict[Shape, float] = {}
    steps = []
    number = 0
    for record in history:
        if record.problem != problem:
            continue
        number += 1
        keep_best(best, record)
        if all(s in best for s in wanted):
            logs = [math.log(rate_tflops(s, best[s])) for s in wanted]
            at = seconds.get(record.index, 0.0)
            steps.append(Step(number, at, math.exp(sum(logs) / len(logs))))
    return tuple(steps)


def keep_best(best: dict[Shape, float], record: TrialRecord) -> None:
    """Take a trial's times into the best of each shape, in microseconds."""
    if isinstance(record.outcome, Measured):
        for t in record.outcome.timings:
            best[t.shape] = min(t.median_us, best.get(t.shape, math.inf))


def importances(history: History, problem: Problem) -> dict[str, float] | None:
    """Return the share of the variance of log time that each parameter explains alone.

    One-way, over the right kernels, less what as many groups explain by chance (epsilon squared);
    None with fewer than `LEAST_TRIALS` of them. A parameter that was not varied has no share.
    """
    rows: list[tuple[dict[str, int], float]] = []
    for r in history:
        if r.problem == problem and isinstance(r.outcome, Measured) and r.outcome.timings:
            logs = [math.log(t.median_us) for t in r.outcome.timings]
            rows.append((r.point.as_dict(), sum(logs) / len(logs)))
    if len(rows) < LEAST_TRIALS:
        return None
    mean = sum(y for _, y in rows) / len(rows)
    total = sum((y - mean) ** 2 for _, y in rows)
    names = list(dict.fromkeys(name for values, _ in rows for name in values))
    found: dict[str, float] = {}
    for name in names:
        groups: dict[int, list[float]] = {}
        for values, y in rows:
            if name in values:
                groups.setdefault(values[name], []).append(y)
        if len(groups) > 1 and total > 0 and len(rows) > len(groups):
            within = sum(
                (y - sum(ys) / len(ys)) ** 2 for ys in groups.values() for y in ys
            )  # what the parameter leaves unexplained
            by_chance = (len(groups) - 1) * within / (len(rows) - len(groups))
            found[name] = max(0.0, (total - within - by_chance) / total)
    return dict(sorted(found.items(), key=lambda f: -f[1]))


@dataclass(frozen=True, slots=True)
class Failure:
    """Trials that ended alike: their class, stage and reason, and the first of them."""

    trial_class: str
    stage: str
    count: int
    example: TrialRecord
    reason: str


def failures(history: History) -> tuple[Failure, ...]:
    """Group the trials that were not right by class, stage and the reason's head, most first."""
    groups: dict[tuple[str, str, str], list[TrialRecord]] = {}
    for r in history:
        if isinstance(r.outcome, Rejected | Broken):
            head = re.sub(r"\d+", "#", r.outcome.reason.split("\n")[0])
            key = (str(r.outcome.trial_class), str(r.outcome.stage), head)
            groups.setdefault(key, []).append(r)
    found = []
    for (name, stage, _), records in groups.items():
        outcome = records[0].outcome
        assert isinstance(outcome, Rejected | Broken)
        found.append(Failure(name, stage, len(records), records[0], outcome.reason))
    return tuple(sorted(found, key=lambda f: (-f.count, f.example.index)))


def peers_of(finalists: Sequence[Finalist], shape: Shape) -> list[Finalist]:
    """Return the peers timed on `shape`, fastest first."""
    found = [f for f in finalists if f.shape == shape and f.trial is None]
    return sorted(found, key=lambda f: f.timing.median_us)
