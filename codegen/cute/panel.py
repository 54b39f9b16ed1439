"""How a tile lies in a Hopper block's shared memory: in panels, each row one swizzle wide."""

from __future__ import annotations

from dataclasses import dataclass

from space.hopper import ELEMENT_BYTES, MMA_STEP, SWIZZLES
from space.tiles import CHUNK_BYTES

CORE_ROWS = 8  #: rows of a core matrix, after which the swizzle repeats
#: a wgmma descriptor's name of the swizzle
LAYOUT_TYPES = {128: 1, 64: 2, 32: 3}


@dataclass(frozen=True, slots=True)
class Panel:
    """Rows of `row_bytes` bytes, their 16-byte chunks swizzled over the rows of a core matrix."""

    row_bytes: int = SWIZZLES[0]

    @property
    def columns(self) -> int:
        """Columns of a row."""
        return self.row_bytes // ELEMENT_BYTES

    @property
    def chunks(self) -> int:
        """Chunks of 16 bytes, or 8 columns, of a row."""
        return self.row_bytes // CHUNK_BYTES

    @property
    def steps(self) -> int:
        """Steps of one wgmma along a row."""
        return self.columns // MMA_STEP

    @property
    def core_bytes(self) -> int:
        """Bytes of eight rows, the period of the swizzle."""
        return CORE_ROWS * self.row_bytes

    @property
    def layout_type(self) -> int:
        """The swizzle's code in a wgmma descriptor."""
        return LAYOUT_TYPES[self.row_bytes]

    def count(self, columns: int) -> int:
        """Panels that hold `columns`; what they hold past them is zero."""
        return -(-columns // self.columns)

    def swizzled(self, chunk: str, row: str) -> str:
        """C++ for the place in its row of a chunk of `row`."""
        shift = (CORE_ROWS // self.chunks).bit_length() - 1
        shifted = f"{row} >> {shift}" if shift else row
        return f"(({chunk}) ^ ({shifted} & {self.chunks - 1}))"
