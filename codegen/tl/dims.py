"""Sizes of tiles: every name's rows and columns, inferred from GEMMs, coordinates and names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from codegen.tl.ast import (
    Allocate,
    Arith,
    Copy,
    Custom,
    Expr,
    Gemm,
    Memory,
    Name,
    Operand,
    Stmt,
    walk,
)
from codegen.tl.axes import column_kind
from codegen.tl.evaluate import Number, evaluate
from codegen.tl.flow import (
    Block,
    is_output_name,
    reads,
    written,
)
from codegen.tl.kinds import Kind
from codegen.tl.vectors import vectors_of
from codegen.tl.vocabulary import ROW_OPS


@dataclass(slots=True)
class Axis:
    """A class of equal axes: what is known of it. `size` is a number once some member has one."""

    kind: Kind | None = None
    size: int | None = None
    symbol: str | None = None
    members: list[str] = field(default_factory=list)


class Sizes:
    """Union-find over (name, axis number); axis 0 is rows and 1 is columns."""

    def __init__(self) -> None:
        self._parent: dict[tuple[str, int], tuple[str, int]] = {}
        self._axis: dict[tuple[str, int], Axis] = {}

    def _find(self, node: tuple[str, int]) -> tuple[str, int]:
        if node not in self._parent:
            self._parent[node] = node
            self._axis[node] = Axis()
        while self._parent[node] != node:
            node = self._parent[node]
        return node

    def axis(self, name: str, number: int) -> Axis:
        """Return what is known of one axis of `name`."""
        return self._axis[self._find((name, number))]

    def join(self, one: tuple[str, int], other: tuple[str, int]) -> bool:
        """Make two axes one. Returns False, joining nothing, when they cannot be equal."""
        a, b = self._find(one), self._find(other)
        if a == b:
            return True
        x, y = self._axis[a], self._axis[b]
        if not _compatible(x, y):
            return False
        self._parent[b] = a
        x.kind = x.kind or y.kind
        x.size = y.size if x.size is None else x.size
        x.symbol = x.symbol or y.symbol
        return True

    def meets(self, one: tuple[str, int], other: tuple[str, int]) -> bool:
        """Whether two axes can be equal, changing nothing."""
        return _compatible(self._axis[self._find(one)], self._axis[self._find(other)])


def _compatible(x: Axis, y: Axis) -> bool:
    if x.kind and y.kind and x.kind is not y.kind:
        return False
    return x.size is None or y.size is None or x.size == y.size


def operand_axes(operand: Operand) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return (rows, columns) of an operand as axes of its tile, transposition applied."""
    rows, columns = (operand.name, 0), (operand.name, 1)
    return (columns, rows) if operand.transposed else (rows, columns)


@dataclass(frozen=True, slots=True)
class Clash:
    """A GEMM whose inner or outer axes cannot be equal."""

    gemm: Gemm


@dataclass(frozen=True, slots=True)
class Inference:
    """Sizes of a kernel's tiles, which names are row vectors, and the GEMMs that do not meet."""

    sizes: Sizes
    vectors: frozenset[str]
    clashes: tuple[Clash, ...]


def infer(
    block: Block,
    allocations: tuple[Allocate, ...],
    numbers: Mapping[str, Number],
    row_kinds: Mapping[str, Kind],
    vectors: frozenset[str] = frozenset(),
) -> Inference:
    """Infer the axes of every name. `row_kinds` says along what the rows of global tensors run."""
    sizes = Sizes()
    found = vectors_of(block, allocations, vectors)
    for name, kind in row_kinds.items():
        sizes.axis(name, 0).kind = kind
        if name not in found:
            sizes.axis(name, 1).kind = column_kind(block, name)
    for name in found:
        axis = sizes.axis(name, 1)
        axis.kind, axis.size = Kind.ONE, 1
    for a in allocations:
        if a.memory is not Memory.GLOBAL and a.name not in found:
            _shape(sizes, a.name, a.shape[-2:], numbers)
        elif a.memory is Memory.GLOBAL and len(a.shape) >= 2:
            _size(sizes, a.name, 1, a.shape[-1], numbers)
    for stmt in walk(block):
        if isinstance(stmt, Copy) and stmt.name not in found:
            _shape(sizes, stmt.name, stmt.shape[-2:], numbers)
    clashes: list[Clash] = []
    for stmt in walk(block):
        _relate(sizes, stmt, found, clashes)
    return Inference(sizes, frozenset(found), tuple(clashes))


