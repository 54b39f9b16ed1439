"""What can go wrong between TL text and a cubin, by who can act on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codegen.kernel import KernelSource
    from codegen.tl.source import Diagnostic


class CodegenError(Exception):
    """Base of everything this package raises on purpose."""


class TLError(CodegenError):
    """The TL text is at fault. Carries every diagnostic, not only the first."""

    def __init__(self, diagnostics: Sequence[Diagnostic]) -> None:
        super().__init__("\n".join(str(d) for d in diagnostics))
        self.diagnostics = tuple(diagnostics)

    def __reduce__(self) -> tuple[type[TLError], tuple[tuple[Diagnostic, ...]]]:
        return type(self), (self.diagnostics,)  # so that it crosses a process pool


class PlanError(CodegenError):
    """A legal program that this back end cannot lower at this point; says which limit."""


class CompileError(CodegenError):
    """NVRTC refused the emitted source. Keeps its log."""

    def __init__(self, log: str, source: KernelSource) -> None:
        lines = log.strip().splitlines() or ["NVRTC failed"]
        super().__init__(next((line for line in lines if "error" in line), lines[0]))
        self.log = log
        self.source = source

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, KernelSource]]:
        return type(self), (self.log, self.source)


class ToolchainMissing(CodegenError):
    """NVRTC or the CuTe headers are not installed; says which package brings them."""
