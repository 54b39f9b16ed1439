"""The search: ask, build, judge, record, tell. Readable on one page."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from codegen.kernel import Cubin, KernelSource
from runs.record import (
    Broken,
    Event,
    History,
    Measured,
    Outcome,
    Rejected,
    RunSpec,
    Stage,
    TrialClass,
    TrialRecord,
)
from tuner.lanes import Candidate, Lane, propose, replay

if TYPE_CHECKING:
    from tuner.job import Built

ALIKE = 8  #: trials that fail alike, with none right, before the search gives up
FREE_IN_A_ROW = 64  #: results that cost no budget before the search gives up
POLL_S = 0.5
NOTHING_MORE = "nothing more is proposed"  #: how a run of proposals alone ends


class Bench(Protocol):
    """Builds candidates and judges built ones. Both answer later."""

    @property
    def depth(self) -> int:
        """How many candidates to hold in flight, so that the judge never waits."""

    def build(self, candidate: Candidate) -> Future[Built | Rejected | Broken]:
        """Start to translate and compile."""

    def judge(self, candidate: Candidate, built: Built) -> Future[Outcome]:
        """Start to run, verify and time (or to predict)."""


class Journal(Protocol):
    """Where events and kernels are kept."""

    def append(self, event: Event) -> None:
        """Keep an event for good."""

    def put_kernel(self, source: KernelSource, cubin: Cubin) -> object:
        """Keep a built kernel."""


class Watcher(Protocol):
    """Who looks on."""

    def trial(self, record: TrialRecord) -> None:
        """A trial was recorded."""


class Guide(Protocol):
    """Who gives advice beside the search."""

    def look(self, lanes: list[Lane], history: History) -> None:
        """Put what was advised meanwhile into the lanes, or add lanes. Never waits."""

    @property
    def awaited(self) -> bool:
        """Whether a search that has nothing left to try should wait for advice."""


@dataclass(frozen=True, slots=True)
class End:
    """Why the search stopped. `cause` is the one failure that all trials share, if they do."""

    reason: str
    cause: str | None = None


@dataclass(slots=True)
class _Judging:
    candidate: Candidate
    built: Built
    since: float


def search(
    spec: RunSpec,
    lanes: Sequence[Lane],
    bench: Bench,
    journal: Journal,
    watcher: Watcher,
    history: History,
    guide: Guide | None = None,
) -> End:
    """Search until the budget, the time or the space is used up; return why it stopped.

    `history` is what an earlier part of the run recorded. What is in flight at the end is
    dropped; a KeyboardInterrupt may come at any moment, the journal stays whole.
    """
    lanes = list(lanes)
    replay(lanes, history)
    deadline = time.monotonic() + spec.minutes * 60 if spec.minutes else float("inf")
    building: dict[Future[Built | Rejected | Broken], Candidate] = {}
    judging: dict[Future[Outcome], _Judging] = {}
    judged_at = 0.0

    def record(candidate: Candidate, outcome: Outcome, built: Built | None, judge_s: float) -> None:
        nonlocal history
        trial = _record(len(history), candidate, outcome, built, judge_s)
        if built is not None and isinstance(outcome, Measured):
            journal.put_kernel(built.source, built.cubin)
        journal.append(trial)
        history = history.with_record(trial)
        _lane_of(lanes, candidate).settle(trial)
        watcher.trial(trial)

    while (end := _reason_to_stop(history, spec, deadline)) is None:
        if guide is not None:
            guide.look(lanes, history)
        left = spec.budget - history.spent()
        while len(building) + len(judging) < min(bench.depth, left):
            candidate = propose(lanes)
            if candidate is None:
                break
            building[bench.build(candidate)] = candidate
        if not building and not judging:
            if guide is not None and guide.awaited:
                time.sleep(POLL_S)
                continue
            if not all(lane.sampled for lane in lanes):
                return End(NOTHING_MORE)
            return End("every legal point of the space has been tried")
        pending: list[Future[Any]] = [*building, *judging]
        done, _ = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
        for future in [f for f in building if f in done]:
            candidate, built = building.pop(future), future.result()
            if isinstance(built, Rejected | Broken):
                record(candidate, built, None, 0.0)
            elif (twin := _twin(candidate, built, history, judging)) is not None:
                record(candidate, _duplicate(twin), built, 0.0)
            else:
                started = time.monotonic()
                judging[bench.judge(candidate, built)] = _Judging(candidate, built, started)
        for verdict in [f for f in judging if f in done]:
            job, now = judging.pop(verdict), time.monotonic()
            record(job.candidate, verdict.result(), job.built, now - max(job.since, judged_at))
            judged_at = now
    return end


def _lane_of(lanes: Sequence[Lane], candidate: Candidate) -> Lane:
    wanted = (candidate.sketch, candidate.problem)
    return next(lane for lane in lanes if (lane.sketch, lane.problem) == wanted)


def _record(
    index: int, candidate: Candidate, outcome: Outcome, built: Built | None, judge_s: float
) -> TrialRecord:
    made = (index, candidate.problem, candidate.sketch, candidate.point, candidate.origin, outcome)
    if built is None:
        return TrialRecord(*made)
    return TrialRecord(
        *made,
        source_digest=built.source.digest,
        cubin_key=built.cubin.key,
        resources=built.cubin.resources,
        smem_bytes=max(launch.smem_bytes for launch in built.source.launches),
        compile_s=built.cubin.compile_s,
        judge_s=judge_s,
    )


def _twin(
    candidate: Candidate, built: Built, history: History, judging: dict[Future[Outcome], _Judging]
) -> str | None:
    """Name the earlier trial whose emitted source is the same, if there is one."""
    digest = built.source.digest
    for r in history:
        same = (r.source_digest, r.problem) == (digest, candidate.problem)
        if same and not isinstance(r.outcome, Broken):
            return f"trial {r.index}"
    for job in judging.values():
        if (job.built.source.digest, job.candidate.problem) == (digest, candidate.problem):
            return "a trial in flight"
    return None


def _duplicate(twin: str) -> Rejected:
    return Rejected(TrialClass.DUPLICATE, Stage.EMIT, f"the same program as {twin}")


def _reason_to_stop(history: History, spec: RunSpec, deadline: float) -> End | None:
    if (cause := common_failure(history)) is not None:
        return End("all trials so far failed alike", cause)
    if history.spent() >= spec.budget:
        return End(f"the budget of {spec.budget} programs is spent")
    if time.monotonic() >= deadline:
        return End(f"{spec.minutes:g} minutes are over")
    recent = history.records[-FREE_IN_A_ROW:]
    if len(recent) == FREE_IN_A_ROW and History(recent).spent() == 0:
        return End(f"the last {FREE_IN_A_ROW} proposals brought no new program")
    return None


def common_failure(history: History, at_least: int = ALIKE) -> str | None:
    """Return the failure that all trials share when there are enough and none is right.

    Failures are alike when class, stage and first line agree, numbers aside.
    """
    failures: list[str] = []
    for r in history:
        match r.outcome:
            case Measured():
                return None
            case Rejected(trial_class=TrialClass.DUPLICATE):
                continue
            case Rejected(stage=stage, reason=reason) | Broken(stage=stage, reason=reason):
                failures.append(f"{r.outcome.trial_class} at {stage}: {_head(reason)}")
    kinds = {re.sub(r"\d+", "#", f) for f in failures}
    return failures[0] if len(kinds) == 1 and len(failures) >= at_least else None


def _head(reason: str) -> str:
    return reason.strip().splitlines()[0] if reason.strip() else "no reason given"
