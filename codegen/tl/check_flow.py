"""Checks along the program's own order: what is where, what is defined, what was softened."""

from __future__ import annotations

from dataclasses import dataclass, field

from codegen.tl.ast import (
    Arith,
    Call,
    Copy,
    Custom,
    Expr,
    For,
    Gemm,
    If,
    Memory,
    Reshape,
    Stmt,
    walk,
)
from codegen.tl.check_end import check_end, defined_by
from codegen.tl.check_scores import ScoresWalk
from codegen.tl.flow import Block, exposed, is_query_name, names_in
from codegen.tl.report import Report
from codegen.tl.roles import implied_maxima
from codegen.tl.source import Span
from codegen.tl.subject import INDEX_NAMES, Facts, Subject, facts_of, place_of
from codegen.tl.vocabulary import ROW_OPS, is_root_of_dim, is_scale

_RESHAPE = "Reshape {0} from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)"
#: how many arguments an operator takes besides its tile, where it takes any
_ARGUMENTS = {
    "Scale": 1, "Softcap": 1, "Max": 1, "Min": 1, "RowMax": 1, "Rescale": 1, "Normalize": 1,
}  # fmt: skip
_AXES = ("L", "D", "splits")


@dataclass(slots=True)
class _State:
    """What holds at one point of the walk."""

    held: dict[str, set[Memory]] = field(default_factory=dict)
    reshaped: set[str] = field(default_factory=set)
    loops: list[str] = field(default_factory=list)


def check_flow(subject: Subject, report: Report) -> None:
    """Walk every kernel and report what is used before it is there, and how it is misused."""
    for block in subject.kernels:
        facts = facts_of(block)
        _Walk(subject, facts, report).run()
        check_end(subject, facts, report)


