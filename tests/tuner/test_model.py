"""The analytic model: bounds it keeps, directions it gets right, and what it calls its times."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.kernel import Resources
from llm_proposer.seeds import seeds
from runs.record import Basis
from space.constraints import space_for
from space.gpu import GPUS, GpuSpec
from space.params import Point
from space.variant import DType, Problem, Shape, io_bytes, visible_pairs
from tuner.evaluate.model import (
    Candidate,
    conflict_ways,
    key_tiles,
    predict,
    predict_us,
    resident_blocks,
)
from tuner.score import floor_us

FULL = Problem("mha", DType.FP16, 128, 128, False)
CAUSAL = Problem("mha", DType.FP16, 128, 128, True)


def shape(length: int, causal: bool = False, batch: int = 4) -> Shape:
    return Shape(batch, 16, 16, length, length, 128, 128, causal)


def point(problem: Problem = FULL, gpu: str = "a100", **changes: int) -> Point:
    return seeds(problem, GPUS[gpu], space_for(problem, GPUS[gpu]))[0].replace(**changes)


def us(p: Point, s: Shape, gpu: str = "a100", problem: Problem = FULL) -> float:
    return predict_us(Candidate.uncompiled(problem, p), s, GPUS[gpu])


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda g: g.name)
@pytest.mark.parametrize("causal", [False, True])
def test_never_below_the_floor_of_the_hardware(gpu: GpuSpec, causal: bool) -> None:
    problem = CAUSAL if causal else FULL
    for seed in seeds(problem, gpu, space_for(problem, gpu)):
        for length in (1, 100, 512, 4096):
            s = shape(length, causal)
            found = predict_us(Candidate.uncompiled(problem, seed), s, gpu)
            assert found > floor_us(s, problem.dtype, gpu)


def test_times_are_called_predicted() -> None:
    timing = predict(Candidate.uncompiled(FULL, point()), shape(512), GPUS["a100"])
    assert timing.basis is Basis.PREDICTED
    assert timing.low_us < timing.median_us < timing.high_us
    assert timing.samples == 0


def test_more_work_takes_longer() -> None:
    assert us(point(), shape(2048)) < us(point(), shape(4096))
    assert us(point(), shape(2048)) < us(point(), shape(2048, batch=16))


def test_a_causal_mask_saves_nearly_half_of_a_long_shape() -> None:
    full = us(point(), shape(8192))
    causal = us(point(CAUSAL), shape(8192, causal=True), problem=CAUSAL)
    assert 0.45 * full < causal < 0.7 * full


def test_overlap_and_turns_hide_the_softmax() -> None:
    plain = point(gpu="h200")
    for change in ({"overlap": 1}, {"pingpong": 1}, {"persistent": 1}):
        assert us(plain.replace(**change), shape(4096), "h200") < us(plain, shape(4096), "h200")


def test_bank_conflicts_cost() -> None:
    assert us(point(swizzle=128), shape(4096)) < us(point(swizzle=32), shape(4096))


def test_spills_cost() -> None:
    clean = Resources("k", 200, 0, 0, 0, 0)
    spilling = Resources("k", 200, 120, 120, 240, 0)
    of = [Candidate.of(FULL, point(), [r], 65536) for r in (clean, spilling)]
    fast, slow = (predict_us(c, shape(4096), GPUS["a100"]) for c in of)
    assert fast < slow


def test_the_worst_kernel_of_a_program_counts() -> None:
    small, large = Resources("a", 32, 0, 0, 0, 0), Resources("b", 240, 8, 8, 16, 0)
    candidate = Candidate.of(FULL, point(), [small, large], 1000)
    assert (candidate.registers, candidate.spilled_bytes) == (240, 16)


def test_a_slower_card_is_slower() -> None:
    assert us(point(), shape(4096), "a100") > us(point(), shape(4096), "h200")
    hopper = point(gpu="h200")
    assert us(hopper, shape(4096), "h200") < us(point(), shape(4096), "h200")


def test_short_queries_wait_for_memory() -> None:
    s = Shape(64, 16, 16, 1, 8192, 128, 128)
    found = us(point(), s)
    assert found > io_bytes(s, DType.FP16) / (GPUS["a100"].bandwidth_gbs * 1e3)


@settings(max_examples=60)
@given(
    st.integers(1, 700), st.integers(1, 700), st.sampled_from([32, 64, 128]),
    st.sampled_from([16, 64, 80]),
)  # fmt: skip
def test_key_tiles_cover_what_is_visible(sq: int, sk: int, bm: int, bn: int) -> None:
    s = Shape(1, 1, 1, sq, sk, 128, 128, causal=True)
    tiles = key_tiles(s, bm, bn)
    assert len(tiles) == -(-sq // bm)
    assert sum(tiles) * bm * bn >= visible_pairs(sq, sk, True)
    assert max(tiles) <= -(-sk // bn)
    assert tiles == sorted(tiles)


@pytest.mark.parametrize(
    ("columns", "swizzle", "ways"),
    [(128, 128, 1), (128, 64, 2), (128, 32, 4), (128, 0, 1), (64, 128, 1), (32, 64, 1)],
)
def test_conflicts_of_known_layouts(columns: int, swizzle: int, ways: int) -> None:
    assert conflict_ways(columns, swizzle) == ways


def test_occupancy_is_bounded_by_each_resource() -> None:
    gpu = GPUS["a100"]
    p = point(warps=4)
    assert resident_blocks(Candidate(FULL, p, 255, 0, 1024), gpu) == 2  # 65536 / (256 * 128)
    assert resident_blocks(Candidate(FULL, p, 32, 0, 80 * 1024), gpu) == 2
    assert resident_blocks(Candidate(FULL, p, 32, 0, 0), gpu) == 16  # 2048 threads
