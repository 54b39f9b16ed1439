"""Which names are row vectors: one number a row, broadcast over tiles."""

from __future__ import annotations

from codegen.tl.ast import (
    Allocate,
    Arith,
    Copy,
    Custom,
    Gemm,
    Memory,
    Name,
    walk,
)
from codegen.tl.evaluate import evaluate
from codegen.tl.flow import (
    Block,
    all_written,
    exposed,
    is_key_name,
    is_query_name,
)
from codegen.tl.vocabulary import ROW_OPS


def vectors_of(block: Block, allocations: tuple[Allocate, ...], known: frozenset[str]) -> set[str]:
    """Return the names that are row vectors: row reductions and what is computed from them.

    `known` are names that another kernel of the program made vectors.
    """
    tiles = _matrices(block, allocations)
    vectors: set[str] = set(known)
    for a in allocations:
        if len(a.shape) == 1 or (len(a.shape) == 2 and evaluate(a.shape[1], {}) == 1):
            vectors.add(a.name)
    defined = all_written(block) | exposed(block)
    while True:
        before = len(vectors)
        for stmt in walk(block):
            match stmt:
                case Custom(op=op, out=str(out)) if op in ROW_OPS:
                    vectors.add(out)
                case Custom(name=name, args=args):
                    names = {name, stmt.out or name}
                    names |= {a.id for a in args if isinstance(a, Name) and a.id in defined}
                    if stmt.op not in ("Mask", "Rescale", "Normalize", *ROW_OPS) and not (
                        names & tiles
                    ):
                        _spread(vectors, names)
                    if stmt.op in ("Rescale", "Normalize"):
                        vectors |= {a.id for a in args if isinstance(a, Name)} - tiles
                case Arith():
                    _arith_vectors(stmt, vectors, tiles, defined)
                case Copy(target=str(target)) if stmt.name not in tiles:
                    _spread(vectors, {stmt.name, target})
                case _:
                    pass
        if len(vectors) == before:
            return vectors - tiles


def _spread(vectors: set[str], names: set[str]) -> None:
    if vectors & names:
        vectors |= names


def _arith_vectors(
    stmt: Arith, vectors: set[str], tiles: set[str], defined: frozenset[str]
) -> None:
    second = stmt.b if isinstance(stmt.b, str) and stmt.b in defined else None
    if stmt.a in tiles:
        # what a tile is combined with, and is no tile itself, is one number a row; but only
        # when something in the program makes it
        if second is not None and second not in tiles and second in defined:
            vectors.add(second)
        return
    _spread(vectors, {stmt.a, stmt.out} | ({second} if second else set()))


def _matrices(block: Block, allocations: tuple[Allocate, ...]) -> set[str]:
    """Return the names that are surely matrices."""
    found: set[str] = set()
    for a in allocations:
        if len(a.shape) >= 2 and evaluate(a.shape[-1], {}) != 1:
            found.add(a.name)
    for stmt in walk(block):
        if isinstance(stmt, Gemm):
            found |= {stmt.a.name, stmt.b.name, stmt.out}
        elif isinstance(stmt, Copy):
            shaped = len(stmt.shape) == 2 and evaluate(stmt.shape[1], {}) != 1
            # `m` and `l` are no matrices, and neither is a Q that never leaves the registers
            moved = len(stmt.name) > 1 or Memory.GLOBAL in (stmt.src, stmt.dst)
            if shaped or (moved and (is_query_name(stmt.name) or is_key_name(stmt.name))):
                found.add(stmt.name)
        elif isinstance(stmt, Custom) and stmt.op in (*ROW_OPS, "Mask", "Softmax", "Scale"):
            found.add(stmt.name)
    while True:
        before = len(found)
        for stmt in walk(block):
            if isinstance(stmt, Arith) and stmt.a in found:
                found.add(stmt.out)
            elif isinstance(stmt, Custom) and stmt.op not in ROW_OPS and stmt.name in found:
                found.add(stmt.out or stmt.name)
            elif isinstance(stmt, Copy) and stmt.target and stmt.name in found:
                found.add(stmt.target)
        if len(found) == before:
            return found
