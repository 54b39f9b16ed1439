"""The sampler: legal and new points only, learns, and goes on after a replay."""

from __future__ import annotations

import math

from space.constraints import space_for
from space.gpu import GPUS
from space.legal import LegalPoints, legal_points
from space.params import Param, Point, Space
from space.variant import DType, Problem
from tuner.sampler import STARTUP, Sampler

PROBLEM = Problem("mha", DType.BF16, 128, 128, False)
GPU = GPUS["l40s"]


def all_legal() -> LegalPoints:
    return legal_points(PROBLEM, GPU, space_for(PROBLEM, GPU))


def few() -> LegalPoints:
    """A space with a handful of legal points."""
    kept = {"BM": (64, 128), "BN": (32, 64), "stages": (1, 2)}
    space = space_for(PROBLEM, GPU)
    params = (Param(p.name, kept.get(p.name, p.choices[:1]), p.meaning) for p in space.params)
    return legal_points(PROBLEM, GPU, Space(tuple(params)).restrict({"warps": (4,)}))


def cost(point: Point) -> float:
    away = abs(math.log2(point["BM"] / 128)) + abs(math.log2(point["BN"] / 64))
    return away + (point["stages"] != 2) + 0.3 * (point["swizzle"] != 128)


def run(sampler: Sampler, count: int, seen: dict[str, float]) -> list[Point]:
    points = []
    for _ in range(count):
        point = sampler.ask(lambda p: p.key in seen)
        assert point is not None
        seen[point.key] = cost(point)
        sampler.tell(point, (seen[point.key],))
        points.append(point)
    return points


def test_asks_are_legal_and_never_repeat() -> None:
    legal = all_legal()
    points = run(Sampler(legal, "0"), 60, {})
    assert all(p in legal for p in points)
    assert len({p.key for p in points}) == 60


def test_it_beats_random_search() -> None:
    """Mean cost of the later half of the asks, over three seeds."""
    legal = all_legal()
    learned = random = 0.0
    for seed in "123":
        points = run(Sampler(legal, seed), 60, {})
        learned += sum(cost(p) for p in points[30:])
        random += sum(cost(p) for p in points[:STARTUP]) * 30 / STARTUP
    assert learned < 0.75 * random


def test_the_whole_of_a_small_space_is_found_then_it_says_so() -> None:
    legal = few()
    seen: dict[str, float] = {}
    sampler = Sampler(legal, "0")
    run(sampler, len(legal), seen)
    assert sorted(seen) == sorted(p.key for p in legal)
    assert sampler.ask(lambda p: p.key in seen) is None


def test_several_open_at_once_are_all_different() -> None:
    sampler, taken = Sampler(all_legal(), "0"), set[str]()
    run(sampler, STARTUP, {})
    for _ in range(8):
        point = sampler.ask(lambda p: p.key in taken)
        assert point is not None
        taken.add(point.key)
    assert len(taken) == 8


def test_replayed_study_goes_on_as_the_first_did() -> None:
    legal, seen = all_legal(), dict[str, float]()
    points = run(Sampler(legal, "7"), 30, seen)
    for cut in (3, 14, 25):
        again, known = Sampler(legal, "7"), dict[str, float]()
        for point in points[:cut]:
            again.open(point)
            again.tell(point, (cost(point),))
            known[point.key] = cost(point)
        assert run(again, 30 - cut, known) == points[cut:]


def test_another_seed_gives_another_search() -> None:
    legal = all_legal()
    assert run(Sampler(legal, "1"), 5, {}) != run(Sampler(legal, "2"), 5, {})


def test_bad_kernels_are_avoided() -> None:
    """With every swizzle but one pruned, later asks mostly take the good one."""
    legal = all_legal()
    sampler, taken = Sampler(legal, "3"), set[str]()
    late = 0
    for n in range(60):
        point = sampler.ask(lambda p: p.key in taken)
        assert point is not None
        taken.add(point.key)
        good = point["swizzle"] == 128
        sampler.tell(point, (cost(point),) if good else None)
        late += good and n >= 30
    assert late >= 20


def test_each_focus_is_searched_for_its_own_best() -> None:
    """Two foci that want opposite tiles: both are found by one sampler."""
    legal = all_legal()
    sampler, seen = Sampler(legal, "0", foci=2), set[str]()
    best = [math.inf, math.inf]
    for _ in range(80):
        point = sampler.ask(lambda p: p.key in seen)
        assert point is not None
        seen.add(point.key)
        losses = [abs(math.log2(point["BN"] / wanted)) for wanted in (16, 128)]
        sampler.tell(point, losses)
        best = [min(b, x) for b, x in zip(best, losses, strict=True)]
    assert best == [0.0, 0.0]


def test_a_draw_whose_warpgroups_do_not_fit_its_rows_is_mended() -> None:
    problem = Problem("mha", DType.BF16, 128, 128, True)
    gpu = GPUS["h200"]
    legal = legal_points(problem, gpu, space_for(problem, gpu))
    point = next(iter(legal))
    assert legal.mended(point) == point
    torn = point.replace(consumer_warpgroups=point["consumer_warpgroups"] % 4 + 1)
    assert torn not in legal and legal.mended(torn) == point
    assert legal.mended(point.replace(stages=4, q_stages=2, BN=192)) is None
