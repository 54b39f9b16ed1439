"""Statements of Hopper kernels, whose GEMMs are wgmma and whose tiles travel by TMA."""

from __future__ import annotations

from collections.abc import Callable

from codegen.cute.copies import Source
from codegen.cute.plan import Buffer, LoopPlan
from codegen.cute.row_copies import Gathered
from codegen.cute.statements import Statements, comment
from codegen.cute.target import BARRIER
from codegen.cute.writer import Writer
from codegen.errors import PlanError
from codegen.tl import ast
from space.variant import DType


class WgmmaStatements(Statements):
    """Statements whose GEMMs are wgmma; the waits for the last product stand in the softmax."""

    before_rescale: Callable[[], None] | None = None
    after_vote: Callable[[], None] | None = None

    def declare(self) -> None:
        """Declare register tiles and softmax states."""
        for name, f in self.plan.fragments:
            self.out.line(f"float {name}[{f.m_atoms}][{f.n_atoms}][4];")
        for name in self.plan.row_vectors:
            self.out.line(f"float {name}[1][2];")
        self.softmaxes.declare()

    def emit(self, stmt: ast.Stmt, inside: LoopPlan | None) -> None:
        """Lower one statement."""
        if isinstance(stmt, ast.Custom) and stmt.op == "Softmax":
            comment(self.out, stmt)
            plan = self.plan.softmax(stmt.name)
            self.softmaxes.step(plan, self.before_rescale, self.after_vote)
        else:
            super().emit(stmt, None)


class NoCopies:
    """A Hopper kernel's tiles travel by TMA: its statements never copy thread by thread."""

    arch = "sm_90a"
    asynchronous = False

    def prelude(self, out: Writer, dtype: DType) -> None:
        raise PlanError("the Hopper back end writes its own prelude")

    def define_copy(
        self, out: Writer, buffer: Buffer, threads: int, source: Source | Gathered
    ) -> None:
        raise PlanError(f"{buffer.name} travels by TMA")

    def issue(self, buffer: Buffer, index: str) -> str:
        raise PlanError(f"{buffer.name} travels by TMA")

    def land(
        self,
        out: Writer,
        buffers: tuple[Buffer, ...],
        index: str,
        pending: int,
        meet: str = BARRIER,
    ) -> None:
        raise PlanError("tiles travel by TMA")
