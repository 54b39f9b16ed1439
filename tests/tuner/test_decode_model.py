"""The analytic model of decode: never below the hardware, and what it says of splits."""

from __future__ import annotations

import itertools

import pytest

from runs.record import Basis
from space.gpu import gpu_named
from space.params import Point
from space.variant import LATENT_DIMS, DType, Phase, Problem, Shape, decode_shapes, variant_named
from tuner.evaluate.decode_model import decode_us, splits_of
from tuner.evaluate.model import Candidate, block_warps, predict, predict_us
from tuner.evaluate.timing import roofline_us

GPUS = ("a100", "l40s", "h200")
BASE = {
    "BM": 16, "BN": 64, "warps": 4, "column_warps": 4, "stages": 3, "swizzle": 128,
    "q_in_registers": 0, "rescale_threshold": 8, "blocks_per_sm": 1, "split_blocks": 2,
    "min_split_tiles": 1,
}  # fmt: skip
POINT = Point.of(BASE)
GQA = Problem("gqa", DType.BF16, 128, 128, False, Phase.DECODE)


def us(shape: Shape, gpu: str = "h200", point: Point = POINT, resident: int = 1) -> float:
    return decode_us(point, shape, DType.BF16, gpu_named(gpu), resident, warp_level=True)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "mla"])
def test_never_below_the_roofline(variant: str, gpu: str) -> None:
    for shape in decode_shapes(variant_named(variant)):
        for resident in (1, 2, 4):
            found = us(shape, gpu, resident=resident)
            assert found > roofline_us(shape, DType.BF16, gpu_named(gpu))


def test_longer_caches_and_larger_batches_take_longer() -> None:
    times = [us(Shape(1, 32, 8, 1, keys, 128, 128)) for keys in (1024, 8192, 65536)]
    times += [us(Shape(batch, 32, 8, 1, 65536, 128, 128)) for batch in (4, 16)]
    assert all(a < b for a, b in itertools.pairwise(times))


def test_bandwidth_decides_where_the_batch_is_large() -> None:
    shape = Shape(64, 32, 8, 1, 4096, 128, 128)
    assert us(shape, "a100") > 1.5 * us(shape, "h200")


def test_one_sequence_is_split_over_the_card() -> None:
    shape = Shape(1, 32, 8, 1, 32768, 128, 128)
    splits = splits_of(POINT, shape, gpu_named("h200"))
    assert splits == 32  # 264 blocks wanted of 8 planes, in 512 tiles
    alone = POINT.replace(min_split_tiles=4, split_blocks=1, BN=128)
    assert splits_of(alone, Shape(64, 32, 8, 1, 512, 128, 128), gpu_named("h200")) == 1
    coarse = Point.of(BASE | {"min_split_tiles": 512})
    assert us(shape) < 0.2 * us(shape, point=coarse)


def test_prediction_says_its_splits_and_basis() -> None:
    shape = Shape(1, 32, 8, 1, 32768, 128, 128)
    candidate = Candidate.uncompiled(GQA, POINT)
    timing = predict(candidate, shape, gpu_named("a100"))
    assert (timing.basis, timing.samples) == (Basis.PREDICTED, 0)
    # 108 SMs for 8 planes: 27 splits are aimed at, of 512 tiles 19 at a time
    assert timing.splits == 27
    assert timing.low_us < timing.median_us < timing.high_us
    assert timing.median_us == predict_us(candidate, shape, gpu_named("a100"))


def test_latent_cache_is_read_once() -> None:
    latent = Shape(16, 16, 1, 1, 16384, *LATENT_DIMS)
    assert us(latent) < us(Shape(16, 16, 1, 1, 16384, 576, 576))


def test_threads_of_a_hopper_block() -> None:
    one = Point.of({"consumer_warpgroups": 1, "split_blocks": 1, "combine_groups": 1})
    assert block_warps(one) == 5
    assert block_warps(one.replace(consumer_warpgroups=2)) == 12
    assert block_warps(Point.of({"consumer_warpgroups": 2})) == 12
