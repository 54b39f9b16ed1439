"""Results that take the place of a tile no longer needed get that tile's name."""

from __future__ import annotations

from dataclasses import replace

from codegen.tl.ast import (
    Arith,
    Copy,
    Custom,
    For,
    Memory,
    Reshape,
    Stmt,
    walk,
)
from codegen.tl.flow import (
    Block,
    Place,
    exposed,
    places,
    reads,
    rename,
    rewrite,
    written,
)
from codegen.tl.vocabulary import ROW_OPS


def merge_names(block: Block, kept: frozenset[str]) -> Block:
    """Results that take the place of a tile no longer needed get that tile's name.

    `Softmax S and get P`, `Cast S and get P`, `Copy S_next to S`. Names in `kept` stay.
    """
    while (pair := _mergeable(block, kept)) is not None:
        stmt, old, new = pair
        block = rename(rewrite(block, lambda s, t=stmt: _in_place(s) if s is t else s), {new: old})  # type: ignore[misc]
    return rewrite(block, _in_place_of_itself)


def _in_place(stmt: Stmt) -> Stmt | None:
    match stmt:
        case Copy() | Custom(op="Cast"):
            return None
        case Custom():
            return replace(stmt, out=None, new=False)
        case Arith():
            return replace(stmt, out=stmt.a, new=True)
        case _:
            return stmt


def _in_place_of_itself(stmt: Stmt) -> Stmt | None:
    match stmt:
        case Custom(op="Cast", out=None):
            return None
        case Custom(out=str(out)) if out == stmt.name and stmt.op not in ROW_OPS:
            return replace(stmt, out=None, new=False)
        case Copy(target=str(target)) if target == stmt.name:
            return None
        case Arith() if stmt.out == stmt.a and not stmt.new:
            return replace(stmt, new=True)
        case _:
            return stmt


def _mergeable(block: Block, kept: frozenset[str]) -> tuple[Stmt, str, str] | None:
    order = list(places(block))
    for position, place in enumerate(order):
        match place.stmt:
            case Custom(name=old, out=str(new), op=op) if op not in ROW_OPS:
                pass
            case Arith(a=old, out=new):
                pass
            case Copy(name=old, target=str(new), src=None):
                pass
            case _:
                continue
        if old == new or old in kept or new in kept:
            continue
        before = [p.stmt for p in order[:position]]
        after = [p.stmt for p in order[position + 1 :]]
        if any(old in reads(s) or _names_global(s, old) for s in after):
            continue
        if any(new in reads(s) or written(s) == new for s in before):
            continue
        if sum(written(s) == new and not isinstance(s, Reshape) for s in _definitions(order)) != 1:
            continue
        bodies = [s.body for s in walk(block) if isinstance(s, For) and s.var in place.loops]
        if any(old in exposed(b) or new in exposed(b) for b in bodies):
            continue
        return place.stmt, old, new
    return None


def _definitions(order: list[Place]) -> list[Stmt]:
    """Return statements that make a name anew, leaving out those that change it in place."""
    return [
        p.stmt for p in order if (own := written(p.stmt)) is not None and own not in reads(p.stmt)
    ]


def _names_global(stmt: Stmt, name: str) -> bool:
    return isinstance(stmt, Copy) and stmt.name == name and Memory.GLOBAL in (stmt.src, stmt.dst)
