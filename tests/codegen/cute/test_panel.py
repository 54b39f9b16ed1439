"""Panels of a Hopper tile: the swizzle that TMA writes is the one that the kernel's text reads."""

from __future__ import annotations

import pytest

from codegen.cute.panel import Panel
from space.hopper import SWIZZLES, padded

LINE_BYTES, CHUNK_BYTES = 128, 16


def place_of(address: int, swizzle: int) -> int:
    """Where TMA puts the chunk whose unswizzled address this is: bits 4.. are XORed with 7.."""
    chunks = swizzle // CHUNK_BYTES
    return address ^ (address // LINE_BYTES % chunks) * CHUNK_BYTES


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_the_text_puts_chunks_where_tma_does(swizzle: int) -> None:
    panel = Panel(swizzle)
    for row in range(64):
        for chunk in range(panel.chunks):
            own = eval(panel.swizzled(str(chunk), str(row)))  # C++ and Python agree on these
            wanted = place_of(row * swizzle + chunk * CHUNK_BYTES, swizzle)
            assert row * panel.row_bytes + own * CHUNK_BYTES == wanted


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_eight_rows_of_a_chunk_meet_every_bank_once(swizzle: int) -> None:
    for chunk in range(swizzle // CHUNK_BYTES):
        places = (place_of(row * swizzle + chunk * CHUNK_BYTES, swizzle) for row in range(8))
        assert len({p % LINE_BYTES for p in places}) == 8


def test_sizes_of_the_three_panels() -> None:
    sizes = [(p.columns, p.chunks, p.steps, p.core_bytes) for p in map(Panel, SWIZZLES)]
    assert sizes == [(64, 8, 4, 1024), (32, 4, 2, 512), (16, 2, 1, 256)]
    assert [Panel(s).count(96) for s in SWIZZLES] == [2, 3, 6]
    assert [padded(80, s) for s in SWIZZLES] == [128, 96, 80]
