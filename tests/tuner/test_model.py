"""The analytic model: bounds it keeps, directions it gets right, and what it calls its times."""

from __future__ import annotations

import time

import pytest

from codegen.kernel import Resources
from llm_proposer.seeds import seeds
from runs.record import Basis
from space.constraints import space_for
from space.gpu import GPUS, GpuSpec
from space.params import Point
from space.variant import DType, Problem, Shape, io_bytes
from tuner.evaluate.model import (
    Candidate,
    conflict_ways,
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


def test_packed_heads_shorten_the_diagonal_and_half_a_group_is_wasted() -> None:
    problem = Problem("gqa", DType.BF16, 128, 128, True)
    p, s = point(problem, "h200"), Shape(16, 32, 8, 1024, 1024, 128, 128, True)
    alone, all_four, half = (us(p.replace(pack_heads=n), s, "h200", problem) for n in (1, 4, 8))
    assert all_four < alone < half


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


PLAIN = {"overlap": 0, "pingpong": 0, "persistent": 0, "q_stages": 1, "out_buffer": 0,
         "integer_max": 0, "head_group": 1, "rescale_threshold": 8}  # fmt: skip


@pytest.mark.parametrize(
    "change", [{"overlap": 1}, {"pingpong": 1}, {"persistent": 1}, {"integer_max": 1}], ids=str
)
def test_what_hides_the_softmax_helps_long_shapes(change: dict[str, int]) -> None:
    plain = point(gpu="h200").replace(**PLAIN)
    assert us(plain.replace(**change), shape(4096), "h200") < us(plain, shape(4096), "h200")


@pytest.mark.parametrize("change", [{"q_stages": 2}, {"out_buffer": 1}, {"persistent": 1}], ids=str)
def test_what_is_paid_by_the_tile_weighs_on_short_shapes(change: dict[str, int]) -> None:
    plain = point(gpu="h200").replace(**PLAIN)
    gains = [
        us(plain, s, "h200") / us(plain.replace(**change), s, "h200")
        for s in (shape(512, batch=32), shape(4096))
    ]
    assert gains[0] > gains[1] > 1


def test_rows_past_the_end_are_computed_too() -> None:
    wide = point(gpu="h200").replace(**PLAIN).replace(BM=192, consumer_warpgroups=3, BN=64)
    whole, padded = us(wide, shape(384, batch=32), "h200"), us(wide, shape(400, batch=32), "h200")
    assert padded > 1.3 * whole


def test_keys_walked_by_all_heads_at_once_leave_the_l2() -> None:
    near = point(gpu="h200").replace(**PLAIN)
    s = shape(4096, batch=8)
    assert us(near, s, "h200") < 0.97 * us(near.replace(head_group=0), s, "h200")


def test_causal_tiles_want_a_scheduler() -> None:
    base = point(CAUSAL, gpu="h200").replace(
        persistent=1, head_group=8, causal_longest_first=1, skip=0, pingpong=0
    )
    s = shape(4096, causal=True)
    dealt, taken = (us(base.replace(persistent=p), s, "h200", CAUSAL) for p in (1, 2))
    assert taken < dealt
    short_first = base.replace(persistent=2, causal_longest_first=0)
    assert taken < us(short_first, s, "h200", CAUSAL)


def test_a_million_tiles_are_predicted_at_once() -> None:
    s = shape(16384, causal=True, batch=512)
    start = time.perf_counter()
    us(point(CAUSAL, gpu="h200"), s, "h200", CAUSAL)
    assert time.perf_counter() - start < 2


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
