"""The layout algebra: no two chunks collide, no bank conflicts, each element held once."""

from __future__ import annotations

import pytest

from codegen.cute.layout import Fragment, SharedLayout, ldmatrix_conflicts

COLUMNS = tuple(range(16, 257, 8))


def legal_swizzles(columns: int) -> list[int]:
    return [s for s in (128, 64, 32, 0) if s == 0 or columns * 2 % s == 0]


@pytest.mark.parametrize("columns", COLUMNS)
def test_addresses_are_distinct_and_inside(columns: int) -> None:
    for swizzle in legal_swizzles(columns):
        layout = SharedLayout(32, columns, swizzle)
        seen = {layout.offset(r, c) for r in range(32) for c in range(layout.chunks)}
        assert len(seen) == 32 * layout.chunks
        assert min(seen) >= 0 and max(seen) + 16 <= layout.bytes
        assert all(offset % 16 == 0 for offset in seen)


@pytest.mark.parametrize("columns", COLUMNS)
def test_padding_never_conflicts(columns: int) -> None:
    layout = SharedLayout(8, columns, 0)
    assert max(ldmatrix_conflicts(layout, c) for c in range(layout.chunks)) == 1


@pytest.mark.parametrize("columns", [c for c in COLUMNS if c * 2 % 128 == 0])
def test_full_swizzle_never_conflicts(columns: int) -> None:
    layout = SharedLayout(8, columns, 128)
    assert max(ldmatrix_conflicts(layout, c) for c in range(layout.chunks)) == 1


@pytest.mark.parametrize(
    ("columns", "swizzle", "conflicts"), [(96, 64, 1), (128, 64, 2), (16, 32, 1), (128, 32, 4)]
)
def test_narrow_swizzles_conflict_where_the_pitch_is_wide(
    columns: int, swizzle: int, conflicts: int
) -> None:
    layout = SharedLayout(8, columns, swizzle)
    assert max(ldmatrix_conflicts(layout, c) for c in range(layout.chunks)) == conflicts


@pytest.mark.parametrize("columns", COLUMNS)
def test_stepping_by_period_reaches_the_same_chunk(columns: int) -> None:
    """What the emitted lane addresses rely on: lanes[k % period] + k / period * span."""
    for swizzle in legal_swizzles(columns):
        layout = SharedLayout(8, columns, swizzle)
        for row in range(8):
            for half in (0, 1):
                shift, mask = layout.xor_shift_mask
                base = half ^ ((row >> shift) & mask)
                for k in range(layout.chunks // 2):
                    lane = row * layout.pitch + (base * 16 ^ (k % layout.period) * 32)
                    at = lane + k // layout.period * layout.period * 32
                    assert at == layout.offset(row, 2 * k + half)


@pytest.mark.parametrize(("rows", "columns", "warps"), [(64, 16, 4), (128, 64, 4), (256, 24, 8)])
def test_every_element_is_held_by_one_lane(rows: int, columns: int, warps: int) -> None:
    f = Fragment(rows, columns, warps)
    held = [
        f.element(w, lane, m, n, e)
        for w in range(warps)
        for lane in range(32)
        for m in range(f.m_atoms)
        for n in range(f.n_atoms)
        for e in range(4)
    ]
    assert len(held) == len(set(held)) == rows * columns
    assert set(held) == {(r, c) for r in range(rows) for c in range(columns)}
