"""A sketch as kernels with the names that every program shares and coordinates filled in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from codegen.tl.ast import (
    Allocate,
    Arith,
    Coord,
    Copy,
    Custom,
    Expr,
    For,
    Gemm,
    If,
    Memory,
    Name,
    Param,
    Sketch,
    Stmt,
    walk,
)
from codegen.tl.flow import (
    Block,
    Place,
    is_key_name,
    is_query_name,
    map_exprs,
    names_in,
    places,
    reads,
    rename,
    rename_expr,
    rewrite,
    tile_arguments,
    written,
)
from codegen.tl.vocabulary import (
    BLOCK_COLUMN,
    BLOCK_ROW,
    is_block_column,
    is_block_row,
    is_scale,
)


@dataclass(frozen=True, slots=True)
class RawKernel:
    """One kernel of a sketch: its own statements, and the program's allocations."""

    allocations: tuple[Allocate, ...]
    block: Block


def prepare(sketch: Sketch, declared: frozenset[str]) -> tuple[RawKernel, ...]:
    """Split a sketch into kernels and give indices, tiles and coordinates their shared names."""
    allocations = tuple(s for s in sketch.statements if isinstance(s, Allocate))
    rest = tuple(s for s in sketch.statements if not isinstance(s, Allocate | Param))
    kernels = []
    for block in split_kernels(commuted(rest)):
        block = rename_indices(block, declared)
        block = tile_names(block)
        block = _running_state(_direct_output(block))
        block = _coordinates(_without_grid_loops(block))
        kernels.append(RawKernel(allocations, block))
    return tuple(kernels)


def commuted(block: Block) -> Block:
    """`Multiply alpha, O and get new O` is `Multiply O, alpha and get new O`."""

    def change(stmt: Stmt) -> Stmt:
        if not isinstance(stmt, Arith) or stmt.op not in ("Add", "Multiply"):
            return stmt
        if not isinstance(stmt.b, str) or stmt.a == stmt.b:
            return stmt
        second_is_changed = stmt.b == stmt.out != stmt.a
        if second_is_changed or (is_scale(stmt.a) and not is_scale(stmt.b)):
            return replace(stmt, a=stmt.b, b=stmt.a)
        return stmt

    return rewrite(block, change)


def _without_grid_loops(block: Block) -> Block:
    """A loop around the whole kernel, over row blocks or heads, is the grid's."""
    while True:
        loops = [s for s in block if isinstance(s, For)]
        outer = loops[0] if len(loops) == 1 else None
        if outer is None or not any(
            isinstance(s, Copy) and s.dst is Memory.GLOBAL for s in outer.body
        ):
            return block
        used = {
            n
            for s in walk(outer.body)
            if isinstance(s, Copy)
            for c in s.coords
            for n in names_in(c.index)
        }
        if outer.var in used or any(_loads_keys(s) for s in outer.body):
            rows = outer.var in used and not any(_loads_keys(s) for s in outer.body)
            inner = any(isinstance(s, For) for s in outer.body)
            if not (rows and inner):
                return block
        elif not any(isinstance(s, For) for s in outer.body):
            return block
        at = block.index(outer)
        body = rename(outer.body, {outer.var: BLOCK_ROW})
        block = (*block[:at], *body, *block[at + 1 :])


def _loads_keys(stmt: Stmt) -> bool:
    return isinstance(stmt, Copy) and stmt.src is Memory.GLOBAL and is_key_name(stmt.name)


def split_kernels(block: Block) -> tuple[Block, ...]:
    """Split statements where one kernel has stored its results and another begins."""
    kernels: list[list[Stmt]] = [[]]
    stored = False
    for position, stmt in enumerate(block):
        stores = isinstance(stmt, Copy) and stmt.dst is Memory.GLOBAL
        later = any(isinstance(s, Copy) and s.dst is Memory.GLOBAL for s in walk(block[position:]))
        begins = isinstance(stmt, For) or (isinstance(stmt, Copy) and stmt.src is Memory.GLOBAL)
        if stored and begins and later:
            kernels.append([])
            stored = False
        stored = stored or stores
        kernels[-1].append(stmt)
    return tuple(tuple(k) for k in kernels)


def rename_indices(block: Block, declared: frozenset[str]) -> Block:
    """Give the block's row and column index their names, wherever expressions use them."""
    bound = {s.var for s in walk(block) if isinstance(s, For)} | set(declared)
    used: set[str] = set()

    def note(expr: Expr) -> Expr:
        used.update(names_in(expr))
        return expr

    for stmt in walk(block):
        if isinstance(stmt, Copy | For | If):
            map_exprs(stmt, note)
    names: dict[str, str] = {}
    for name in used - bound:
        if is_block_row(name):
            names[name] = BLOCK_ROW
        elif is_block_column(name):
            names[name] = BLOCK_COLUMN
    return rewrite(block, lambda s: map_exprs(s, lambda e: rename_expr(e, names)))


