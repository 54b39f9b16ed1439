"""The tensors and tiles of a bound kernel: what is in global memory, what each level holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from codegen.tl.ast import (
    Allocate,
    Copy,
    Elem,
    Gemm,
    Memory,
    Rows,
    Tensor,
    Tile,
    walk,
)
from codegen.tl.dims import Sizes
from codegen.tl.flow import Block, is_output_name, written
from codegen.tl.kinds import Kind

_F32 = frozenset({"f32", "fp32", "float", "float32"})


def loads_of(block: Block) -> frozenset[str]:
    """Return the names that a kernel copies out of global memory."""
    return frozenset(s.name for s in walk(block) if isinstance(s, Copy) and s.src is Memory.GLOBAL)


def tensors_of(
    block: Block,
    sizes: Sizes,
    kinds: Mapping[str, Kind],
    allocations: tuple[Allocate, ...],
    stored: Mapping[str, Tensor],
    read_later: frozenset[str],
    depth: int,
) -> tuple[Tensor, ...]:
    """Return a kernel's global tensors in order of use.

    `stored` are workspaces of earlier kernels and `read_later` what later ones read; `depth` is
    the number of columns of a tensor that is tiled along them.
    """
    dtypes = {a.name: a.dtype for a in allocations if a.memory is Memory.GLOBAL}
    loaded = loads_of(block)
    found: dict[str, Tensor] = {}
    for stmt in walk(block):
        if not isinstance(stmt, Copy) or Memory.GLOBAL not in (stmt.src, stmt.dst):
            continue
        name = stmt.name
        if name in stored:
            found[name] = replace(stored[name], output=False)
            continue
        output = stmt.dst is Memory.GLOBAL
        # state that a kernel reads back, and is no output by its name, is its own
        kept = output and (name in read_later or (name in loaded and not is_output_name(name)))
        column = sizes.axis(name, 1)
        columns: int | str = column.size or 0
        if any(c.axis == "D" for c in stmt.coords):
            columns = "N" if column.kind is Kind.KEY else depth
        f32 = kept or column.size == 1 or (dtypes.get(name) or "") in _F32
        before = found.get(name)
        found[name] = Tensor(
            name,
            Rows.QUERY if kinds[name] is Kind.QUERY else Rows.KEY,
            columns,
            Elem.F32 if f32 else Elem.OPERAND,
            (output and not kept) or (before is not None and before.output),
            tuple(c.axis for c in stmt.coords if c.axis not in ("L", "D")),
            kept or (before is not None and before.workspace),
        )
    return tuple(found.values())


def tiles_of(block: Block, sizes: Sizes, stored: Mapping[str, Tensor]) -> tuple[Tile, ...]:
    """Return every tile at every level that holds it, in order of use."""
    computed = {s.out for s in walk(block) if isinstance(s, Gemm)}
    moved_in = {
        s.name for s in walk(block) if isinstance(s, Copy) and s.src not in (None, Memory.REGISTER)
    }
    tiles: list[Tile] = []
    for name, memory in _levels(block):
        rows, columns = (sizes.axis(name, n).size or 1 for n in (0, 1))
        # sums are f32 wherever they come from, and so is what was f32 in global memory
        operand = memory is Memory.SHARED or (name in moved_in and name not in computed)
        operand = operand and name not in stored and columns > 1
        tiles.append(Tile(name, memory, rows, columns, Elem.OPERAND if operand else Elem.F32))
    return tuple(tiles)


def _levels(block: Block) -> dict[tuple[str, Memory], None]:
    levels: dict[tuple[str, Memory], None] = {}
    for stmt in walk(block):
        if isinstance(stmt, Copy) and stmt.src is not None:
            for memory in (stmt.src, stmt.dst):
                if memory in (Memory.SHARED, Memory.REGISTER):
                    levels[stmt.name, memory] = None
        elif isinstance(stmt, Copy) and stmt.target is not None:
            levels[stmt.target, Memory.REGISTER] = None
            levels[stmt.name, Memory.REGISTER] = None
        elif (name := written(stmt)) is not None and not _only_shared(name, block):
            levels[name, Memory.REGISTER] = None
    return levels


def _only_shared(name: str, block: Block) -> bool:
    """Whether a tile changed in place lives in shared memory only (a scaled Q)."""
    held = {
        s.dst for s in walk(block) if isinstance(s, Copy) and s.name == name and s.dst is not None
    }
    return (
        Memory.SHARED in held
        and Memory.REGISTER not in held
        and not any(isinstance(s, Gemm) and s.out == name for s in walk(block))
    )
