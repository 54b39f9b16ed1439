"""Attention variants that nobody ships a kernel for: the files of `examples/`, as requests.

They are what the published requests ask for. The folder is the repository's, not the package's.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


@dataclass(frozen=True, slots=True)
class Custom:
    """One variant: NAME.py with a function of q, k, v, and NAME.tl, a sketch that computes it."""

    name: str
    function: str
    causal: bool  #: whether its mask is exactly the causal one
    numbers: tuple[str, ...] = ()  #: NAME = NUMBER that the sketch reads

    @property
    def path(self) -> Path:
        """The file of the function."""
        return EXAMPLES / f"{self.name}.py"

    @property
    def reference(self) -> str:
        """The text of the function of tensors [B, S, H, D]. Raises OSError."""
        text = self.path.read_text(encoding="utf-8")
        found = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
        node = next(n for n in found if n.name == self.function)
        return ast.get_source_segment(text, node) or ""

    @property
    def sketch(self) -> str:
        """The sketch, its numbers as Params. Raises OSError."""
        text = (EXAMPLES / f"{self.name}.tl").read_text(encoding="utf-8")
        return text + "".join(f"Param {n}\n" for n in self.numbers)


SOFTCAP = Custom("softcap", "softcap_attention", True, ("softcap = 30",))
WINDOW = Custom("sliding_window", "window_attention", False, ("window_left = 1023",))
ALIBI = Custom("alibi", "alibi_attention", True)
SIGMOID = Custom("sigmoid", "sigmoid_attention", False, ("bias = -8.3",))
SINK = Custom("sink_tokens", "sink_attention", False, ("sinks = 4", "window_left = 1023"))
CUSTOMS = {c.name: c for c in (SOFTCAP, WINDOW, ALIBI, SIGMOID, SINK)}
