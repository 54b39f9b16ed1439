"""GEMM lowering where warps of the same rows share the columns of a result."""

from __future__ import annotations

from codegen.cute.decode_plan import DecodePlan
from codegen.cute.gemm import GemmLowering
from codegen.cute.writer import Writer


class DecodeGemm(GemmLowering):
    """A warp owns its rows and its share of the columns; P is read whole, from shared memory."""

    def __init__(self, plan: DecodePlan, out: Writer) -> None:
        super().__init__(plan.base, out)
        self.column_warps = plan.column_warps

    def _columns(self, name: str) -> int:
        """Columns of a register tile over all warps of its rows."""
        return super()._columns(name) * self.column_warps

    def _share(self, result: str) -> int:
        return super()._columns(result) if self.column_warps > 1 else 0
