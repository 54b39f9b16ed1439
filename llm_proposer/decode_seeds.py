"""First points of decode searches: few rows against a long cache."""

from __future__ import annotations

from collections.abc import Mapping

from space.variant import Problem

Row = Mapping[str, int]


def _row(rows: int, keys: int, warps: int, columns: int, stages: int, **others: int) -> Row:
    return {
        "BM": rows, "BN": keys, "warps": warps, "column_warps": columns, "stages": stages,
        "q_in_registers": 1, "rescale_threshold": 8, "split_blocks": 2, "min_split_tiles": 1,
        "combine_groups": 4,
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


def _wgmma(keys: int, stages: int, **others: int) -> Row:
    """A row of the Hopper back end: 64 packed rows a block."""
    return {
        "BM": 64, "BN": keys, "stages": stages, "overlap": 1, "rescale_threshold": 8,
        "integer_max": 1, **others,
    }  # fmt: skip


def _own(keys: int, stages: int, **others: int) -> Row:
    """A row for V of its own: its blocks leave room for those that combine."""
    return _wgmma(keys, stages, combine_early=1, **others)


#: Large batches first, then the shapes whose splits are many and whose rows to combine are few.
_HOPPER_OWN_VALUES = (
    _own(64, 2, blocks_per_sm=2, split_blocks=2, evict_first=0),
    _own(64, 3, blocks_per_sm=2, split_blocks=2, evict_first=1, combine_groups=4),
    _own(64, 2, blocks_per_sm=2, split_blocks=1, evict_first=1),
    _own(64, 3, blocks_per_sm=2, split_blocks=1, evict_first=1, split_cluster=2),
    _own(
        64, 3, blocks_per_sm=2, split_blocks=1, min_split_tiles=2, evict_first=1, combine_groups=4
    ),
    _own(64, 3, blocks_per_sm=2, split_blocks=1, evict_first=1, combine_groups=16),
    _own(128, 2, split_blocks=1, evict_first=1, combine_groups=4),
    _own(64, 3, blocks_per_sm=2, split_blocks=1, evict_first=0),
    _own(64, 2, blocks_per_sm=2, split_blocks=2, evict_first=0, combine_groups=4),
    _own(128, 2, split_blocks=1, evict_first=0, combine_groups=4),
    _own(64, 3, blocks_per_sm=2, split_blocks=2, evict_first=0, overlap=0, combine_groups=4),
)
_HOPPER_LATENT = (
    _wgmma(64, 2, evict_first=0, min_split_tiles=2, q_panels=1),
    _wgmma(64, 2, evict_first=0, min_split_tiles=2, overlap=0, combine_groups=4, q_panels=1),
    _wgmma(64, 2, evict_first=0, min_split_tiles=2, combine_groups=4, combine_early=1),
    _wgmma(64, 2, evict_first=0, min_split_tiles=1, overlap=0),
    _wgmma(64, 2, evict_first=0, min_split_tiles=2, combine_groups=4),
    _wgmma(64, 2, evict_first=0, min_split_tiles=2, combine_groups=4, column_blocks=2),
    _wgmma(64, 2, evict_first=1, min_split_tiles=1, q_panels=1),
    _wgmma(64, 2, evict_first=1, min_split_tiles=2, combine_groups=4),
    _wgmma(64, 2, evict_first=0, min_split_tiles=2, overlap=0, combine_groups=8),
    _wgmma(32, 4, evict_first=0, min_split_tiles=4, combine_groups=4),
)


def hopper_decode_rows(problem: Problem) -> tuple[Row, ...]:
    """Return the rows of a decode problem on Hopper, the known-good one first."""
    return _HOPPER_LATENT if problem.latent else _HOPPER_OWN_VALUES
