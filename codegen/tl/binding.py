"""Fills the holes of a checked sketch, pass by pass; `bind.py` says what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from codegen.tl.ast import (
    Allocate,
    Arith,
    BinOp,
    Coord,
    Copy,
    Custom,
    Expr,
    For,
    Gemm,
    Kernel,
    Memory,
    Name,
    Num,
    Program,
    Reshape,
    Sketch,
    Stmt,
    Tensor,
    walk,
)
from codegen.tl.axes import loop_kinds, row_kinds
from codegen.tl.dims import default_columns, infer
from codegen.tl.evaluate import Params, evaluate, read_params
from codegen.tl.flow import (
    Block,
    all_written,
    exposed,
    is_key_name,
    map_exprs,
    names_in,
    reads,
    rename,
    rewrite,
    written,
)
from codegen.tl.inventory import loads_of, tensors_of, tiles_of
from codegen.tl.kinds import Kind
from codegen.tl.merging import merge_names
from codegen.tl.normalise import number_scalars, unify_masks, unify_softcap
from codegen.tl.online import (
    carry_implied_maxima,
    join_running_max,
    one_division,
    unify_softmax_tail,
)
from codegen.tl.prepare import RawKernel, prepare, scalar_loads
from codegen.tl.roles import accumulators_of, derived, running_maxima, scores_of
from codegen.tl.scaling import Context, unify_scale
from codegen.tl.vocabulary import BLOCK_COLUMN, BLOCK_ROW, SPLIT, SPLIT_BOUNDS, SPLIT_COUNT
from space.params import Point
from space.variant import Problem

_INDICES = frozenset({BLOCK_ROW, BLOCK_COLUMN, SPLIT, *SPLIT_BOUNDS, SPLIT_COUNT, "M", "N"})
_DEFAULT_BK = 32
#: spellings of the problem's tensors, lower case
_ROLES = {
    "q": "Q", "query": "Q", "k": "K", "key": "K", "v": "V", "value": "V",
    "o": "O", "out": "O", "output": "O", "o_out": "O", "o_final": "O", "o_norm": "O",
}  # fmt: skip


def assemble(sketch: Sketch, problem: Problem, point: Point) -> Program:
    """Bind a sketch that has no faults, its softmax as it is spelt."""
    params = read_params(sketch, problem, point)
    raw = prepare(sketch, params.declared)
    kernels: list[Kernel] = []
    scalars: list[str] = []
    stored: dict[str, Tensor] = {}
    for position, kernel in enumerate(raw):
        binder = _KernelBinder(kernel, problem, params, stored, position, raw)
        bound = binder.bind()
        stored |= {t.name: t for t in bound.tensors if t.workspace}
        scalars += [s for s in binder.scalars() if s not in scalars]
        kernels.append(bound)
    names = ("forward",) if len(kernels) == 1 else _names(kernels)
    kernels = [replace(k, name=n) for k, n in zip(kernels, names, strict=True)]
    tuned = tuple(sorted(params.tuned.items()))
    return Program(tuple(kernels), tuned, tuple(scalars), sketch.lines)


def _names(kernels: list[Kernel]) -> tuple[str, ...]:
    if len(kernels) == 2 and any(t.axes for t in kernels[0].tensors):
        return ("partial", "combine")
    return tuple(f"kernel_{n}" for n in range(1, len(kernels) + 1))


class _KernelBinder:
    """Binds one kernel; the fields are its state between the passes of `bind`."""

    def __init__(
        self,
        raw: RawKernel,
        problem: Problem,
        params: Params,
        stored: Mapping[str, Tensor],
        position: int,
        program: tuple[RawKernel, ...],
    ) -> None:
        self.problem = problem
        self.params = params
        self.numbers = params.numbers
        self.stored = stored
        self.allocations = raw.allocations
        self.block = raw.block
        self.later = program[position + 1 :]
        self.bm = params.tuned["BM"]
        self.bn = params.tuned["BN"]

    def bind(self) -> Kernel:
        """Run every pass and return the kernel."""
        self._name_workspaces()
        self._name_tensors()
        self._normalise()
        self.loops = loop_kinds(self.block)
        self.kinds = row_kinds(self.block)
        vectors = frozenset(n for n, t in self.stored.items() if t.columns == 1)
        self.inference = infer(
            self.block, self._own_allocations(), self.numbers, self.kinds, vectors
        )
        self._sizes()
        self._loop_bounds()
        self._reshapes()
        self._fills()
        self._shapes()
        sizes = self.inference.sizes
        read_later = frozenset(n for k in self.later for n in loads_of(k.block))
        tensors = tensors_of(
            self.block,
            sizes,
            self.kinds,
            self.allocations,
            self.stored,
            read_later,
            self.problem.head_dim,
        )
        return Kernel("forward", tensors, tiles_of(self.block, sizes, self.stored), self.block)

    def scalars(self) -> tuple[str, ...]:
        """Return the names of run-time numbers that the kernel uses, `scale` first."""
        tiles = {n for s in walk(self.block) for n in (written(s),) if n}
        tiles |= {s.name for s in walk(self.block) if isinstance(s, Copy)}
        found: dict[str, None] = {}
        for stmt in walk(self.block):
            names: list[str] = []
            if isinstance(stmt, Arith) and isinstance(stmt.b, str):
                names = [stmt.b]
            elif isinstance(stmt, Custom):
                kinds = [a for a in stmt.args if not (stmt.op == "Mask" and isinstance(a, Name))]
                names = [n for a in kinds for n in names_in(a)]
            for name in names:
                if name not in tiles and name not in _INDICES:
                    found[name] = None
        return tuple(sorted(found, key=lambda n: (n != "scale", n)))

    # ---- passes --------------------------------------------------------------------------------

    def _name_workspaces(self) -> None:
        """Results that a later kernel reads as `X_s`, one a split, take that name here."""
        if not self.later:
            return
        read_later = {n for k in self.later for n in loads_of(k.block)}
        splits = any(
            isinstance(s, For) and {*names_in(s.lo), *names_in(s.hi)} & set(SPLIT_BOUNDS)
            for s in walk(self.block)
        )
        names = {
            s.name: n
            for s in walk(self.block)
            if isinstance(s, Copy) and s.dst is Memory.GLOBAL
            for n in sorted(read_later)
            if n.startswith(f"{s.name}_")
        }
        self.block = rename(self.block, names)

        def place(stmt: Stmt) -> Stmt:
            if splits and isinstance(stmt, Copy) and stmt.dst is Memory.GLOBAL:
                return replace(
                    stmt, coords=(*_rows_only(stmt.coords), Coord("splits", Name(SPLIT)))
                )
            return stmt

        self.block = rewrite(self.block, place)

    def _name_tensors(self) -> None:
        """Give the problem's tensors their names, however the sketch spells them."""
        moved = [
            s.name
            for s in walk(self.block)
            if isinstance(s, Copy) and Memory.GLOBAL in (s.src, s.dst)
        ]
        names: dict[str, str] = {}
        for name in dict.fromkeys(moved):
            role = _ROLES.get(name.lower())
            if role and role != name and role not in moved and role not in names.values():
                names[name] = role
        self.block = rename(self.block, names)
        self.allocations = tuple(
            replace(a, name=names.get(a.name, a.name)) for a in self.allocations
        )

    def _normalise(self) -> None:
        scale = self.problem.default_scale
        context = Context(scale, self.problem.causal, self.numbers)
        loads = scalar_loads(self.block)
        biases = frozenset(
            s.name
            for s in walk(self.block)
            if isinstance(s, Copy) and s.src is Memory.GLOBAL and s.name not in loads
        )
        scalars = loads - {s.name for s in self._matrix_allocations()}
        block = rewrite(
            self.block, lambda s: None if isinstance(s, Copy) and s.name in scalars else s
        )
        block = rewrite(block, _drop_key_registers)
        stored = frozenset(s.name for s in walk(block) if isinstance(s, Copy) and s.src is not None)
        block = merge_names(block, stored)
        block = join_running_max(carry_implied_maxima(block))
        block = one_division(block)
        block = unify_scale(block, scores_of(block), context)
        block = number_scalars(block, self.numbers)
        block = unify_softcap(block)
        block = unify_masks(block, self.problem.causal, biases)
        block = number_scalars(block, self.numbers)  # names that the spellings above imply
        known = frozenset(self.numbers) | scalars | frozenset({"scale"})
        self.block = unify_softmax_tail(block, known)

    def _matrix_allocations(self) -> tuple[Allocate, ...]:
        return tuple(a for a in self.allocations if len(a.shape) > 1)

    def _own_allocations(self) -> tuple[Allocate, ...]:
        """Allocations of tiles this kernel uses, under the names it uses."""
        used = {n for s in walk(self.block) for n in (*reads(s), written(s) or "") if n}
        used |= {s.name for s in walk(self.block) if isinstance(s, Copy)}
        return tuple(a for a in self.allocations if a.name in used)

    def _sizes(self) -> None:
        """Give every class of axes its number."""
        sizes = self.inference.sizes
        chunked = "chunk" in self.loops.values()
        rows = {Kind.QUERY: self.bn if chunked else self.bm, Kind.KEY: self.bn}
        used = dict.fromkeys(
            n for s in walk(self.block) for n in (*sorted(reads(s)), written(s) or "", _own(s)) if n
        )
        for name in used:
            for number in (0, 1):
                axis = sizes.axis(name, number)
                if axis.size is None and axis.kind in rows:
                    axis.size = rows[axis.kind]
        for stmt in walk(self.block):  # columns tiled along D take the step of their loop
            if isinstance(stmt, Copy):
                for coord in stmt.coords[1:]:
                    axis = sizes.axis(stmt.name, 1)
                    if coord.axis == "D" and axis.size is None:
                        axis.size = self._bk()
        default_columns(self.block, self.inference, self.problem.head_dim, self.problem.head_dim_v)
        for name in used:
            axis = sizes.axis(name, 0)
            if axis.size is None:
                axis.size = self.bm

    def _bk(self) -> int:
        return self.params.tuned.get("BK", min(_DEFAULT_BK, self.problem.head_dim))

    def _loop_bounds(self) -> None:
        def change(stmt: Stmt) -> Stmt:
            if not isinstance(stmt, For):
                return stmt
            if {*names_in(stmt.lo), *names_in(stmt.hi)} & set(SPLIT_BOUNDS):
                return stmt
            length: Expr
            match self.loops.get(stmt.var, "key"):
                case "split":
                    splits = self.params.tuned.get(SPLIT_COUNT)
                    count = Name(SPLIT_COUNT) if splits is None else Num(splits)
                    return replace(stmt, lo=Num(0), hi=count)
                case "query":
                    length, step = Name("M"), self.bm
                case "feature":
                    length, step = Num(self.problem.head_dim), self._bk()
                case _:
                    length, step = Name("N"), self.bn
            return replace(stmt, lo=Num(0), hi=BinOp("/", length, Num(step)))

        self.block = rewrite(self.block, change)

    def _reshapes(self) -> None:
        """Put one Reshape right before each GEMM whose first operand is another's output."""
        outs = {s.out for s in walk(self.block) if isinstance(s, Gemm)}
        chained = frozenset(n for o in outs for n in derived(self.block, o))
        staged = {
            s.name
            for s in walk(self.block)
            if isinstance(s, Copy) and (s.src, s.dst) == (Memory.REGISTER, Memory.SHARED)
        }
        spans = {s.name: s.span for s in walk(self.block) if isinstance(s, Reshape)}
        before = rewrite(self.block, lambda s: None if isinstance(s, Reshape) else s)

        def change(stmt: Stmt) -> Stmt | Block:
            if not isinstance(stmt, Gemm) or stmt.a.name not in chained or stmt.a.name in staged:
                return stmt
            if stmt.a.transposed or self.inference.sizes.axis(stmt.a.name, 0).kind is Kind.FEATURE:
                return stmt
            span = spans.get(stmt.a.name, stmt.span)
            fragments = ("MMA_C", "MMA_M", "MMA_N"), ("MMA_A", "MMA_M", "MMA_N_new")
            return (Reshape(stmt.a.name, *fragments, span), stmt)

        self.block = rewrite(before, change)

    def _fills(self) -> None:
        """Initialise what a loop reads before it writes it: maxima to -inf, the rest to 0."""
        found: list[Stmt] = []
        done: set[str] = set()
        loaded = {
            s.name for s in walk(self.block) if isinstance(s, Copy) and s.src is Memory.GLOBAL
        }
        names = all_written(self.block)
        for stmt in self.block:
            wanted: frozenset[str] = frozenset()
            if isinstance(stmt, For):
                wanted = exposed(stmt.body) | _rescaled(self.block, stmt)
            elif isinstance(stmt, Gemm | Arith | Custom):
                wanted = reads(stmt)
            for name in sorted((wanted & names) - done - loaded):
                value = float("-inf") if name in running_maxima(self.block) else 0.0
                found.append(Custom("Fill", name, (Num(value),), None, False, stmt.span))
                done.add(name)
            found.append(stmt)
            done |= all_written((stmt,))
        self.block = tuple(found)

    def _shapes(self) -> None:
        """Write the numbers into shapes, slices and arguments."""
        sizes = self.inference.sizes

        def value(expr: Expr) -> Expr:
            number = evaluate(expr, self.numbers)
            return expr if number is None else Num(number)

        def change(stmt: Stmt) -> Stmt:
            if isinstance(stmt, Gemm):
                return map_exprs(stmt, lambda e: value(self._dim(e)))
            if not isinstance(stmt, Copy) or stmt.src is None:
                return stmt
            shape = tuple(Num(sizes.axis(stmt.name, n).size or 0) for n in (0, 1))
            return replace(stmt, shape=shape)

        self.block = rewrite(self.block, change)

    def _dim(self, expr: Expr) -> Expr:
        """`D` and `Dv` in a slice are head dims when no Param says otherwise."""
        dims = {"D": self.problem.head_dim, "Dv": self.problem.head_dim_v}
        dims |= {"DV": self.problem.head_dim_v, "DQK": self.problem.head_dim}
        if isinstance(expr, Name) and expr.id in dims and expr.id not in self.numbers:
            return Num(dims[expr.id])
        return expr


def _rows_only(coords: tuple[Coord, ...]) -> tuple[Coord, ...]:
    return tuple(c for c in coords if c.axis in ("L", "D"))


def _rescaled(block: Block, loop: For) -> frozenset[str]:
    """Return the accumulators that a Softmax inside a loop rescales."""
    return frozenset(
        name
        for s in walk(loop.body)
        if isinstance(s, Custom) and s.op == "Softmax"
        for name in accumulators_of(block, s.name)
    )


def _own(stmt: Stmt) -> str:
    return stmt.name if isinstance(stmt, Copy) else ""


def _drop_key_registers(stmt: Stmt) -> Stmt | None:
    """Keys and values on their way to a GEMM: registers are the translator's business."""
    if isinstance(stmt, Copy) and (stmt.src, stmt.dst) == (Memory.SHARED, Memory.REGISTER):
        return None if is_key_name(stmt.name) else stmt
    return stmt
