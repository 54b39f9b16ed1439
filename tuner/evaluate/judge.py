"""One trial, start to end: load, check, time, report.

The device, the answers and the timed inputs live here across trials; nothing of a kernel does.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import torch

from codegen.kernel import KernelSource
from runs.record import Measured, Outcome, Rejected, Stage, Timing, TrialClass
from space.gpu import GpuSpec
from space.variant import DType, Phase, Problem, Shape
from tuner.evaluate.arena import Arena, Bay
from tuner.evaluate.checks import (
    canary_checks,
    checks_of_function,
    grid_checks,
    hidden_checks,
    neighbour_checks,
    race_check,
    trial_checks,
)
from tuner.evaluate.clock import Clock
from tuner.evaluate.decode_checks import pool_checks
from tuner.evaluate.freshness import check_fresh
from tuner.evaluate.function import Function
from tuner.evaluate.inputs import Check, make
from tuner.evaluate.launch import Launcher, LaunchError, Prepare
from tuner.evaluate.output import same_bits
from tuner.evaluate.splits import multiprocessors, with_splits
from tuner.evaluate.timing import (
    TRIAL_PLAN,
    Plan,
    Sample,
    check_possible,
    check_stream,
    measure,
    measure_replays,
    warm_up,
)
from tuner.evaluate.verify import Exam, grade, set_exam, synchronize, verify

HIDDEN_CHECKS = 2  #: drawn problems of a trial
REPEATS, MANY_REPEATS = 2, 20
NEIGHBOUR_SCORES = 1 << 22  #: a trial is asked one past the tuned shapes up to 2k by 2k
EXAMS_KEPT = 256
COOL_S, COOL_TRIES = 2.0, 3  #: pause before a sample is taken again on a card that was too hot


class Kernel(Protocol):
    """A loaded kernel."""

    @property
    def prepare(self) -> Prepare: ...
    def unload(self) -> None: ...


class Thermometer(Protocol):
    """Knows whether the device runs slower because it is too hot."""

    def overheated(self) -> bool: ...


Load = Callable[[KernelSource, bytes, torch.device], Kernel]


class Judge:
    """Judges kernels on one device, one after the other."""

    def __init__(
        self, device: torch.device, clock: Clock, load: Load, gpu: GpuSpec | None,
        plan: Plan = TRIAL_PLAN, meter: Thermometer | None = None,
        function: Function | None = None,
    ) -> None:  # fmt: skip
        """`gpu` is the card that the roofline is taken from; None leaves that check out.

        `function` is what kernels are checked against, plain attention when it is None.
        """
        self.function = function
        self.device = device
        self.clock = clock
        self.load = load
        self.gpu = gpu
        self.plan = plan
        self.meter = meter
        self._exams: dict[tuple[Check, DType], Exam] = {}
        self._arena: Arena | None = None

    def judge(
        self, problem: Problem, source: KernelSource, image: bytes, shapes: tuple[Shape, ...],
        seed: int, best_us: Mapping[Shape, float],
    ) -> Outcome:  # fmt: skip
        """Check a kernel on small problems and time it on `shapes`. Device faults are raised."""
        try:
            kernel = self.load(source, image, self.device)
        except LaunchError as error:
            return Rejected(TrialClass.LAUNCH_FAILED, Stage.LAUNCH, str(error))
        self.clock.tampered()  # what a kernel before this one left is not this one's
        checks = (
            *self.races(problem),
            *trial_checks(problem),
            *hidden_checks(problem, seed, HIDDEN_CHECKS),
            *neighbour_checks(problem, shapes, NEIGHBOUR_SCORES),
        )
        checked = self.check(kernel.prepare, problem, checks)
        if isinstance(checked, Rejected):
            kernel.unload()
            return checked
        outcome = self._time(kernel.prepare, problem, shapes, seed, best_us, checked)
        kernel.unload()  # not in a finally: after a device fault there is nothing to free
        if isinstance(outcome, Measured):
            sms = multiprocessors(self.device, self.gpu)
            timings = tuple(with_splits(t, source, sms, problem.page) for t in outcome.timings)
            return replace(outcome, timings=timings)
        return outcome

    def check(
        self, prepare: Prepare, problem: Problem, checks: tuple[Check, ...],
        repeats: int = REPEATS,
    ) -> float | Rejected:  # fmt: skip
        """Return the worst error ratio over `checks`, or the first rejection.

        One of them is repeated many times: a race shows on one problem as well as on all.
        """
        worst = 0.0
        if self.function is not None:
            own = checks_of_function(problem)
            checks = tuple(c for c in (*checks, *own) if self.function.takes(c))
        for n, check in enumerate(checks):
            exam = self.exam(check, problem.dtype)
            verdict = verify(prepare, exam, MANY_REPEATS if n == 0 else repeats)
            if isinstance(verdict, Rejected):
                return verdict
            worst = max(worst, verdict)
        return worst

    def races(self, problem: Problem) -> tuple[Check, ...]:
        """Return what comes first, to be repeated most, where tiles run side by side.

        The problems of decode kernels have many blocks for each row as they are.
        """
        fills = self.device.type == "cuda" and problem.phase is not Phase.DECODE
        return (race_check(problem),) if fills else ()

    def pools(self, problem: Problem) -> tuple[Check, ...]:
        """Return what only a device has room or time for."""
        if self.device.type != "cuda":
            return ()
        if problem.phase is Phase.DECODE:
            return pool_checks(problem)
        return grid_checks(problem)

    def canary(self, problem: Problem, source: KernelSource, image: bytes) -> bool:
        """Whether a kernel that was right before is right now."""
        try:
            kernel = self.load(source, image, self.device)
        except LaunchError:
            return False
        verdict = self.check(kernel.prepare, problem, tuple(canary_checks(problem)))
        kernel.unload()
        return isinstance(verdict, float)

    def exam(self, check: Check, dtype: DType) -> Exam:
        """Return the problem with its answer, worked out once."""
        key = check, dtype
        if key not in self._exams:
            if len(self._exams) >= EXAMS_KEPT:
                self._exams.clear()
            inputs = make(check, dtype, self.device, self.function)
            self._exams[key] = set_exam(check.name, inputs)
        return self._exams[key]

    def arena(self, shapes: tuple[Shape, ...], dtype: DType, seed: int, page: int = 0) -> Arena:
        """Return tensors that hold all of `shapes`, those of the trial before if they fit."""
        if self._arena is None or not self._arena.holds(shapes, dtype, seed, page):
            self._arena = None  # free before the larger one is made
            self._arena = Arena(shapes, dtype, seed, self.device, page, self.function)
        return self._arena

    def _time(
        self, prepare: Prepare, problem: Problem, shapes: tuple[Shape, ...], seed: int,
        best_us: Mapping[Shape, float], worst: float,
    ) -> Outcome:  # fmt: skip
        arena = self.arena(shapes, problem.dtype, seed, problem.page)
        timings: list[Timing] = []
        for n, shape in enumerate(shapes):
            best = best_us.get(shape, math.inf)
            timed = self._time_shape(prepare, arena.bay(shape), problem, best, n == 0)
            if isinstance(timed, Rejected):
                return timed
            timing, ratio = timed
            timings.append(timing)
            worst = max(worst, ratio)
        return Measured(tuple(timings), worst)

    def _time_shape(
        self, prepare: Prepare, bay: Bay, problem: Problem, best_us: float, cold: bool
    ) -> tuple[Timing, float] | Rejected:
        """Check before, time, and check after: same bits, inputs untouched, new data followed.

        Ahead of each window the output is spoiled. At the very end comes data that no launch has
        met: it must not take longer. Where the new data goes, nobody knows.
        """
        launched = ask(prepare, bay, 0)
        if isinstance(launched, Rejected):
            return launched
        first = bay.output.tensor.clone()
        bay.output.poison()
        calls = [s.given_to(prepare, bay.output.tensor) for s in bay.slots]
        if cold:
            warm_up(calls[0], self.clock, self.plan)
        aside = check_stream(calls[0], self.clock, f"timed shape {bay.shape.key}")
        if aside is not None:
            return aside
        take = measure_replays if problem.phase is Phase.DECODE else measure
        sample = self._sample(
            lambda: take(calls, self.clock, self.plan, best_us, before=bay.output.spoil)
        )
        if (left := self.clock.tampered()) is not None:
            return Rejected(
                TrialClass.TIMING_INVALID, Stage.TIME, f"timed shape {bay.shape.key}: {left}"
            )
        if not same_bits(bay.output.tensor, first):
            return Rejected(
                TrialClass.NONDETERMINISTIC, Stage.TIME,
                f"timed shape {bay.shape.key}: the last timed launch gave other bits than the "
                "first",
            )  # fmt: skip
        slot = secrets.randbelow(len(calls))
        again = ask(prepare, bay, 1, slot, calls[slot])
        if isinstance(again, Rejected):
            return again
        if self.gpu is not None:
            plain = self.function is None
            impossible = check_possible(sample, bay.shape, problem.dtype, self.gpu, plain)
            if impossible is not None:
                return impossible
        stale = check_fresh(calls, bay, self.clock, sample)
        return stale or (sample.timing(bay.shape), max(launched, again))

    def _sample(self, take: Callable[[], Sample]) -> Sample:
        """Take a sample, again after a pause when the card was too hot for it."""
        sample = take()
        for _ in range(COOL_TRIES):
            if self.meter is None or not self.meter.overheated():
                break
            time.sleep(COOL_S)
            sample = take()
        return sample


def ask(
    prepare: Prepare, bay: Bay, data_set: int, slot: int = 0, launch: Launcher | None = None
) -> float | Rejected:
    """Put a data set on a slot, launch once on a poisoned output and judge it.

    Before a new data set goes in, what the launches so far left of the old one on slot 0 is
    compared. `launch` is one of that slot, if there is one.
    """
    exam = bay.exam(data_set, slot)
    if data_set:
        before = bay.exams[data_set - 1]
        for name, now, was in zip("QKV", before.inputs.tensors, before.pristine, strict=True):
            if not same_bits(now, was):
                return Rejected(
                    TrialClass.INPUT_MODIFIED, Stage.TIME,
                    f"{exam.name}: {name} was changed by a timed launch",
                )  # fmt: skip
        bay.fill(data_set, slot)
    bay.output.poison()
    try:
        (launch or exam.inputs.given_to(prepare, bay.output.tensor))()
    except LaunchError as error:
        return Rejected(TrialClass.LAUNCH_FAILED, Stage.LAUNCH, f"{exam.name}: {error}")
    synchronize(bay.output.tensor.device)
    return grade(exam)
