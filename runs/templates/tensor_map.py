"""TMA descriptors: how a kernel's bulk copies see a [batch, rows, heads, columns] tensor."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

BYTES, ALIGNMENT = 128, 64  #: of a descriptor
ELEMENT_BYTES = 2
STRIDE_BYTES = 16  #: strides are multiples of it

# Values of the driver's enumerations. Elements are moved, never computed with, so that 16-bit
# whole numbers stand for either float type; what lies outside the tensor reads as zero bits.
# With 256 bytes fetched into the L2 at a time, decode with 8 KV heads was 6% slower.
_UINT16, _NO_INTERLEAVE, _L2_128B, _ZERO_FILL = 1, 0, 2, 0
_SWIZZLES = {64: 3, 32: 2, 16: 1}  # by the columns of a box: 128, 64 and 32 bytes
_NO_SWIZZLE = 0


class Encoder:
    """The driver's two calls that write descriptors, on memory of our own.

    The bindings' descriptor object need not lie on 64 bytes, which the driver insists on.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def encode(
        self,
        target: int,
        address: int,
        sizes: Sequence[int],
        strides: Sequence[int],
        box: tuple[int, int],
        pack: int = 1,
        group: int = 1,
    ) -> int:
        """Write the descriptor of a tensor to address `target`; returns the driver's code.

        `sizes` are batch, rows, heads, columns; `strides` of the first three, in elements; `box`
        the columns and rows of one copy, swizzled by the bytes of its columns: 128, 64 or 32.

        With `pack` above 1 a copy also moves so many neighbours of the `group` heads that share a
        KV head, those of each row before the next row's: the map is of (columns, group, rows, KV
        heads, batch), so that no copy reaches into another group.
        """
        b, s, h, columns = sizes
        # (length, elements from one to the next, length in the box) of the axes behind the columns
        axes = [(s, strides[1], box[1]), (h, strides[2], 1), (b, strides[0], 1)]
        if pack > 1:
            axes[1] = (h // group, strides[2] * group, 1)
            axes.insert(0, (group, strides[2], pack))
        rank = len(axes) + 1
        # an axis of no length is described as one: a kernel has no tile to read of it
        extents = (ctypes.c_uint64 * rank)(max(columns, 1), *(max(n, 1) for n, _, _ in axes))
        steps = (ctypes.c_uint64 * (rank - 1))(*(_step(n, stride) for n, stride, _ in axes))
        boxes = (ctypes.c_uint32 * rank)(box[0], *(n for _, _, n in axes))
        ones = (ctypes.c_uint32 * rank)(*(1 for _ in range(rank)))
        return int(
            self._library.cuTensorMapEncodeTiled(
                ctypes.c_void_p(target), _UINT16, rank, ctypes.c_void_p(address), extents, steps,
                boxes, ones, _NO_INTERLEAVE, _SWIZZLES.get(box[0], _NO_SWIZZLE), _L2_128B,
                _ZERO_FILL,
            )
        )  # fmt: skip

    def move(self, target: int, address: int) -> int:
        """Point the descriptor at `target` to another address; returns the driver's code."""
        return int(
            self._library.cuTensorMapReplaceAddress(
                ctypes.c_void_p(target), ctypes.c_void_p(address)
            )
        )


def _step(size: int, stride: int) -> int:
    """Bytes between neighbours on an axis; that of an axis of one element means nothing."""
    return stride * ELEMENT_BYTES if size > 1 else STRIDE_BYTES


@functools.cache
def encoder() -> Encoder:
    """Return the encoder of this machine's driver. Raises OSError when there is no driver."""
    return Encoder(ctypes.CDLL("libcuda.so.1"))


def buffer(count: int) -> tuple[ctypes.Array[ctypes.c_ubyte], int]:
    """Return memory for `count` descriptors and the aligned address of the first."""
    memory = (ctypes.c_ubyte * (count * BYTES + ALIGNMENT))()
    return memory, -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT
