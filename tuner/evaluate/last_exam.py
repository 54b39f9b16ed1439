"""The judgement of `tune verify`: more problems than any trial or final was given, none seen."""

from __future__ import annotations

from runs.record import Rejected
from space.variant import Problem, Shape
from tuner.evaluate.arena import Bay
from tuner.evaluate.checks import verify_checks
from tuner.evaluate.judge import MANY_REPEATS, Judge, ask
from tuner.evaluate.launch import Prepare
from tuner.evaluate.verify import check_whole, repeat
from tuner.subjects import Verified


def examine(
    judge: Judge, prepare: Prepare, problem: Problem, shapes: tuple[Shape, ...], seed: int
) -> Verified | Rejected:
    """Judge a kernel on problems drawn from `seed`, and on its own shapes with hidden data.

    Device faults are raised.
    """
    checks = (
        *judge.races(problem), *verify_checks(problem, shapes, seed), *judge.pools(problem)
    )  # fmt: skip
    worst = judge.check(prepare, problem, checks)
    if isinstance(worst, Rejected):
        return worst
    arena = judge.arena(shapes, problem.dtype, seed, problem.page)
    for shape in shapes:
        bay = arena.bay(shape)
        for data_set in range(len(bay.exams)):
            verdict = ask(prepare, bay, data_set)
            if isinstance(verdict, Rejected):
                return verdict
            worst = max(worst, verdict)
        if (wrong := check_whole(bay.exams[-1]) or _unsteady(prepare, bay)) is not None:
            return wrong
    return Verified(len(checks) + 2 * len(shapes), worst)


def _unsteady(prepare: Prepare, bay: Bay) -> Rejected | None:
    """Launch often on the shape itself: a race may want as many blocks as it has."""
    exam = bay.exams[-1]
    launch = exam.inputs.given_to(prepare, bay.output.tensor)
    return repeat(launch, exam, bay.output.tensor.clone(), MANY_REPEATS)
