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


class PlanError(CodegenError):
    """A legal program that this back end cannot lower at this point; says which limit."""


class CompileError(CodegenError):
    """NVRTC refused the emitted source. Keeps its log."""

    def __init__(self, log: str, source: KernelSource) -> None:
        super().__init__(log.strip().splitlines()[0] if log.strip() else "NVRTC failed")
        self.log = log
        self.source = source


class ToolchainMissing(CodegenError):
    """NVRTC or the CuTe headers are not installed; says which package brings them."""