def tile_names(block: Block) -> Block:
    """`Copy K from global to shared K_s`: the tile is K's, whatever it is called."""
    names = {
        s.target: s.name
        for s in walk(block)
        if isinstance(s, Copy) and s.target and s.src is not None
    }
    if not names:
        return block
    renamed = rename(block, names)
    return rewrite(
        renamed,
        lambda s: replace(s, target=None) if isinstance(s, Copy) and s.src is not None else s,
    )


def _direct_output(block: Block) -> Block:
    """A path of the output through shared memory is a hint: it becomes one Copy to global."""
    stored = {s.name for s in walk(block) if isinstance(s, Copy) and s.dst is Memory.GLOBAL}
    staged = {
        s.name
        for s in walk(block)
        if isinstance(s, Copy)
        and (s.src, s.dst) == (Memory.REGISTER, Memory.SHARED)
        and s.name in stored
    }

    def change(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, Copy) or stmt.name not in staged:
            return stmt
        if (stmt.src, stmt.dst) == (Memory.REGISTER, Memory.SHARED):
            return None
        if (stmt.src, stmt.dst) == (Memory.SHARED, Memory.GLOBAL):
            return replace(stmt, src=Memory.REGISTER)
        return stmt

    return rewrite(block, change)


def _running_state(block: Block) -> Block:
    """State kept in global, read as `m` and stored as `m_new`, is one tensor: m."""
    loaded = {s.name for s in walk(block) if isinstance(s, Copy) and s.src is Memory.GLOBAL}
    stored = {s.name for s in walk(block) if isinstance(s, Copy) and s.dst is Memory.GLOBAL}
    state = {f"{n}_new": n for n in loaded - stored if f"{n}_new" in stored - loaded}

    def change(stmt: Stmt) -> Stmt | Block:
        if isinstance(stmt, Copy) and stmt.dst is Memory.GLOBAL and stmt.name in state:
            old = state[stmt.name]
            renaming = Copy(stmt.name, target=old, span=stmt.span)
            return (renaming, replace(stmt, name=old))
        return stmt

    return rewrite(block, change)


def _coordinates(block: Block) -> Block:
    """Fill in the coordinate of each global Copy that has none."""
    around: Mapping[int, Place] = {id(p.stmt): p for p in places(block)}
    storing = {
        v
        for p in places(block)
        if isinstance(p.stmt, Copy) and p.stmt.dst is Memory.GLOBAL
        for v in p.loops[-1:]
    }

    biases = _biases(block)

    def change(stmt: Stmt) -> Stmt:
        if not isinstance(stmt, Copy) or Memory.GLOBAL not in (stmt.src, stmt.dst):
            return stmt
        place = around.get(id(stmt))
        loops = place.loops if place else ()
        if stmt.coords:
            return stmt
        if stmt.index:
            return replace(stmt, coords=(Coord("L", stmt.index[0]),), index=())
        if stmt.name in biases and loops:
            key = Coord("D", Name(loops[-1]))
            return replace(stmt, coords=(Coord("L", Name(BLOCK_ROW)), key))
        return replace(stmt, coords=_default(stmt, loops, storing))

    return rewrite(block, change)


def _biases(block: Block) -> frozenset[str]:
    """Return tensors that are added to scores: a tile of query rows by key rows."""
    outs = {s.out for s in walk(block) if isinstance(s, Gemm) and not s.accumulate}
    found: set[str] = set()
    for stmt in walk(block):
        if isinstance(stmt, Custom) and stmt.op == "Mask":
            found.update(tile_arguments(stmt))
        elif isinstance(stmt, Arith) and stmt.op == "Add" and stmt.a in outs:
            found.update({stmt.b} if isinstance(stmt.b, str) else ())
    return frozenset(found - scalar_loads(block))


def _default(stmt: Copy, loops: tuple[str, ...], storing: set[str]) -> tuple[Coord, ...]:
    """Return where an unplaced Copy reads: keys by the loop, queries and outputs by the block.

    Queries and outputs are placed by the loop only when that loop also stores results.
    """
    own_row = (Coord("L", Name(BLOCK_ROW)),)
    if not loops:
        return own_row
    var = loops[-1]
    split = re.fullmatch(r"\w+_(\w+)", stmt.name)
    if split and split.group(1) == var:  # O_s inside `for s`: one split's part of the block's rows
        return (*own_row, Coord("splits", Name(var)))
    if is_query_name(stmt.name) and var not in storing:
        return own_row
    return (Coord("L", Name(var)),)


def scalar_loads(block: Block) -> frozenset[str]:
    """Return names copied from global to register, outside loops, that are second operands only."""
    moves = [p for p in places(block) if isinstance(p.stmt, Copy)]
    loaded = {
        p.stmt.name
        for p in moves
        if isinstance(p.stmt, Copy)
        and (p.stmt.src, p.stmt.dst) == (Memory.GLOBAL, Memory.REGISTER)
        and not p.loops
    }
    for stmt in walk(block):
        if isinstance(stmt, Arith):
            loaded -= {stmt.a, stmt.out}
        elif not (isinstance(stmt, Copy) and stmt.src is Memory.GLOBAL):
            loaded -= {*reads(stmt), written(stmt) or ""}
    return frozenset(n for n in loaded if not (is_query_name(n) or is_key_name(n)))
