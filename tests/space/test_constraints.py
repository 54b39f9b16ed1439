"""The predicates, their arithmetic, and the census of a space."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from space.constraints import CONSTRAINTS, Backend, row_pitch_bytes, smem_bytes, space_for, violated
from space.gpu import GPUS
from space.hopper import hopper_space
from space.legal import LegalPoints, legal_points
from space.params import Param, Point, Space
from space.variant import DType, Problem

PROBLEMS = (
    Problem("mha", DType.FP16, 64, 64, True),
    Problem("mha", DType.FP16, 128, 128, False),
    Problem("mla", DType.FP16, 192, 128, True),
    Problem("mha", DType.FP16, 16, 256, False),
    Problem("mha", DType.FP16, 72, 72, False),
    Problem("mha", DType.FP16, 256, 256, True),
)


def thinned(space: Space, seed: int) -> Space:
    """The space with at most two choices of each parameter, so that it can be walked."""
    rng = random.Random(seed)
    return Space(
        tuple(
            Param(p.name, tuple(sorted(rng.sample(p.choices, min(2, len(p.choices))))), p.meaning)
            for p in space.params
        )
    )


def walk(problem: Problem, gpu_name: str, space: Space) -> tuple[set[Point], Counter[str]]:
    """Every point judged by itself."""
    legal, pruned = set(), Counter[str]()
    for point in space.points():
        found = violated(problem, point, GPUS[gpu_name])
        if found is None:
            legal.add(point)
        else:
            pruned[found[0]] += 1
    return legal, pruned


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.key)
@pytest.mark.parametrize("gpu", ["t4", "l40s", "h200"])
def test_the_census_is_that_of_a_walk(problem: Problem, gpu: str) -> None:
    for seed in range(3):
        space = thinned(space_for(problem, GPUS[gpu]), seed)
        legal, pruned = walk(problem, gpu, space)
        fast = legal_points(problem, GPUS[gpu], space)
        assert dict(fast.census.pruned) == dict(pruned)
        assert (fast.census.legal, fast.census.total) == (len(legal), space.size())
        assert set(fast) == legal and len(fast) == len(legal)
        if legal:
            assert fast.draw(random.Random(seed)) in legal


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.key)
@pytest.mark.parametrize("gpu", ["t4", "l40s", "h200"])
def test_the_census_of_a_whole_space_is_right_on_a_sample(problem: Problem, gpu: str) -> None:
    space = space_for(problem, GPUS[gpu])
    found = legal_points(problem, GPUS[gpu], space)
    assert found.census.legal + sum(n for _, n in found.census.pruned) == space.size()
    rng = random.Random(0)
    hits = 0
    for _ in range(3000):
        point = Point(tuple((p.name, rng.choice(p.choices)) for p in space.params))
        legal = violated(problem, point, GPUS[gpu]) is None
        assert (point in found) == legal
        hits += legal
    expected = 3000 * found.census.legal / space.size()
    assert abs(hits - expected) < 5 * max(expected, 20) ** 0.5


def test_the_census_takes_less_than_a_second() -> None:
    problem, gpu = PROBLEMS[1], GPUS["h200"]
    space = space_for(problem, gpu)
    started = time.process_time()
    found: LegalPoints = legal_points(problem, gpu, space)
    assert time.process_time() - started < 1
    assert space.size() > 200_000 and 0 < found.census.legal < space.size()


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda g: g.name)
def test_every_head_dim_has_a_legal_point_on_every_gpu(gpu) -> None:
    for dim in range(16, 257, 8):
        problem = Problem("mha", DType.FP16, dim, dim, True)
        space = space_for(problem, gpu).restrict({"BM": (64,), "BN": (16, 32), "warps": (4,)})
        assert legal_points(problem, gpu, space).census.legal, dim


@pytest.mark.parametrize("columns", range(16, 257, 8))
def test_padded_rows_start_in_eight_bank_groups(columns: int) -> None:
    pitch = row_pitch_bytes(columns, 0)
    assert pitch % 16 == 0 and columns * 2 <= pitch <= columns * 2 + 16
    assert len({row * pitch % 128 for row in range(8)}) == 8
    assert row_pitch_bytes(columns, 128) == columns * 2


def test_shared_memory_adds_up() -> None:
    base = space_for(PROBLEMS[1], GPUS["h200"], Backend.MMA_SYNC)
    point = Point(tuple((p.name, p.choices[0]) for p in base.params)).replace(
        BM=128, BN=64, stages=2, swizzle=128, q_in_registers=0, p_in_registers=1
    )
    q, kv = 128 * 256, 2 * 64 * (256 + 256)
    assert smem_bytes(PROBLEMS[1], point) == q + kv
    assert smem_bytes(PROBLEMS[1], point.replace(q_in_registers=1)) == max(q, kv)
    padded = row_pitch_bytes(64, 0)
    assert smem_bytes(PROBLEMS[1], point.replace(p_in_registers=0)) == q + kv + 128 * padded


@pytest.mark.parametrize(
    ("gpu", "stages", "limit"), [("l40s", 3, 101376), ("t4", 2, 65536), ("h200", 3, None)]
)
def test_too_much_shared_memory_names_both_numbers(
    gpu: str, stages: int, limit: int | None
) -> None:
    problem = Problem("mla", DType.FP16, 192, 128, False)
    space = space_for(problem, GPUS["h200"], Backend.MMA_SYNC)
    point = Point(tuple((p.name, p.choices[0]) for p in space.params)).replace(
        BM=64, BN=64, warps=4, stages=stages, swizzle=128, q_in_registers=0, blocks_per_sm=1
    )
    wanted = 64 * 384 + stages * 64 * (384 + 256)
    found = violated(problem, point, GPUS[gpu])
    if limit is None:
        assert found is None
    else:
        text = f"{wanted} bytes of shared memory wanted, {limit} there"
        assert found == ("fits_smem", text)


def test_a_space_leaves_out_what_can_never_be_legal() -> None:
    turing = space_for(PROBLEMS[0], GPUS["t4"])
    assert turing.param("stages").choices == (1,)
    assert space_for(PROBLEMS[1], GPUS["h200"], Backend.MMA_SYNC).param(
        "causal_longest_first"
    ).choices == (0,)
    odd = space_for(Problem("mha", DType.FP16, 72, 72, False), GPUS["l40s"])
    assert odd.param("swizzle").choices == (0,)
    assert space_for(PROBLEMS[2], GPUS["h200"], Backend.MMA_SYNC).param("swizzle").choices == (
        128,
        64,
        32,
        0,
    )


def hopper_point(problem: Problem) -> Point:
    first = Point(tuple((p.name, p.choices[0]) for p in hopper_space(problem).params))
    return first.replace(BM=128, BN=64, consumer_warpgroups=2, stages=2)


@pytest.mark.parametrize(
    ("dims", "choices"),
    [
        ((64, 64), (128,)),
        ((192, 128), (128,)),
        ((96, 96), (128, 64)),
        ((80, 80), (128, 64, 32)),
        ((40, 40), (128, 32)),
        ((128, 96), (128, 64)),
    ],
)
def test_a_narrower_swizzle_is_offered_where_it_packs_tighter(
    dims: tuple[int, int], choices: tuple[int, ...]
) -> None:
    problem = Problem("mla", DType.FP16, *dims, False)
    assert hopper_space(problem).param("swizzle").choices == choices


def test_a_swizzle_that_changes_nothing_is_refused_by_name() -> None:
    problem = Problem("mha", DType.FP16, 96, 96, False)
    point = hopper_point(problem)
    narrow = point.replace(swizzle=64)
    assert violated(problem, narrow, GPUS["h200"]) is None
    saved = (128 + 128 + 2 * 2 * 64) * 2 * (128 - 96)  # of Q, O and two stages of K and V
    assert smem_bytes(problem, point) - smem_bytes(problem, narrow) == saved
    assert violated(problem, point.replace(swizzle=32), GPUS["h200"]) == (
        "packs_columns", "swizzle=32 pads head dims 96 and 96 to as many columns as 64",
    )  # fmt: skip


def test_heads_are_packed_where_variants_share_kv_heads() -> None:
    for variant, choices in (("mha", (1,)), ("mla", (1,)), ("gqa", (1, 2, 4, 8))):
        problem = Problem(variant, DType.FP16, 128, 128, True)
        assert hopper_space(problem).param("pack_heads").choices == choices


def test_a_cluster_takes_no_tickets() -> None:
    problem = Problem("mha", DType.FP16, 128, 128, True)
    point = hopper_point(problem).replace(cluster=2)
    found = violated(problem, point.replace(persistent=2), GPUS["h200"])
    assert found is not None and found[0] == "walks_in_pairs"
    assert violated(problem, point.replace(persistent=1), GPUS["h200"]) is None


def test_constraints_have_names_of_their_own() -> None:
    names = [c.name for c in CONSTRAINTS]
    assert len(set(names)) == len(names)
