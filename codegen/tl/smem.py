"""Bytes of shared memory that a bound program asks for, buffer by buffer."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.tl.ast import Copy, Elem, Kernel, Memory, Program
from codegen.tl.flow import places
from codegen.tl.roles import scores_of
from space.tiles import row_pitch_bytes


@dataclass(frozen=True, slots=True)
class Buffer:
    """One shared-memory buffer: `copies` tiles of `tile_bytes` each."""

    name: str
    tile_bytes: int
    copies: int

    @property
    def bytes(self) -> int:
        """Bytes of all its tiles."""
        return self.tile_bytes * self.copies

    def __str__(self) -> str:
        times = f"{self.copies} x " if self.copies > 1 else ""
        return f"{self.name} {times}{self.tile_bytes}"


def buffers(program: Program, kernel: Kernel) -> tuple[Buffer, ...]:
    """Return the shared-memory buffers of one kernel at the program's parameters."""
    swizzle, stages = program.param("swizzle", 128), program.param("stages", 1)
    in_loop = {
        p.stmt.name
        for p in places(kernel.body)
        if isinstance(p.stmt, Copy) and p.stmt.dst is Memory.SHARED and p.loops
        and p.stmt.src is Memory.GLOBAL
    }  # fmt: skip
    found = [
        Buffer(
            t.name,
            t.rows * row_pitch_bytes(t.columns, swizzle),
            stages if t.name in in_loop else 1,
        )
        for t in kernel.tiles
        if t.memory is Memory.SHARED
    ]
    # warps that share rows hand P to each other
    if not program.param("p_in_registers", 1) or program.param("column_warps", 1) > 1:
        for name in scores_of(kernel.body):
            tile = kernel.tile(name, Memory.REGISTER)
            if tile is not None and kernel.tile(name, Memory.SHARED) is None:
                size = tile.rows * row_pitch_bytes(tile.columns, 0)
                found.append(Buffer(name, size, 1))
    return tuple(found)


def smem_bytes(program: Program, kernel: Kernel) -> int:
    """Return the shared memory one block of a kernel needs.

    With Q in registers, the keys' buffers lie over Q's, which is read before they are filled; in
    decode only those of a latent cache, whose Q is large. An output that goes out through shared
    memory lies over all of them.
    """
    resident = staged = scores = 0
    score_names = set(scores_of(kernel.body))
    loaded = {
        p.stmt.name
        for p in places(kernel.body)
        if isinstance(p.stmt, Copy) and p.stmt.dst is Memory.SHARED and p.loops
    }
    for buffer in buffers(program, kernel):
        if buffer.name in score_names:
            scores += buffer.bytes
        elif buffer.name in loaded:
            staged += buffer.bytes
        else:
            resident += buffer.bytes
    columns = program.param("column_warps", 0)
    if columns > 1:
        scores += 4 * program.param("BM") * columns  # a number of each row and warp
    overlap = program.param("q_in_registers", 0) and not (columns and len(loaded) > 1)
    total = (max(resident, staged) if overlap else resident + staged) + scores
    return max(total, _output_bytes(program, kernel))


def _output_bytes(program: Program, kernel: Kernel) -> int:
    """Return the bytes of the largest output tile, where outputs go through shared memory."""
    if not program.param("epilogue_smem", 0):
        return 0
    outputs = {t.name for t in kernel.tensors if t.output and t.elem is Elem.OPERAND}
    swizzle = program.param("swizzle", 128)
    sizes = [
        t.rows * row_pitch_bytes(t.columns, swizzle)
        for t in kernel.tiles
        if t.name in outputs and t.memory is Memory.REGISTER
    ]
    return max(sizes, default=0)
