"""The layout algebra: which address a tile's element has, and which lane holds it.

Shared tiles hold 16-bit elements, row-major, in chunks of 16 bytes (8 elements): what one lane of
ldmatrix or cp.async moves. Register tiles have the accumulator layout of the m16n8 MMA atoms.
"""

from __future__ import annotations

from dataclasses import dataclass

from space.tiles import CHUNK_BYTES, row_pitch_bytes

CHUNK_ELEMENTS = 8
BANK_BYTES = 4
BANKS = 32


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """Address map of a (rows, columns) tile of 16-bit elements in shared memory.

    `swizzle` bytes (128, 64, 32) permute the chunks of a row by the row's number so that eight
    rows of one chunk column fall in different banks; 0 pads the row to an odd chunk count.
    """

    rows: int
    columns: int
    swizzle: int

    @property
    def pitch(self) -> int:
        """Bytes from one row to the next."""
        return row_pitch_bytes(self.columns, self.swizzle)

    @property
    def chunks(self) -> int:
        """16-byte chunks of data in a row."""
        return self.columns // CHUNK_ELEMENTS

    @property
    def bytes(self) -> int:
        """Size of the tile."""
        return self.rows * self.pitch

    @property
    def xor_shift_mask(self) -> tuple[int, int]:
        """(shift, mask) of the chunk permutation: chunk ^ ((row >> shift) & mask)."""
        return {128: (0, 7), 64: (1, 3), 32: (2, 1), 0: (0, 0)}[self.swizzle]

    def offset(self, row: int, chunk: int) -> int:
        """Byte offset of a chunk."""
        shift, mask = self.xor_shift_mask
        return row * self.pitch + (chunk ^ ((row >> shift) & mask)) * CHUNK_BYTES

    def xor_text(self, row: str) -> str:
        """C++ for the chunk permutation of `row`."""
        shift, mask = self.xor_shift_mask
        if not mask:
            return "0"
        return f"(({row} >> {shift}) & {mask})" if shift else f"({row} & {mask})"

    def offset_text(self, row: str, chunk: str) -> str:
        """C++ for `offset(row, chunk)`."""
        xor = self.xor_text(row)
        at = chunk if xor == "0" else f"({chunk} ^ {xor})"
        return f"{row} * {self.pitch} + {at} * {CHUNK_BYTES}"

    @property
    def period(self) -> int:
        """Steps of 16 columns after which the chunk permutation repeats; each needs an address."""
        return max(self.swizzle // 32, 1)

    def step_text(self, lanes: str, pair: str, first: int = 0) -> str:
        """C++ for a lane's address at `pair` steps of 16 columns after step `first`.

        `lanes` is the array of the lane's addresses within one period; whole periods are added and
        become immediate offsets of ldmatrix.
        """
        at = f"({pair} + {first})" if first else pair
        if self.period == 1:
            return f"{lanes}[0] + {at} * 32"
        return f"{lanes}[{at} % {self.period}] + {at} / {self.period} * {self.period * 32}"


def ldmatrix_conflicts(layout: SharedLayout, chunk: int) -> int:
    """Worst number of the eight rows of an 8x8 matrix at `chunk` that share a bank group."""
    groups = [layout.offset(row, chunk) // CHUNK_BYTES % (BANKS * BANK_BYTES // CHUNK_BYTES)
              for row in range(8)]  # fmt: skip
    return max(groups.count(g) for g in groups)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Accumulator layout of a (rows, columns) tile over `warps` warps, one block of rows each.

    Lane l of a warp holds, in atom (m, n), elements e = 0..3 at row 16m + 8(e >> 1) + l / 4 and
    column 8n + 2(l % 4) + (e & 1).
    """

    rows: int
    columns: int
    warps: int

    @property
    def rows_per_warp(self) -> int:
        """Rows of one warp."""
        return self.rows // self.warps

    @property
    def m_atoms(self) -> int:
        """MMA atoms down a warp's rows."""
        return self.rows_per_warp // 16

    @property
    def n_atoms(self) -> int:
        """MMA atoms across the columns."""
        return self.columns // 8

    def element(self, warp: int, lane: int, m: int, n: int, e: int) -> tuple[int, int]:
        """(row, column) of an element a lane holds."""
        row = warp * self.rows_per_warp + 16 * m + 8 * (e >> 1) + lane // 4
        return row, 8 * n + 2 * (lane % 4) + (e & 1)