class _Walk:
    def __init__(self, subject: Subject, facts: Facts, report: Report) -> None:
        self.subject = subject
        self.facts = facts
        self.report = report
        self.state = _State()
        self.code = subject.is_code
        self.running = self._running()
        self.softmax = any(isinstance(s, Custom) and s.op == "Softmax" for s in walk(facts.block))
        self.scores = ScoresWalk(subject, facts, report)
        self.known = subject.params.declared | subject.lengths() | INDEX_NAMES | facts.scalars

    def run(self) -> None:
        """Walk the kernel's statements in order."""
        self._block(self.facts.block)

    def _running(self) -> frozenset[str]:
        """Names whose value comes from the loop's step before, or is implied at the first."""
        block = self.facts.block
        carried: set[str] = set()
        for stmt in walk(block):
            if isinstance(stmt, For):
                carried |= exposed(stmt.body) & defined_by(stmt.body)
            if isinstance(stmt, Custom) and stmt.op in ("Max", "Min"):
                carried.add(stmt.out or stmt.name)
        # a tile that each step loads or computes anew is no state: it has to come before its use
        fresh = {s.out for s in walk(block) if isinstance(s, Gemm) and not s.accumulate}
        carried -= fresh | self.facts.loaded
        carried |= implied_maxima(block)
        if not self.code:
            return frozenset(carried)
        return frozenset(n for n in carried if self.subject.allocated(n, Memory.REGISTER))

    # ---- walking ---------------------------------------------------------------------------------

    def _block(self, block: Block) -> None:
        for stmt in block:
            self._step(stmt)

    def _step(self, stmt: Stmt) -> None:
        match stmt:
            case Copy():
                self._copy(stmt)
            case Gemm():
                self._gemm(stmt)
            case Arith():
                self._tile(stmt.a, stmt.span, "the first operand")
                if isinstance(stmt.b, str):
                    self._second(stmt.b, stmt.span)
                self.scores.scaling(stmt, stmt.a)
                self._result(stmt.out, stmt.span, stmt.a)
            case Custom():
                self._custom(stmt)
            case Reshape():
                self._reshape(stmt)
            case For():
                self._names((stmt.lo, stmt.hi), stmt.span, bound=True)
                self.state.loops.append(stmt.var)
                self._block(stmt.body)
                self.state.loops.pop()
            case If():
                self._names((stmt.condition,), stmt.span)
                self._block(stmt.body)
                self._block(stmt.orelse)
            case _:
                pass

    def _hold(self, name: str, memory: Memory) -> None:
        self.state.held.setdefault(name, set()).add(memory)

    # ---- names -----------------------------------------------------------------------------------

    def _tile(self, name: str, span: Span, role: str) -> None:
        """Report a tile that is read before anything defines it."""
        held = self.state.held.get(name, set())
        if held - {Memory.GLOBAL}:
            return
        if name in self.running and self.state.loops:
            self._hold(name, Memory.REGISTER)
            return
        line = self.facts.copy_line(name)
        query = is_query_name(name)
        if line is not None and line > span.line:
            self.report.add(
                span, "use-before-copy", f"{name} is used before its Copy on line {line}",
                f"Move the Copy of {name} above line {span.line}",
            )  # fmt: skip
        elif self.subject.allocated(name, Memory.GLOBAL) is not None:
            self.report.add(
                span, "still-global", f"{name} is still in global memory",
                f"Write `{place_of(name, query)}` before it",
            )  # fmt: skip
        elif self.code and self.subject.allocated(name, Memory.REGISTER) is not None:
            self.report.add(
                span, "never-written", f"{name} is allocated and read, but nothing writes it",
                f"Compute {name} first, or write `Compute Fill {name}, 0`",
            )  # fmt: skip
        elif name in defined_by(self.facts.block):
            self.report.add(
                span, "use-before-definition", f"{name} is used before anything defines it",
                f"Move what computes {name} above line {span.line}",
            )  # fmt: skip
        else:
            self.report.add(
                span, "undefined", f"{name} is {role} here, and nothing defines it before",
                f"Compute it above line {span.line}, or `Copy {name} from global to shared`",
            )  # fmt: skip
        self._hold(name, Memory.REGISTER)  # said once

    def _second(self, name: str, span: Span) -> None:
        """Report a second operand or argument that is neither a tile nor a known scalar."""
        running = name in self.running and self.state.loops
        if running or self.state.held.get(name, set()) - {Memory.GLOBAL}:
            return
        if name in self.known or is_scale(name) or is_root_of_dim(name):
            return
        if name in self.facts.written | self.facts.loaded:
            self._tile(name, span, "an operand")
            return
        allocated = self.subject.allocated(name, Memory.REGISTER) is not None
        if not self.code or (allocated and self.softmax):
            return  # a sketch leaves scalars open, and a Softmax keeps alpha and l itself
        self.report.add(
            span, "undeclared", f"{name} is used and declared nowhere",
            f"Write `Param {name} = NUMBER`, or Allocate {name} in global and Copy it",
        )  # fmt: skip

    def _names(self, exprs: tuple[Expr, ...], span: Span, bound: bool = False) -> None:
        """Report names of bounds and conditions that nothing gives a value."""
        if not self.code:
            return
        for name in dict.fromkeys(n for e in exprs for n in names_in(e)):
            loose = bound and name.startswith(("window_", "split_", "num_splits"))
            if name in self.known or name in self.state.loops or loose:
                continue
            self.report.add(
                span, "undeclared", f"{name} is used and declared nowhere",
                f"Write `Param {name} = NUMBER`, or use N for the number of keys",
            )  # fmt: skip

    def _result(self, name: str, span: Span, source: str | None = None) -> None:
        """Note that a Compute gives `name`, which TL code must have allocated."""
        if (
            self.code
            and self.subject.allocated(name, Memory.REGISTER) is None
            and not self.state.held.get(name, set()) - {Memory.GLOBAL}
        ):
            self.report.add(
                span, "undeclared-output", f"{name} is computed but not allocated",
                f"Write `Allocate {name} in register (BM, BN) as f32`",
            )  # fmt: skip
        self._hold(name, Memory.REGISTER)
        if source is not None and source != name:
            self.scores.renamed(source, name)
            if source in self.state.reshaped:
                self.state.reshaped.add(name)

    # ---- Copy ------------------------------------------------------------------------------------

    def _copy(self, stmt: Copy) -> None:
        if stmt.src is None:
            self._tile(stmt.name, stmt.span, "copied")
            if stmt.target is not None:
                self._result(stmt.target, stmt.span, stmt.name)
            return
        assert stmt.dst is not None
        if stmt.src is stmt.dst:
            self.report.add(
                stmt.span, "same-level", f"{stmt.name} is copied from {stmt.src} to {stmt.dst}",
                "Take it out, or name another memory",
            )  # fmt: skip
        if Memory.GLOBAL in (stmt.src, stmt.dst):
            self._global_copy(stmt)
        if stmt.src is not Memory.GLOBAL:
            self._source_level(stmt)
        if stmt.dst is not Memory.GLOBAL:
            self._hold(stmt.target or stmt.name, stmt.dst)
            self.state.reshaped.discard(stmt.name)

    def _source_level(self, stmt: Copy) -> None:
        assert stmt.src is not None
        held = self.state.held.get(stmt.name, set()) - {Memory.GLOBAL}
        if stmt.name in self.running and self.state.loops:
            held.add(Memory.REGISTER)
        if stmt.src in held:
            return
        if not held:
            self._tile(stmt.name, stmt.span, "copied")
            return
        where = " and ".join(sorted(held))
        self.report.add(
            stmt.span, "wrong-level", f"{stmt.name} is in {where}, not in {stmt.src}",
            f"Write `from {sorted(held)[0]}`, or Copy {stmt.name} to {stmt.src} before",
        )  # fmt: skip

    def _global_copy(self, stmt: Copy) -> None:
        query = is_query_name(stmt.name)
        rows = "(M, D)" if query else "(N, D)"
        if self.code and self.subject.allocated(stmt.name, Memory.GLOBAL) is None:
            alike = [
                a.name
                for a in self.subject.allocations
                if a.memory is Memory.GLOBAL and a.name.split("_")[0] == stmt.name.split("_")[0]
            ]
            named = f"; {alike[0]} has" if alike else ""
            hint = f"Write `Allocate {stmt.name} in global {rows} with offset "
            hint += f"{stmt.name.lower()}_offset`"
            if alike:
                hint = f"Call the tensor and its tile by one name, or: {hint[0].lower()}{hint[1:]}"
            self.report.add(
                stmt.span, "global-not-allocated",
                f"{stmt.name} has no `Allocate {stmt.name} in global`{named}", hint,
            )  # fmt: skip
        loads = stmt.src is Memory.GLOBAL
        if self.code and loads and not stmt.coords and not stmt.index:
            self.report.add(
                stmt.span, "missing-coordinate", f"Copy {stmt.name} does not say which tile",
                f"Write `{place_of(stmt.name, query)}`",
            )  # fmt: skip
        if self.code and loads and not stmt.shape and stmt.name not in self.facts.scalars:
            assert stmt.dst is not None
            if self.subject.allocated(stmt.name, stmt.dst) is None:
                self.report.add(
                    stmt.span, "missing-shape", f"Copy {stmt.name} does not say its tile's shape",
                    f"Write `{place_of(stmt.name, query)}`",
                )  # fmt: skip
        defined = self.known | set(self.state.loops)
        for coord in stmt.coords:
            if coord.axis not in _AXES:
                self.report.add(
                    stmt.span, "unknown-axis", f"{coord.axis} is no axis of a coordinate",
                    "Write `[L = i]` for a tile of rows, `[L = i, D = k]` for one of columns too",
                )  # fmt: skip
            for name in names_in(coord.index):
                if name in defined:
                    continue
                self.report.add(
                    stmt.span, "unknown-coordinate",
                    f"the coordinate {coord.axis} = {name} is no loop variable and no block index",
                    f"Use a variable of a loop around it, or block_idx: `[{coord.axis} = i]`",
                )  # fmt: skip

    # ---- Compute ---------------------------------------------------------------------------------

    def _gemm(self, stmt: Gemm) -> None:
        for operand in (stmt.a, stmt.b):
            self._tile(operand.name, stmt.span, "a GEMM operand")
        first, second = stmt.a.name, stmt.b.name
        held = self.state.held.get(first, set())
        if (
            self.code
            and first in self.facts.products
            and first not in self.state.reshaped
            and Memory.SHARED not in held
        ):
            self.report.add(
                stmt.span, "missing-reshape",
                f"{first} is the output of a GEMM and is no A operand yet",
                f"Write `{_RESHAPE.format(first)}` right before this GEMM",
            )  # fmt: skip
        if second in self.facts.products and Memory.SHARED not in self.state.held[second]:
            self.report.add(
                stmt.span, "operand-in-registers",
                f"{second} is in registers, and a GEMM reads its second operand from shared",
                f"Write `Copy {second} from register to shared` before it",
            )  # fmt: skip
        if stmt.accumulate:
            known = self.state.held.get(stmt.out, set()) - {Memory.GLOBAL}
            if (
                self.code
                and not known
                and self.subject.allocated(stmt.out, Memory.REGISTER) is None
            ):
                self.report.add(
                    stmt.span, "uninitialised-accumulator",
                    f"{stmt.out} is accumulated into and never initialised",
                    f"Write `Allocate {stmt.out} in register (BM, D) as f32`",
                )  # fmt: skip
            self._hold(stmt.out, Memory.REGISTER)
            return
        self._result(stmt.out, stmt.span)
        self.scores.redefined(stmt.out)
        self.state.reshaped.discard(stmt.out)

    def _custom(self, stmt: Custom) -> None:
        if stmt.op == "Fill":
            self._result(stmt.name, stmt.span)
            return
        if stmt.op in ("Rescale", "Normalize") and not stmt.args and not self.softmax:
            self.report.add(
                stmt.span, "missing-argument", f"{stmt.op} {stmt.name} does not say by what",
                f"Write `Compute {stmt.op} {stmt.name}, {'l' if stmt.op[0] == 'N' else 'alpha'}`",
            )  # fmt: skip
        self._tile(stmt.name, stmt.span, f"what {stmt.op} works on")
        match stmt.op:
            case "Mask":
                for kind in stmt.args:
                    for name in names_in(kind) if isinstance(kind, Call) else ():
                        self._second(name, stmt.span)
            case "Softmax":
                pass  # what it takes besides its tile is its own state
            case op if op in ROW_OPS and stmt.out is None:
                self.report.add(
                    stmt.span, "missing-output", f"{op} gives a row vector and does not name it",
                    f"Write `Compute {op} {stmt.name} and get m_new`",
                )  # fmt: skip
            case "Max" | "Min" if not stmt.args:
                self.report.add(
                    stmt.span, "missing-argument", f"{stmt.op} takes two tiles",
                    f"Write `Compute {stmt.op} m, m_cur and get m_new`",
                )  # fmt: skip
            case "Cast":
                pass  # its argument is a type
            case op if len(stmt.args) > _ARGUMENTS.get(op, 0):
                self.report.add(
                    stmt.span, "extra-argument", f"{op} takes fewer arguments",
                    f"Write `Compute {op} {stmt.name}` and what goes with it as its own statement",
                )  # fmt: skip
            case _:
                for arg in stmt.args:
                    for name in names_in(arg):
                        self._second(name, stmt.span)
        self.scores.custom(stmt)
        if stmt.op not in ROW_OPS:
            self._result(stmt.out or stmt.name, stmt.span, stmt.name)
        elif stmt.out is not None:
            self._result(stmt.out, stmt.span)
        if stmt.op == "Softmax":
            self.scores.softmax_done(stmt)

    def _reshape(self, stmt: Reshape) -> None:
        source = stmt.src[:2] == ("MMA_C", "MMA_M") and bool(stmt.src[2])
        goal = stmt.dst[:2] == ("MMA_A", "MMA_M") and bool(stmt.dst[2])
        if not (source and goal):
            self.report.add(
                stmt.span, "bad-fragment",
                f"Reshape {stmt.name} goes from the fragment of an accumulator to that of an "
                "A operand, and these are not their names",
                f"Write `{_RESHAPE.format(stmt.name)}`",
            )  # fmt: skip
        self._tile(stmt.name, stmt.span, "reshaped")
        self.state.reshaped.add(stmt.name)
