"""`tune verify`: chosen or exported kernels judged again, each in a process that ran nothing yet.

The problems are drawn from a seed that no search has seen; it is printed, so that a failure can
be seen again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runs.record import Rejected, Stage, TrialClass
from space.gpu import gpu_named
from tuner.devices import device_names
from tuner.errors import MachineError, UsageError
from tuner.job import DeviceCanary
from tuner.options import check_whole, device_index
from tuner.reference import check_unchanged
from tuner.sanitizer import INSTALL, Finding, State, installed, sanitize
from tuner.subjects import Subject, Verified, referred, subjects_of
from tuner.worker import JobFailed, Worker, WorkerLost, WorkerUnavailable

if TYPE_CHECKING:
    from tuner.evaluate.bench import Bench

BASE_S, SHAPE_S = 120.0, 20.0
SANITIZER = ("auto", "yes", "no")


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """Judge one kernel on disk on hidden problems and on its own shapes."""

    subject: Subject
    seed: int
    limit_s: float

    def run(self, bench: Bench) -> Verified | Rejected:
        """See `examine`."""
        from tuner.evaluate.last_exam import examine
        from tuner.evaluate.launch import LaunchError
        from tuner.evaluate.subject import loaded

        s = self.subject
        try:
            prepare = loaded(s, bench.device)
        except LaunchError as error:
            return Rejected(TrialClass.LAUNCH_FAILED, Stage.LAUNCH, str(error))
        judge = bench.judge_of(s.reference, s.problem)
        return examine(judge, prepare, s.problem, s.shapes, self.seed)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one kernel."""

    subject: Subject
    outcome: Verified | Rejected
    sanitizer: tuple[Finding, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the judge and the sanitizer found nothing."""
        clean = all(f.state is not State.FAULTS for f in self.sanitizer)
        return clean and not isinstance(self.outcome, Rejected)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be verified, where, and with which seed; `sanitizer` is its path or None."""

    subjects: tuple[Subject, ...]
    devices: tuple[int, ...]  #: of each subject
    seed: int
    sanitizer: str | None


MakeWorker = Callable[[int], Worker]


def plan(
    target: Path, seed: int | None, sanitizer: str, devices: tuple[str, ...] | None = None,
    reference: str | None = None,
) -> Plan:  # fmt: skip
    """Read the target and find its GPU. Raises UsageError, NothingFound, MachineError."""
    if sanitizer not in SANITIZER:
        raise UsageError(f"--sanitizer {sanitizer!r}: auto, yes or no is wanted")
    check_whole("--seed", seed, 0, "0 or more")
    subjects = referred(target, reference, subjects_of(target))
    for function in {s.reference for s in subjects if s.reference is not None}:
        check_unchanged(function, target)
    names = device_names() if devices is None else devices
    found = []
    for gpu in (gpu_named(s.gpu) for s in subjects):
        index = device_index(gpu, names)
        if index is None:
            here = ", ".join(names) or "no GPU"
            raise MachineError(
                f"{target} holds kernels for {gpu.title} and this machine has {here}; verify there"
            )
        found.append(index)
    program = None if sanitizer == "no" else installed()
    if sanitizer == "yes" and program is None:
        raise MachineError(
            f"compute-sanitizer is not installed; {INSTALL}, "
            "or leave --sanitizer out to verify without it"
        )
    return Plan(subjects, tuple(found), secrets.randbits(31) if seed is None else seed, program)


def verdicts(todo: Plan, make_worker: MakeWorker = Worker) -> Iterator[Verdict]:
    """Judge every kernel in a process of its own. Raises MachineError when a GPU fails."""
    for subject, device in zip(todo.subjects, todo.devices, strict=True):
        worker = make_worker(device)
        try:
            outcome = _judge(worker, VerifyJob(subject, todo.seed, _limit_s(subject)))
        finally:
            worker.close()
        right = todo.sanitizer is not None and not isinstance(outcome, Rejected)
        findings = sanitize(todo.sanitizer or "", subject, device) if right else ()
        yield Verdict(subject, outcome, findings)


def _limit_s(subject: Subject) -> float:
    return BASE_S + SHAPE_S * len(subject.shapes)


def _judge(worker: Worker, job: VerifyJob) -> Verified | Rejected:
    try:
        return worker.run(job)
    except WorkerLost as lost:
        try:
            sings = worker.run(DeviceCanary())
        except (WorkerLost, WorkerUnavailable, JobFailed) as dead:
            raise MachineError(f"{lost}; the GPU does not answer after it: {dead}") from dead
        if not sings:
            raise MachineError(f"{lost}; the GPU adds up wrongly after it") from lost
        return Rejected(lost.trial_class, Stage.LAUNCH, str(lost))
    except (WorkerUnavailable, JobFailed) as error:
        raise MachineError(f"{job.subject.name}: {error}") from error