def _shape(sizes: Sizes, name: str, shape: tuple[Expr, ...], numbers: Mapping[str, Number]) -> None:
    for number, expr in enumerate(shape):
        _size(sizes, name, number, expr, numbers)


def _size(sizes: Sizes, name: str, number: int, expr: Expr, numbers: Mapping[str, Number]) -> None:
    axis = sizes.axis(name, number)
    if isinstance(expr, Name) and axis.symbol is None:
        axis.symbol = expr.id
        axis.kind = axis.kind or {"BM": Kind.QUERY, "BN": Kind.KEY}.get(expr.id)
    value = evaluate(expr, numbers)
    if isinstance(value, int):
        axis.size = value


def _relate(sizes: Sizes, stmt: Stmt, vectors: set[str], clashes: list[Clash]) -> None:
    match stmt:
        case Gemm():
            a, b = operand_axes(stmt.a), operand_axes(stmt.b)
            sliced = any(o.slices for o in (stmt.a, stmt.b))
            meets = sizes.meets(a[1], b[0]) or sliced
            fits = sizes.meets((stmt.out, 0), a[0]) and sizes.meets((stmt.out, 1), b[1])
            if not meets or not (fits or sliced):
                clashes.append(Clash(stmt))
                return
            sizes.join((stmt.out, 0), a[0])
            if not stmt.b.slices:
                sizes.join((stmt.out, 1), b[1])
            if not sliced:
                sizes.join(a[1], b[0])
        case Arith():
            _join_rows(sizes, stmt.a, stmt.out, vectors)
            if isinstance(stmt.b, str) and stmt.b in vectors:
                sizes.join((stmt.a, 0), (stmt.b, 0))
        case Custom(op=op, out=str(out)) if op in ROW_OPS:
            sizes.join((stmt.name, 0), (out, 0))
        case Custom():
            _join_rows(sizes, stmt.name, stmt.out or stmt.name, vectors)
            for arg in stmt.args:
                if isinstance(arg, Name) and arg.id in vectors:
                    sizes.join((stmt.name, 0), (arg.id, 0))
        case Copy(target=str(target)):
            _join_rows(sizes, stmt.name, target, vectors)
        case _:
            pass


def _join_rows(sizes: Sizes, one: str, other: str, vectors: set[str]) -> None:
    sizes.join((one, 0), (other, 0))
    if (one in vectors) == (other in vectors):
        sizes.join((one, 1), (other, 1))


def default_columns(
    block: Block, inference: Inference, head_dim: int, head_dim_v: int
) -> dict[str, int]:
    """Return columns of global tensors that nothing else gives a number, from their names.

    V and O have the value's head dim and Q and K the other; where the scores are a sum of several
    products, their parts share it.
    """
    sizes = inference.sizes
    exact = {"Q": head_dim, "K": head_dim, "V": head_dim_v, "O": head_dim_v}
    names = list(dict.fromkeys(n for s in walk(block) for n in (*reads(s), written(s) or "") if n))
    for name in sorted(names, key=lambda n: (n not in exact, not is_output_name(n), n)):
        axis = sizes.axis(name, 1)
        if axis.size is None and axis.kind in (Kind.FEATURE, None) and name in exact:
            axis.size = exact[name]
        elif axis.size is None and axis.kind in (Kind.FEATURE, None) and is_output_name(name):
            axis.size = head_dim_v
    _share_parts(block, sizes, head_dim, head_dim_v)
    for name in sorted(names):
        axis = sizes.axis(name, 1)
        if axis.size is None and axis.kind is Kind.FEATURE:
            axis.size = head_dim_v if name[:1] in "Vv" else head_dim
    return {n: size for n in names if (size := sizes.axis(n, 1).size) is not None}


def _share_parts(block: Block, sizes: Sizes, head_dim: int, head_dim_v: int) -> None:
    outs = [s.out for s in walk(block) if isinstance(s, Gemm)]
    for out in dict.fromkeys(o for o in outs if outs.count(o) > 1):
        parts = [
            sizes.axis(*operand_axes(s.a)[1]) for s in walk(block)
            if isinstance(s, Gemm) and s.out == out
        ]  # fmt: skip
        if sizes.axis(out, 1).kind is not Kind.KEY:
            continue
        unknown = [p for p in parts if p.size is None]
        if len(unknown) == len(parts) == 2 and head_dim > head_dim_v:
            unknown[0].size = head_dim_v  # the part without position comes first by custom
            unknown = unknown[1:]
        known = sum(p.size for p in parts if p.size is not None)
        if len(unknown) == 1 and head_dim > known:
            unknown[0].size = head_dim - known
