"""Reading a comparison: curves, how soon near the best, and a verdict that chance cannot buy."""

from __future__ import annotations

import math
import random

import pytest

from runs.record import (
    Basis,
    History,
    Measured,
    Note,
    Rejected,
    RunSpec,
    Stage,
    Timing,
    TrialClass,
    TrialRecord,
)
from space.params import Point
from space.variant import DType, Problem, Shape
from tuner.standing import (
    Course,
    Mark,
    Proposals,
    best_known,
    contrasts,
    course_of,
    permutation_p,
    verdicts,
)

A = Shape(1, 16, 16, 512, 512, 128, 128, causal=False)
B = Shape(1, 16, 16, 4096, 4096, 128, 128, causal=False)
PROBLEM = Problem("mha", DType.BF16, 128, 128, causal=False)
SPEC = RunSpec("r", "mha", "h200", DType.BF16, (A, B), 10, 0, Basis.MEASURED, arm="assisted")


def trial(index: int, a: float, b: float, origin: str = "sampler") -> TrialRecord:
    timings = tuple(Timing(s, us, us, us, 9, Basis.MEASURED) for s, us in ((A, a), (B, b)))
    point = Point.of({"BM": index})
    outcome = Measured(timings, 1.0)
    return TrialRecord(index, PROBLEM, "s", point, origin, outcome, compile_s=2.0, judge_s=0.5)


def bad(index: int, trial_class: TrialClass, origin: str = "seed") -> TrialRecord:
    outcome = Rejected(trial_class, Stage.VERIFY, "no")
    point = Point.of({"BM": index})
    return TrialRecord(index, PROBLEM, "s", point, origin, outcome, judge_s=1.0)


HISTORY = History((
    trial(0, 10.0, 100.0, "first"), bad(1, TrialClass.WRONG_OUTPUT), bad(2, TrialClass.DUPLICATE),
    trial(3, 20.0, 50.0, "seed"), trial(4, 5.0, 80.0),
))  # fmt: skip


def test_speed_is_a_geometric_mean_of_the_best_so_far_over_the_best_known() -> None:
    best = best_known([HISTORY, History((trial(0, 4.0, 90.0),))], (A, B))
    assert best == {A: 4.0, B: 50.0}
    course = course_of(SPEC, HISTORY, (), best)
    speeds = [m.speed for m in course.marks]
    assert speeds[0] == pytest.approx(math.sqrt(0.4 * 0.5))
    assert speeds[1] == speeds[2] == speeds[0]
    assert speeds[3] == pytest.approx(math.sqrt(0.4 * 1.0))
    assert speeds[4] == pytest.approx(math.sqrt(0.8 * 1.0))


def test_duplicates_cost_no_program_but_their_seconds() -> None:
    course = course_of(SPEC, HISTORY, (), best_known([HISTORY], (A, B)))
    assert [m.programs for m in course.marks] == [1, 2, 2, 3, 4]
    assert course.marks[-1].seconds == course.seconds == pytest.approx(3 * 2.5 + 2.0)


def test_a_curve_starts_when_every_shape_has_a_time() -> None:
    half = TrialRecord(0, PROBLEM, "s", Point.of({"BM": 9}), "first",
                       Measured((Timing(A, 5.0, 5.0, 5.0, 9, Basis.MEASURED),), 1.0))  # fmt: skip
    history = History((half, trial(1, 10.0, 10.0)))
    course = course_of(SPEC, history, (), best_known([history], (A, B)))
    assert [m.programs for m in course.marks] == [2]
    assert course.speed_at(1) is None and course.speed_at(5) == 1.0


def test_proposals_of_the_builtin_are_its_seeds() -> None:
    p = course_of(SPEC, HISTORY, (), best_known([HISTORY], (A, B))).proposals
    assert p == Proposals(3, 3, 0, 0, 1, 1)


