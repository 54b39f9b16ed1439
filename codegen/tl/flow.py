"""What each statement reads and writes, and small rewrites of statement lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from codegen.tl.ast import (
    Arith,
    BinOp,
    Call,
    Compare,
    Coord,
    Copy,
    Custom,
    Expr,
    For,
    Gemm,
    If,
    Index,
    Memory,
    Name,
    Num,
    Operand,
    Reshape,
    Slice,
    Stmt,
    walk,
)

Block = tuple[Stmt, ...]


def names_in(expr: Expr) -> Iterator[str]:
    """Yield every name of an expression, function names apart."""
    match expr:
        case Name():
            yield expr.id
        case BinOp() | Compare():
            yield from names_in(expr.left)
            yield from names_in(expr.right)
        case Call():
            for arg in expr.args:
                yield from names_in(arg)
        case Index():
            yield expr.name
            for index in expr.indices:
                yield from names_in(index)
        case Num():
            return


def reads(stmt: Stmt) -> frozenset[str]:
    """Return the names of tiles (and of scalars in second place) that a statement reads.

    A Copy out of global memory reads no tile. A loop or branch reads nothing of itself.
    """
    match stmt:
        case Copy():
            return frozenset() if stmt.src is Memory.GLOBAL else frozenset((stmt.name,))
        case Gemm():
            own = {stmt.a.name, stmt.b.name}
            return frozenset(own | {stmt.out} if stmt.accumulate else own)
        case Arith():
            return frozenset((stmt.a, stmt.b) if isinstance(stmt.b, str) else (stmt.a,))
        case Custom():
            if stmt.op == "Fill":
                return frozenset()
            return frozenset((stmt.name, *tile_arguments(stmt)))
        case Reshape():
            return frozenset((stmt.name,))
        case _:
            return frozenset()


def tile_arguments(stmt: Custom) -> tuple[str, ...]:
    """Return the names among an operator's arguments that may be tiles."""
    if stmt.op == "Mask":
        biases = [a for a in stmt.args if isinstance(a, Call) and a.function == "bias"]
        return tuple(n for b in biases for a in b.args for n in names_in(a))
    return tuple(a.id for a in stmt.args if isinstance(a, Name))


def written(stmt: Stmt) -> str | None:
    """Return the name of the tile that a statement writes, or None (a Copy to global)."""
    match stmt:
        case Copy():
            if stmt.dst is Memory.GLOBAL:
                return None
            return stmt.target or stmt.name
        case Gemm() | Arith():
            return stmt.out
        case Custom():
            return stmt.out or stmt.name
        case Reshape():
            return stmt.name
        case _:
            return None


def rewrite(block: Block, change: Callable[[Stmt], Stmt | Block | None]) -> Block:
    """Return a block with each statement replaced; the insides of loops are rewritten first.

    `change` gives one statement, several, or None to leave it out.
    """
    found: list[Stmt] = []
    for stmt in block:
        inner = stmt
        if isinstance(stmt, For):
            inner = replace(stmt, body=rewrite(stmt.body, change))
        elif isinstance(stmt, If):
            inner = replace(
                stmt, body=rewrite(stmt.body, change), orelse=rewrite(stmt.orelse, change)
            )
        changed = change(inner)
        if changed is None:
            continue
        found.extend(changed if isinstance(changed, tuple) else (changed,))
    return tuple(found)


def rename_expr(expr: Expr, names: Mapping[str, str]) -> Expr:
    """Return an expression with names replaced."""
    match expr:
        case Name():
            return Name(names.get(expr.id, expr.id))
        case BinOp():
            return BinOp(expr.op, rename_expr(expr.left, names), rename_expr(expr.right, names))
        case Compare():
            return Compare(expr.op, rename_expr(expr.left, names), rename_expr(expr.right, names))
        case Call():
            return Call(expr.function, tuple(rename_expr(a, names) for a in expr.args))
        case Index():
            name = names.get(expr.name, expr.name)
            return Index(name, tuple(rename_expr(a, names) for a in expr.indices))
        case Num():
            return expr


