"""The decode space of warp-level MMA: what is legal where, and why not."""

from __future__ import annotations

import pytest

from space.constraints import Backend, is_hopper, smem_bytes, space_for, violated
from space.decode_mma import mma_decode_registers, uneven_share
from space.gpu import GPUS
from space.legal import legal_points
from space.params import Point
from space.variant import LATENT_DIMS, DType, Phase, Problem

GQA = Problem("gqa", DType.FP16, 128, 128, False, Phase.DECODE)
MLA = Problem("mla", DType.FP16, *LATENT_DIMS, False, Phase.DECODE)
POINT = Point.of(
    {
        "BM": 16, "BN": 32, "warps": 4, "column_warps": 4, "stages": 2, "swizzle": 128,
        "q_in_registers": 0, "rescale_threshold": 8, "blocks_per_sm": 1, "split_blocks": 1,
        "min_split_tiles": 1, "combine_groups": 4,
    }
)  # fmt: skip


def test_the_space_of_decode_is_its_own() -> None:
    for gpu in ("t4", "a100", "l40s", "h200"):
        space = space_for(GQA, GPUS[gpu], Backend.MMA_SYNC)
        assert space.names == tuple(n for n, _ in POINT.items)
    assert space_for(GQA, GPUS["t4"]).param("stages").choices == (1,), "no asynchronous copies"
    prefill = Problem("gqa", DType.FP16, 128, 128, False)
    assert "column_warps" not in space_for(prefill, GPUS["a100"]).names
    assert not is_hopper(POINT)


def test_shared_memory_of_a_latent_tile_counts_it_once() -> None:
    q, k = 16 * 1152, 2 * 32 * 1152
    exchange = 16 * (64 + 16) + 4 * 16 * 4  # P, padded, and a number for each row and warp
    assert smem_bytes(MLA, POINT) == q + k + exchange
    # in registers Q's bytes are K's: the larger counts
    assert smem_bytes(MLA, POINT.replace(q_in_registers=1)) == k + exchange
    own = 16 * 256 + 2 * 32 * (256 + 256) + exchange
    assert smem_bytes(GQA, POINT) == own
    assert smem_bytes(GQA, POINT.replace(q_in_registers=1)) == own, "K is loaded beside Q"


@pytest.mark.parametrize(
    ("gpu", "problem", "changes", "name"),
    [
        ("a100", GQA, {"warps": 2}, "warp_grid"),
        ("a100", GQA, {"column_warps": 2}, "warp_grid"),
        ("a100", GQA, {"BN": 16}, "columns_shared"),
        ("a100", Problem("gqa", DType.FP16, 96, 96, False, Phase.DECODE), {"swizzle": 64},
         "columns_shared"),
        ("l40s", MLA, {"BN": 64}, "fits_smem"),
        ("a100", MLA, {"warps": 2, "column_warps": 2, "q_in_registers": 1}, "fits_registers"),
        ("l40s", MLA, {"blocks_per_sm": 2}, "fits_sm"),
        ("l40s", MLA, {"combine_groups": 16}, "fits_combine"),
    ],
)  # fmt: skip
def test_a_point_that_does_not_fit_is_named(
    gpu: str, problem: Problem, changes: dict[str, int], name: str
) -> None:
    assert violated(GQA, POINT, GPUS["a100"]) is None
    found = violated(problem, POINT.replace(**changes), GPUS[gpu])
    assert found is not None and found[0] == name


@pytest.mark.parametrize("gpu", ["a100", "l40s", "h200"])
def test_absorbed_mla_fits_where_four_warps_share_its_columns(gpu: str) -> None:
    assert violated(MLA, POINT, GPUS[gpu]) is None
    legal = legal_points(MLA, GPUS[gpu], space_for(MLA, GPUS[gpu], Backend.MMA_SYNC))
    assert POINT in legal and len(legal) > 100
    assert all(core["column_warps"] > 1 for core in legal.cores), "512 columns are too many for one"


def test_copies_through_registers_take_registers() -> None:
    staged = mma_decode_registers(GQA, POINT, staged=True)
    chunks = 32 * 32 // 128  # 16-byte chunks of K and V a thread
    assert staged >= mma_decode_registers(GQA, POINT) + 4 * chunks


def test_shares_of_a_swizzled_row_start_where_the_swizzle_does() -> None:
    assert uneven_share(GQA, POINT) is None  # 64 bytes each, half a swizzled line
    assert uneven_share(GQA, POINT.replace(BN=64, column_warps=8)) is None
    wide = Problem("gqa", DType.FP16, 192, 192, False, Phase.DECODE)
    assert uneven_share(wide, POINT) is not None  # 96 bytes each
    assert uneven_share(wide, POINT.replace(swizzle=0)) is None
