"""The whole grammar of TL as frozen nodes.

A `Sketch` is what the parser gives: holes (no shape, no coordinate) are None or empty. A
`Program` is what the binder gives: the same statements with every hole filled and every size a
number. Spans do not take part in equality, so `parse(print(x)) == x`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from codegen.tl.source import NOWHERE, Span


class Memory(StrEnum):
    """A level of the memory hierarchy."""

    GLOBAL = "global"
    SHARED = "shared"
    REGISTER = "register"


# ---- expressions -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Num:
    """A literal number."""

    value: int | float


@dataclass(frozen=True, slots=True)
class Name:
    """A parameter, a length (`M`, `N`), a loop variable or the row block index (`block_idx`)."""

    id: str


@dataclass(frozen=True, slots=True)
class BinOp:
    """`left op right`; op is one of + - * / %. Division of whole numbers rounds up in a bound."""

    op: str
    left: Expr
    right: Expr


@dataclass(frozen=True, slots=True)
class Call:
    """`function(args)`: ceil, min, max in expressions; window, bias in a Mask."""

    function: str
    args: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """`name[index, ...]`, e.g. `block_table[i]`."""

    name: str
    indices: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Compare:
    """`left op right`; op is one of < <= > >= == !=. Only in the condition of an If."""

    op: str
    left: Expr
    right: Expr


Expr = Num | Name | BinOp | Call | Index | Compare

# ---- statements --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Param:
    """`Param BM in {64, 128}` (choices) or `Param BM = 128` (value)."""

    name: str
    choices: tuple[int, ...] = ()
    value: Expr | None = None
    span: Span = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Allocate:
    """`Allocate Q in global (M, D) as f16 with offset q_offset`."""

    name: str
    memory: Memory
    shape: tuple[Expr, ...]
    dtype: str | None = None
    offset: str | None = None
    span: Span = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Coord:
    """One entry of `in coordinate [L = i]`: the axis and which tile along it."""

    axis: str
    index: Expr


@dataclass(frozen=True, slots=True)
class Copy:
    """`Copy K (BN, D) in coordinate [L = i] from global to shared`.

    A register renaming `Copy S_next to S` has `target` and no memories. `index` holds the
    subscripts of `Copy K[page] ...`.
    """

    name: str
    shape: tuple[Expr, ...] = ()
    coords: tuple[Coord, ...] = ()
    src: Memory | None = None
    dst: Memory | None = None
    target: str | None = None
    index: tuple[Expr, ...] = ()
    span: Span = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Slice:
    """`lo:hi` of an operand's axis; both None is the whole axis. `[i]` is `[i:i + 1]`."""

    lo: Expr | None = None
    hi: Expr | None = None


@dataclass(frozen=True, slots=True)
class Operand:
    """A GEMM operand: a name, slices if any, and whether `.T` follows."""

    name: str
    slices: tuple[Slice, ...] = ()
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Gemm:
    """`Compute GEMM Q, K.T and get S`, or `and accumulate O`."""

    a: Operand
    b: Operand
    out: str
    accumulate: bool
    span: Span = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Arith:
    """`Compute Multiply S, scale and get new S`; op is Add, Subtract, Multiply or Divide."""

    op: str
    a: str
    b: str | float
    out: str
    new: bool = False
    span: Span = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Custom:
    """`Compute Softmax S`, `Compute Mask S, causal`, `Compute RowMax S and get m`.

    `op` is the canonical operator name; `out` is None when the result replaces the input.
    """

    op: str
    name: str
    args: tuple[Expr, ...] = ()
    out: str | None = None
    new: bool = False
    span: Span = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Reshape:
    """`Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)`."""

    name: str
    src: tuple[str, str, str]
    dst: tuple[str, str, str]
    span: Span = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class For:
    """`for i = lo:hi ... end`; i runs over lo <= i < hi."""

    var: str
    lo: Expr
    hi: Expr
    body: tuple[Stmt, ...]
    span: Span = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class If:
    """`if condition ... [else ...] end`."""

    condition: Expr
    body: tuple[Stmt, ...]
    orelse: tuple[Stmt, ...] = ()
    span: Span = field(default=NOWHERE, compare=False)


