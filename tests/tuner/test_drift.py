"""The first right kernel is timed again after every so many trials, and the change is told."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from codegen.kernel import KernelSource
from runs.record import Basis, Measured, Outcome, Rejected, Stage, Timing, TrialClass
from space.variant import DType, Problem, Shape
from tuner.drift import DriftWatch, remark
from tuner.job import EvalJob

PROBLEM = Problem("mha", DType.FP16, 64, 64, False)
SHAPES = (Shape(1, 2, 2, 64, 64, 64, 64), Shape(1, 2, 2, 128, 128, 64, 64))
WRONG = Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, "zeros")


def measured(*us: float) -> Measured:
    pairs = zip(SHAPES, us, strict=True)
    return Measured(tuple(Timing(s, t, t, t, 5, Basis.MEASURED) for s, t in pairs), 1.0)


def done(outcome: Outcome) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future


def job(text: str) -> EvalJob:
    return EvalJob(PROBLEM, KernelSource(text, "sm_80", (), ()), b"", SHAPES, 1)


def watched(again: Outcome, trials: int = 7) -> tuple[DriftWatch, list[EvalJob]]:
    submitted: list[EvalJob] = []

    def submit(one: EvalJob) -> Future[Outcome]:
        submitted.append(one)
        return done(again)

    watch = DriftWatch(submit, every=3)
    for n in range(trials):
        watch.saw(job(str(n)), done(WRONG if n == 0 else measured(100.0 + n, 200.0 + n)))
    return watch, submitted


def test_first_right_kernel_is_timed_again() -> None:
    watch, submitted = watched(measured(101.0 * 1.04, 201.0 * 1.06))
    assert [j.source.text for j in submitted] == ["1", "1"]
    notes = watch.notes()
    assert [n.as_dict()["trials"] for n in notes] == [3, 6]
    assert notes[0].as_dict()["median_ratio"] == pytest.approx(1.05)
    assert notes[0].as_dict()["worst_ratio"] == pytest.approx(1.06)
    assert watch.notes() == ()


def test_remark_says_how_much_and_warns_when_it_is_much() -> None:
    watch, _ = watched(measured(101.0 * 1.05, 201.0 * 1.05))
    said = remark(watch.notes())
    assert said is not None and "2 times, took +5.0% at most; times of the search" in said
    watch, _ = watched(measured(101.0, 201.0))
    said = remark(watch.notes())
    assert said is not None and said.endswith("took +0.0% at most")
    assert remark(()) is None


def test_kernel_that_is_right_no_more_is_told() -> None:
    watch, _ = watched(WRONG)
    assert watch.notes()[0].as_dict()["class"] == "wrong_output"


def test_nothing_is_timed_again_before_a_kernel_was_right() -> None:
    submitted: list[EvalJob] = []
    watch = DriftWatch(lambda j: submitted.append(j) or done(WRONG), every=1)  # type: ignore[func-returns-value]
    for n in range(4):
        watch.saw(job(str(n)), done(WRONG))
    assert not submitted
