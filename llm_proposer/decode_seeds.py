"""First points of decode searches on warp-level MMA: few rows, warps that share them."""

from __future__ import annotations

from collections.abc import Mapping

from space.variant import Problem

Row = Mapping[str, int]


def _row(rows: int, keys: int, warps: int, columns: int, stages: int, **others: int) -> Row:
    return {
        "BM": rows, "BN": keys, "warps": warps, "column_warps": columns, "stages": stages,
        "q_in_registers": 1, "rescale_threshold": 8, "split_blocks": 2, "min_split_tiles": 1,
        **others,
    }  # fmt: skip


#: One row block for every KV head: the keys' bytes are all there is to move.
_OWN_VALUES = (
    _row(16, 64, 4, 4, 2, q_in_registers=0),
    _row(16, 64, 4, 4, 2, blocks_per_sm=2),
    _row(16, 32, 4, 4, 4, blocks_per_sm=2),
    _row(16, 64, 4, 4, 3, blocks_per_sm=2),
    _row(16, 32, 4, 4, 2, blocks_per_sm=4, split_blocks=4),
    _row(16, 128, 8, 8, 1, blocks_per_sm=2),
    _row(32, 64, 8, 4, 2, blocks_per_sm=2),
    _row(64, 64, 8, 2, 2),
)
#: 512 output columns: 4 warps share them, and more rows use a tile of keys more often.
_LATENT = (
    _row(16, 32, 4, 4, 2, q_in_registers=0, split_blocks=1),
    _row(32, 32, 8, 4, 2, q_in_registers=0, split_blocks=1),
    _row(64, 32, 8, 4, 2, q_in_registers=0, split_blocks=1),
    _row(16, 16, 4, 4, 3, q_in_registers=0, split_blocks=1),
    _row(32, 16, 8, 8, 4, q_in_registers=0, split_blocks=1),
    _row(64, 64, 8, 4, 2, q_in_registers=0, split_blocks=1),
)


def mma_decode_rows(problem: Problem) -> tuple[Row, ...]:
    """Return the rows of a decode problem, the known-good one first."""
    return _LATENT if problem.latent else _OWN_VALUES