Stmt = Param | Allocate | Copy | Gemm | Arith | Custom | Reshape | For | If


@dataclass(frozen=True, slots=True)
class Refused:
    """A statement about pipelines or roles, which the checker refuses: its text and its names."""

    text: str
    names: tuple[str, ...]
    span: Span = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Sketch:
    """A parsed program, holes kept."""

    statements: tuple[Stmt, ...]
    #: barriers, waits, TMA marks and the like, which took no part in `statements`
    refused: tuple[Refused, ...] = field(default=(), compare=False)
    #: the text of the whole reply, line by line, for comments in emitted code
    lines: tuple[str, ...] = field(default=(), compare=False)


# ---- bound programs ----------------------------------------------------------------------------


class Rows(StrEnum):
    """Which axis of the problem the rows of a global tensor run along."""

    QUERY = "query"  # M rows, one tile per block, query heads
    KEY = "key"  # N rows, one tile per loop step, KV heads


class Elem(StrEnum):
    """Element type of a tensor or tile: the problem's 16-bit type, or f32."""

    OPERAND = "operand"
    F32 = "f32"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in global memory, [batch, rows, heads, columns] with run-time strides.

    `columns` is a number (a head dim), or a run-time length's name (the N of a plain GEMM). A
    row vector (a log-sum-exp) has `columns` 1. `axes` names leading axes that only the
    program's own kernels see, such as the splits of a split-KV workspace.
    """

    name: str
    rows: Rows
    columns: int | str
    elem: Elem
    output: bool
    axes: tuple[str, ...] = ()
    workspace: bool = False  #: written by one kernel of the program and read by a later one


@dataclass(frozen=True, slots=True)
class Tile:
    """A block's tile: (rows, columns) in shared memory or registers; a row vector has columns 1."""

    name: str
    memory: Memory
    rows: int
    columns: int
    elem: Elem


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a program: its tensors, its tiles by (name, memory), and its statements."""

    name: str
    tensors: tuple[Tensor, ...]
    tiles: tuple[Tile, ...]
    body: tuple[Stmt, ...]

    def tile(self, name: str, memory: Memory) -> Tile | None:
        """Return the tile of `name` at `memory`, or None."""
        return next((t for t in self.tiles if (t.name, t.memory) == (name, memory)), None)

    def tensor(self, name: str) -> Tensor | None:
        """Return the global tensor called `name`, or None."""
        return next((t for t in self.tensors if t.name == name), None)


@dataclass(frozen=True, slots=True)
class Program:
    """A bound program. What the binder guarantees about `body` stands in `bind.py`."""

    kernels: tuple[Kernel, ...]
    #: tile and schedule parameters with their numbers, sorted by name
    params: tuple[tuple[str, int], ...]
    #: run-time float scalars in use besides none: `scale`, `softcap`, ...
    scalars: tuple[str, ...] = ()
    #: the text of the sketch's own lines, for the comments above emitted code
    lines: tuple[str, ...] = ()

    def param(self, name: str, default: int | None = None) -> int:
        """Return a parameter's number. Raises KeyError when absent and no default is given."""
        for key, value in self.params:
            if key == name:
                return value
        if default is None:
            raise KeyError(name)
        return default


def walk(statements: tuple[Stmt, ...]) -> Iterator[Stmt]:
    """Yield every statement in program order, those inside loops and branches included."""
    for stmt in statements:
        yield stmt
        if isinstance(stmt, For):
            yield from walk(stmt.body)
        elif isinstance(stmt, If):
            yield from walk(stmt.body)
            yield from walk(stmt.orelse)