def map_exprs(stmt: Stmt, change: Callable[[Expr], Expr]) -> Stmt:
    """Return a statement with every size, coordinate, bound and argument changed."""
    match stmt:
        case Copy():
            return replace(
                stmt,
                shape=tuple(map(change, stmt.shape)),
                coords=tuple(Coord(c.axis, change(c.index)) for c in stmt.coords),
                index=tuple(map(change, stmt.index)),
            )
        case Gemm():
            return replace(stmt, a=_map_operand(stmt.a, change), b=_map_operand(stmt.b, change))
        case Custom():
            return replace(stmt, args=tuple(map(change, stmt.args)))
        case For():
            return replace(stmt, lo=change(stmt.lo), hi=change(stmt.hi))
        case If():
            return replace(stmt, condition=change(stmt.condition))
        case _:
            return stmt


def _map_operand(operand: Operand, change: Callable[[Expr], Expr]) -> Operand:
    slices = tuple(
        Slice(None if s.lo is None else change(s.lo), None if s.hi is None else change(s.hi))
        for s in operand.slices
    )
    return replace(operand, slices=slices)


def rename(block: Block, names: Mapping[str, str]) -> Block:
    """Return a block with names of tiles, scalars and indices replaced."""

    def new(name: str) -> str:
        return names.get(name, name)

    def change(stmt: Stmt) -> Stmt:
        stmt = map_exprs(stmt, lambda e: rename_expr(e, names))
        match stmt:
            case Copy():
                target = None if stmt.target is None else new(stmt.target)
                return replace(stmt, name=new(stmt.name), target=target)
            case Gemm():
                a, b = (
                    replace(stmt.a, name=new(stmt.a.name)),
                    replace(stmt.b, name=new(stmt.b.name)),
                )
                return replace(stmt, a=a, b=b, out=new(stmt.out))
            case Arith():
                second = new(stmt.b) if isinstance(stmt.b, str) else stmt.b
                return replace(stmt, a=new(stmt.a), b=second, out=new(stmt.out))
            case Custom():
                out = None if stmt.out is None else new(stmt.out)
                return replace(stmt, name=new(stmt.name), out=out)
            case Reshape():
                return replace(stmt, name=new(stmt.name))
            case For():
                return replace(stmt, var=new(stmt.var))
            case _:
                return stmt

    return rewrite(block, change)


@dataclass(frozen=True, slots=True)
class Place:
    """A statement and the loop variables around it, outermost first."""

    stmt: Stmt
    loops: tuple[str, ...]


def places(block: Block, loops: tuple[str, ...] = ()) -> Iterator[Place]:
    """Yield every statement in program order with the loops around it."""
    for stmt in block:
        yield Place(stmt, loops)
        if isinstance(stmt, For):
            yield from places(stmt.body, (*loops, stmt.var))
        elif isinstance(stmt, If):
            yield from places(stmt.body, loops)
            yield from places(stmt.orelse, loops)


def all_written(block: Block) -> frozenset[str]:
    """Return every tile name that some statement writes."""
    return frozenset(n for s in walk(block) if (n := written(s)) is not None)


def exposed(block: Block) -> frozenset[str]:
    """Return names that are read before the block itself writes them, its loops included.

    What a loop reads before it writes it comes from the step before, so it is exposed too.
    """
    found: set[str] = set()
    done: set[str] = set()
    for stmt in block:
        if isinstance(stmt, For):
            found |= exposed(stmt.body) - done
            done |= all_written(stmt.body)
        elif isinstance(stmt, If):
            found |= (exposed(stmt.body) | exposed(stmt.orelse)) - done
            done |= all_written(stmt.body) & all_written(stmt.orelse)
        else:
            found |= reads(stmt) - done
            if (name := written(stmt)) is not None and not isinstance(stmt, Reshape):
                done.add(name)
    return frozenset(found)


def is_query_name(name: str) -> bool:
    """Whether `name` is spelt like a tensor with query rows: Q, Q1, Q_rope, O, O_s."""
    return name[:1] in "QOqo" and (len(name) == 1 or not name[1:].isalpha() or name[1:] == "ut")


def is_key_name(name: str) -> bool:
    """Whether `name` is spelt like a tensor with key rows: K, V, KV, K_rope, V1."""
    stem = name[2:] if name[:2] in ("KV", "kv") else name[1:]
    return name[:1] in "KVkv" and (stem == "" or not stem.isalpha())


def is_output_name(name: str) -> bool:
    """Whether `name` is spelt like the output: O, O1, O_s, Out."""
    return is_query_name(name) and name[:1] in "Oo"
