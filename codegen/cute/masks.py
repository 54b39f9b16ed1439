"""Masks by position: which keys a block row sees, and the bounds that follow for its loop."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.cute.expressions import cxx
from codegen.cute.structure import loads, mask_kind
from codegen.errors import PlanError
from codegen.tl import ast

#: operators after which a masked score of minus infinity contributes nothing
VANISH_AT_MINUS_INF = ("Softmax", "Exp", "Exp2", "Relu", "Sigmoid", "Gelu", "RowMax")
#: operators that give minus infinity another value: masks go behind them
FORGET_MINUS_INF = ("Softcap", "Tanh")
POSITIONAL_MASKS = ("causal", "window", "padding")


@dataclass(frozen=True, slots=True)
class Window:
    """Keys to the left and right of the diagonal, and first keys that stay visible, as C++."""

    left: str
    right: str
    sinks: str = ""  #: "" for none


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """Which key positions of a score tile a block row may see."""

    scores: str
    causal: bool
    window: Window | None
    fill: str  #: what a masked score becomes
    at: int  #: statement position in the loop before which it is applied


def masks_of(loop: ast.For) -> list[MaskPlan]:
    """Masks of the score tiles a loop computes; the tail past N is always masked.

    Raises PlanError on a bias of position that the program gives no way to be masked behind it.
    """
    found: list[MaskPlan] = []
    copied = {c.name for c in loads(loop.body)}
    for at, stmt in enumerate(loop.body):
        if not (isinstance(stmt, ast.Gemm) and stmt.b.name in copied and stmt.b.transposed):
            continue
        scores = stmt.out
        if any(m.scores == scores for m in found):
            continue
        later = [
            (k, s) for k, s in enumerate(loop.body)
            if isinstance(s, ast.Custom) and s.name == scores
        ]  # fmt: skip
        masks = [(k, s) for k, s in later if s.op == "Mask"]
        own = [(k, s) for k, s in masks if mask_kind(s) in POSITIONAL_MASKS]
        vanish = next((s.op for _, s in later if s.op in VANISH_AT_MINUS_INF), None)
        if vanish is None and len(own) < len(masks):
            raise PlanError(
                f"a bias on {scores} needs a Softmax, an exponential, Relu, Sigmoid or Gelu behind "
                f"it, so that a masked score can be minus infinity"
            )
        window = None
        for _, s in own:
            if mask_kind(s) == "window":
                assert isinstance(s.args[0], ast.Call)
                window = Window(*(cxx(a, {}) for a in s.args[0].args))
        before = own[0][0] if own else _mask_position(loop.body, scores, at)
        if own and _forgotten(later, before):
            before = _mask_position(loop.body, scores, at)
        found.append(
            MaskPlan(
                scores,
                any(mask_kind(s) == "causal" for _, s in own),
                window,
                "-INFINITY" if vanish else "0.f",
                before,
            )
        )
    return found


def _forgotten(later: list[tuple[int, ast.Custom]], at: int) -> bool:
    """Whether an operator between the mask at `at` and what makes it vanish undoes it."""
    for k, stmt in later:
        if k > at and stmt.op in (*VANISH_AT_MINUS_INF, *FORGET_MINUS_INF):
            return stmt.op in FORGET_MINUS_INF
    return False


def _mask_position(body: tuple[ast.Stmt, ...], scores: str, gemm_at: int) -> int:
    """Where an unstated tail mask goes: before the first operator that maps minus infinity to 0."""
    last_gemm = max(k for k, s in enumerate(body) if isinstance(s, ast.Gemm) and s.out == scores)
    for k, s in enumerate(body):
        own = k > last_gemm and isinstance(s, ast.Custom) and s.name == scores
        if own and isinstance(s, ast.Custom) and s.op in VANISH_AT_MINUS_INF:
            return k
    return last_gemm + 1


def has_sinks(masks: tuple[MaskPlan, ...]) -> bool:
    """Whether the loop jumps from the tiles of the first keys to those of the window."""
    return any(m.window and m.window.sinks for m in masks)


def tile_of(masks: tuple[MaskPlan, ...], var: str, index: str) -> str:
    """C++ for the key tile of step `index`: `index` itself, unless the loop jumps over tiles."""
    if not has_sinks(masks):
        return index
    return f"({index} < {var}_sinks ? {index} : {index} + {var}_jump)"


def _fold(function: str, terms: list[str]) -> str:
    """C++ for min or max of any number of terms."""
    text = terms[0]
    for term in dict.fromkeys(terms[1:]):
        text = f"{function}({text}, {term})" if term != text else text
    return text


def last_key(mask: MaskPlan, query: str, end: str) -> str:
    """C++ for the last key that a query sees; `end` is the last that there is."""
    ends = [end]
    if mask.causal:
        ends.append(f"{query} + diagonal")
    if mask.window:
        ends.append(f"{query} + diagonal + {mask.window.right}")
    return _fold("min", ends)


def visible(
    masks: tuple[MaskPlan, ...], row0: str, rows: int, columns: int
) -> tuple[str, str, str]:
    """C++ for a row block's first tile, its end of keys, and the end of keys all its rows see."""
    last = f"min({row0} + {rows}, M) + diagonal"
    low, keys, whole = "0", "N", "N"
    if any(m.causal for m in masks):
        whole = f"min(N, max(0, {row0} + diagonal + 1))"
        if all(m.causal for m in masks):
            keys = f"min(N, max(0, {last}))"
    windows = [m.window for m in masks if m.window]
    if windows and len(windows) == len(masks):
        left = _fold("max", [w.left for w in windows])
        right = _fold("max", [w.right for w in windows])
        low = f"max(0, {row0} + diagonal - {left}) / {columns}"
        if not any(m.causal for m in masks):
            keys = f"min(N, max(0, {last} + {right}))"
            nearest = _fold("min", [w.right for w in windows])
            whole = f"min(N, max(0, {row0} + diagonal + 1 + {nearest}))"
    return low, keys, whole
