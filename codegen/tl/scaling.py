"""The softmax scale, applied exactly once to each scores tile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from codegen.tl.ast import (
    Arith,
    Call,
    Custom,
    Expr,
    Gemm,
    Name,
    Num,
    Stmt,
    walk,
)
from codegen.tl.evaluate import LOG2E, Number
from codegen.tl.flow import (
    Block,
    reads,
    rewrite,
    written,
)
from codegen.tl.roles import (
    derived,
)
from codegen.tl.vocabulary import is_log2_scale, is_root_of_dim, is_scale

SCALE = "scale"
#: row reductions of a softmax that is spelt out
_WRITTEN_OUT = ("RowMax", "RowSum")


@dataclass(frozen=True, slots=True)
class Context:
    """What the rewrites need to know: the problem's default scale and mask, Params' numbers."""

    default_scale: float
    causal: bool
    numbers: Mapping[str, Number]


def scale_factor(stmt: Stmt, context: Context) -> float | None:
    """Return 1.0 where a statement multiplies by the scale, log2(e) by scale_log2, else None."""
    match stmt:
        case Custom(op="Scale"):
            factor = _factor(stmt.args[0] if stmt.args else Name(SCALE), context)
            return 1.0 if factor is None else factor  # whatever it is called, it is the scale
        case Arith(op="Multiply"):
            return _factor(Name(stmt.b) if isinstance(stmt.b, str) else Num(stmt.b), context)
        case Arith(op="Divide", b=str(root)) if is_root_of_dim(root):
            return 1.0
        case Arith(op="Divide", b=float(number)) if number > 0:
            return _factor(Num(1 / number), context)
        case _:
            return None


def _factor(expr: Expr, context: Context) -> float | None:
    if isinstance(expr, Name) and is_scale(expr.id):
        value = context.numbers.get(expr.id)
        near = value is not None and _close(value, context.default_scale * LOG2E)
        return LOG2E if near or is_log2_scale(expr.id) else 1.0
    if isinstance(expr, Num) and _close(expr.value, context.default_scale):
        return 1.0
    return LOG2E if isinstance(expr, Num) and _close(
        expr.value, context.default_scale * LOG2E
    ) else None  # fmt: skip


def _close(a: Number, b: float) -> bool:
    return abs(a - b) <= 1e-3 * abs(b)


def unify_scale(block: Block, scores: tuple[str, ...], context: Context) -> Block:
    """Give each scores tile one `Scale S, scale`, as near behind its GEMM as it commutes."""
    written_out = any(isinstance(s, Custom) and s.op in _WRITTEN_OUT for s in walk(block))
    for name in scores:
        family = derived(block, name)
        operands = {
            o.name for s in walk(block) if isinstance(s, Gemm) and s.out == name for o in (s.a, s.b)
        }
        hits = [
            s
            for s in walk(block)
            if scale_factor(s, context) is not None and _target(s) in family | operands
        ]
        if not hits:
            block = _after_gemms(block, name, None)
            continue
        hit = hits[0]
        factor = scale_factor(hit, context)
        base_two = written_out and factor != 1.0  # exp2 of scores times log2(e)
        if _target(hit) in operands or _commutes(block, name, hit):
            block = rewrite(block, lambda s, h=hit: None if s is h else s)  # type: ignore[misc]
            block = _after_gemms(block, name, hit, base_two)
        else:
            new = _scale_statements(_target(hit), hit, base_two)
            block = rewrite(block, lambda s, h=hit, n=new: n if s is h else s)  # type: ignore[misc]
    return _scaled_vectors(block, context)


def _target(stmt: Stmt) -> str:
    assert isinstance(stmt, Arith | Custom)
    return stmt.a if isinstance(stmt, Arith) else stmt.name


def _scale_statements(name: str, model: Stmt | None, base_two: bool) -> Block:
    span = model.span if model is not None else None
    scale = Custom("Scale", name, (Name(SCALE),))
    scale = scale if span is None else replace(scale, span=span)
    if not base_two:
        return (scale,)
    return (scale, Arith("Multiply", name, LOG2E, name, True, scale.span))


def _commutes(block: Block, name: str, hit: Stmt) -> bool:
    """Whether only masks stand between the GEMMs that give `name` and its scaling."""
    family = derived(block, name)
    started = False
    for stmt in walk(block):
        if stmt is hit:
            return _target(hit) == name
        if isinstance(stmt, Gemm) and stmt.out == name:
            started = True
        elif started and (family & reads(stmt) or written(stmt) in family):
            mask = isinstance(stmt, Custom) and stmt.op == "Mask"
            if not mask or any(isinstance(a, Call) for a in getattr(stmt, "args", ())):
                return False
    return False


def _after_gemms(block: Block, name: str, model: Stmt | None, base_two: bool = False) -> Block:
    """Insert the scaling of `name` behind the last GEMM that gives it in its run of statements."""
    last: Stmt | None = None
    for stmt in walk(block):
        if isinstance(stmt, Gemm) and stmt.out == name:
            last = stmt
        elif last is not None and (name in reads(stmt) or written(stmt) == name):
            break
    if last is None:
        return block
    anchor = last
    new = _scale_statements(name, model or anchor, base_two)
    return rewrite(block, lambda s: (s, *new) if s is anchor else s)


def _scaled_vectors(block: Block, context: Context) -> Block:
    """Running maxima that a program scales too keep doing so, under the scale's shared name."""

    def change(stmt: Stmt) -> Stmt | Block:
        if not isinstance(stmt, Arith) or (factor := scale_factor(stmt, context)) is None:
            return stmt
        if isinstance(stmt.b, str) and not (is_scale(stmt.b) or is_root_of_dim(stmt.b)):
            return stmt
        if not isinstance(stmt.b, str):
            return stmt
        scaled = replace(stmt, op="Multiply", b=SCALE)
        if factor == 1.0:
            return scaled
        return (scaled, Arith("Multiply", stmt.out, LOG2E, stmt.out, True, stmt.span))

    return rewrite(block, change)
