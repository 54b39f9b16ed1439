"""Sizes that tiles of warp-level MMA have in common: atoms, chunks and rows in shared memory."""

from __future__ import annotations

WARP = 32
MMA_M = 16  #: rows of a warp-level MMA atom
MMA_N = 8  #: columns of a warp-level MMA atom
CHUNK_BYTES = 16  #: what one lane of cp.async or ldmatrix moves


def row_pitch_bytes(columns: int, swizzle: int) -> int:
    """Bytes from one row of a 16-bit shared-memory tile to the next.

    A swizzled row is exactly its columns. A padded row is an odd number of 16-byte chunks, so
    that eight consecutive rows start in eight different bank groups.
    """
    chunks = columns * 2 // CHUNK_BYTES
    if swizzle == 0 and chunks % 2 == 0:
        chunks += 1
    return chunks * CHUNK_BYTES
