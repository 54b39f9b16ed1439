"""GEMM lowering where warps of the same rows share the columns of a result."""

from __future__ import annotations

from dataclasses import replace

from codegen.cute.decode_plan import DecodePlan
from codegen.cute.gemm import STEP, GemmLowering
from codegen.cute.layout import Fragment
from codegen.cute.plan import LoopPlan
from codegen.cute.register_copies import fragment_of
from codegen.cute.writer import Writer
from codegen.tl import ast

#: accumulators that products go to in turn, so that none waits for the one before it
CHAINS = 4


class DecodeGemm(GemmLowering):
    """A warp owns its rows and its share of the columns; P is read whole, from shared memory."""

    def __init__(self, plan: DecodePlan, out: Writer) -> None:
        super().__init__(plan.base, out)
        self.column_warps = plan.column_warps
        self._chains = 1

    def _columns(self, name: str) -> int:
        """Columns of a register tile over all warps of its rows."""
        return super()._columns(name) * self.column_warps

    def _share(self, result: str) -> int:
        return super()._columns(result) if self.column_warps > 1 else 0

    def gemm(self, stmt: ast.Gemm, inside: LoopPlan | None) -> None:
        """Emit C (+)= A.B; where a warp's share of C is small, in several sums at once."""
        fragment = fragment_of(self.plan, stmt.out)
        chains = CHAINS // (fragment.m_atoms * fragment.n_atoms)
        if chains < 2 or self._extent(stmt) // STEP < 2 * chains:
            super().gemm(stmt, inside)
            return
        sums = f"{stmt.out}_chain"
        shape = f"[{chains}][{fragment.m_atoms}][{fragment.n_atoms}][4]"
        self.out.line(f"float {sums}{shape} = {{}};  // a product does not wait for the one before")
        self._chains = chains
        super().gemm(stmt, inside)
        self._chains = 1
        self._add(stmt.out, sums, chains, fragment)

    def _step(self, stmt: ast.Gemm, n_atoms: int, inside: LoopPlan | None) -> None:
        if self._chains > 1:
            stmt = replace(stmt, out=f"{stmt.out}_chain[k % {self._chains}]")
        super()._step(stmt, n_atoms, inside)

    def _add(self, name: str, sums: str, chains: int, fragment: Fragment) -> None:
        out = self.out
        with (
            out.unrolled("m", fragment.m_atoms),
            out.unrolled("n", fragment.n_atoms),
            out.unrolled("e", 4),
            out.unrolled("j", chains),
        ):
            out.line(f"{name}[m][n][e] += {sums}[j][m][n][e];")