def test_proposals_and_tokens_of_a_model_come_from_its_notes() -> None:
    spec = RunSpec("r", "mha", "h200", DType.BF16, (A, B), 10, 0, Basis.MEASURED,
                   proposer="openai", arm="llm")  # fmt: skip
    said = [("verdict", v) for v in ("accepted", "repaired", "rejected", "accepted")]
    notes = [Note("proposal", (pair,)) for pair in said]
    notes.append(Note("model", (("trials", 1), ("tokens_in", 90), ("tokens_out", 10))))
    history = History((trial(0, 10.0, 100.0, "first"), trial(1, 5.0, 50.0, "model")))
    course = course_of(spec, history, notes, best_known([history], (A, B)))
    assert course.proposals == Proposals(4, 2, 1, 1, 1, 2)
    assert [m.tokens for m in course.marks] == [0, 100]


# ---- the verdict -------------------------------------------------------------------------------


def course(arm: str, seed: int, *speeds: float) -> Course:
    marks = tuple(Mark(n, float(n), 0, s) for n, s in enumerate(speeds, start=1))
    return Course(arm, seed, marks, len(marks), float(len(marks)), 0, Proposals())


def both(good: list[float], plain: list[float]) -> list[Course]:
    return [course("assisted", n, 0.5, s) for n, s in enumerate(good)] + [
        course("search", n, 0.5, s) for n, s in enumerate(plain)
    ]


def test_arms_that_do_not_overlap_differ_and_it_is_said_which_way() -> None:
    found = contrasts(both([0.97, 0.98, 0.99], [0.9, 0.91, 0.92]), ("assisted", "search"), 2)
    end = found[0]
    assert end.p == pytest.approx(0.1) and end.differs and end.ratio > 1.05
    assert "assisted against search: faster at the end" in verdicts(found, 3)[0]
    turned = contrasts(both([0.9, 0.91, 0.92], [0.97, 0.98, 0.99]), ("assisted", "search"), 2)
    assert "slower at the end" in verdicts(turned, 3)[0]


def test_arms_that_overlap_do_not_differ() -> None:
    found = contrasts(both([0.9, 0.98, 0.94], [0.91, 0.95, 0.97]), ("assisted", "search"), 2)
    assert not any(c.differs for c in found)
    assert verdicts(found, 3)[0].count("no difference") == 2


def test_a_gap_too_small_to_matter_is_no_difference_however_sure() -> None:
    found = contrasts(both([0.981, 0.982, 0.983], [0.978, 0.979, 0.98]), ("assisted", "search"), 2)
    assert found[0].p == pytest.approx(0.1) and not found[0].differs


@pytest.mark.parametrize("seeds, said", [(1, "one seed"), (2, "use --seeds 3"), (3, "0.1")])
def test_what_so_few_seeds_can_tell_is_said(seeds: int, said: str) -> None:
    found = contrasts(both([0.9] * seeds, [0.8] * seeds), ("assisted", "search"), 2)
    assert said in verdicts(found, seeds)[-1]
    if seeds < 3:
        assert not any(c.differs for c in found)


def test_the_p_value_is_exact_and_fair() -> None:
    assert permutation_p([3.0, 4.0, 5.0], [0.0, 1.0, 2.0]) == pytest.approx(2 / 20)
    assert permutation_p([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert permutation_p([1.0], [2.0]) is None
    rng = random.Random(1)
    ps = [
        permutation_p([rng.random() for _ in range(4)], [rng.random() for _ in range(4)])
        for _ in range(400)
    ]
    assert sum(p is not None and p <= 0.1 for p in ps) / 400 < 0.15


def test_many_seeds_are_sampled_and_agree_with_the_exact_value() -> None:
    rng = random.Random(2)
    one = [rng.gauss(1.0, 1.0) for _ in range(12)]
    other = [rng.gauss(0.0, 1.0) for _ in range(12)]
    p = permutation_p(one, other)
    assert p is not None and 0 < p < 0.2
