"""Rewrites of one kernel to canonical statements that change nothing of what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
    Name,
    Num,
    Reshape,
    Stmt,
    walk,
)
from codegen.tl.evaluate import LOG2E, Number
from codegen.tl.flow import (
    Block,
    Place,
    all_written,
    exposed,
    places,
    reads,
    rename,
    rewrite,
    written,
)
from codegen.tl.vocabulary import ROW_OPS, is_log2_scale, is_root_of_dim, is_scale

SCALE = "scale"


@dataclass(frozen=True, slots=True)
class Context:
    """What the rewrites need to know: the problem's default scale and mask, Params' numbers."""

    default_scale: float
    causal: bool
    numbers: Mapping[str, Number]


# ---- which tiles are scores, which accumulate them -----------------------------------------------


def derived(block: Block, name: str) -> frozenset[str]:
    """Return `name` and every tile computed elementwise from it."""
    found = {name}
    while True:
        before = len(found)
        for stmt in walk(block):
            match stmt:
                case Arith() if stmt.a in found:
                    found.add(stmt.out)
                case Custom() if stmt.name in found and stmt.op not in ROW_OPS:
                    found.add(stmt.out or stmt.name)
                case Copy(target=str(target)) if stmt.name in found:
                    found.add(target)
                case _:
                    pass
        if len(found) == before:
            return frozenset(found)


def scores_of(block: Block) -> tuple[str, ...]:
    """Return the GEMM outputs that another GEMM consumes as its first operand, in order."""
    gemms = [s for s in walk(block) if isinstance(s, Gemm)]
    firsts = {g.a.name for g in gemms}
    outs = dict.fromkeys(g.out for g in gemms)
    return tuple(o for o in outs if derived(block, o) & firsts)


def accumulators_of(block: Block, scores: str) -> tuple[str, ...]:
    """Return the accumulators of GEMMs whose first operand comes from `scores`."""
    family = derived(block, scores)
    return tuple(
        dict.fromkeys(
            s.out
            for s in walk(block)
            if isinstance(s, Gemm) and s.accumulate and s.a.name in family and s.out not in family
        )
    )


def has_softmax(block: Block, scores: str) -> bool:
    """Whether a Softmax statement works on `scores` or on what is derived from it."""
    family = derived(block, scores)
    return any(
        isinstance(s, Custom) and s.op == "Softmax" and s.name in family for s in walk(block)
    )


def running_maxima(block: Block) -> frozenset[str]:
    """Return names of row maxima, running ones included."""
    found: set[str] = set()
    while True:
        before = len(found)
        for stmt in walk(block):
            match stmt:
                case Custom(op="RowMax" | "Max"):
                    found.add(stmt.out or stmt.name)
                case Copy(target=str(target)) if stmt.name in found:
                    found.add(target)
                case _:
                    pass
        if len(found) == before:
            return frozenset(found)


# ---- scale ---------------------------------------------------------------------------------------


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


def implied_maxima(block: Block) -> frozenset[str]:
    """Return m of `Subtract m, m_new` where m_new is a row maximum and nothing writes m."""
    maxima = {
        s.out or s.name for s in walk(block) if isinstance(s, Custom) and s.op in ("RowMax", "Max")
    }
    whole = all_written(block)
    return frozenset(
        s.a
        for s in walk(block)
        if isinstance(s, Arith) and s.op == "Subtract" and s.b in maxima and s.a not in whole
    )


def carry_implied_maxima(block: Block) -> Block:
    """A running maximum that nothing updates takes the new one at the end of each step."""
    implied = implied_maxima(block)

    def change(stmt: Stmt) -> Stmt:
        if not isinstance(stmt, For):
            return stmt
        carries = tuple(
            Copy(s.b, target=s.a, span=s.span)
            for s in stmt.body
            if isinstance(s, Arith) and s.op == "Subtract" and s.a in implied
            and isinstance(s.b, str)
        )  # fmt: skip
        return replace(stmt, body=(*stmt.body, *carries))

    return rewrite(block, change) if implied else block


def join_running_max(block: Block) -> Block:
    """`RowMax S and get m_new` that then replaces m is the running maximum: it includes m.

    So is `RowMax S, m and get m_new`.
    """
    joined = {s.out or s.name for s in walk(block) if isinstance(s, Custom) and s.op == "Max"}
    carried = {s.name: s.target for s in walk(block) if isinstance(s, Copy) and s.target}

    def change(stmt: Stmt) -> Stmt | Block:
        if isinstance(stmt, Custom) and stmt.op == "RowMax":
            if stmt.args:
                join = Custom("Max", stmt.out or "", stmt.args, None, False, stmt.span)
                return (replace(stmt, args=()), join)
            running = carried.get(stmt.out or "")
            if running and stmt.out not in joined and running not in joined:
                join = Custom("Max", stmt.out or "", (Name(running),), None, False, stmt.span)
                return (stmt, join)
        return stmt

    return rewrite(block, change)


def unify_scale(block: Block, scores: tuple[str, ...], context: Context) -> Block:
    """Give each scores tile one `Scale S, scale`, as near behind its GEMM as it commutes."""
    written_out = any(isinstance(s, Custom) and s.op in ROW_OPS for s in walk(block))
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


# ---- softcap, masks, numbers ---------------------------------------------------------------------


def unify_softcap(block: Block) -> Block:
    """`Divide S, c`, `Tanh S`, `Multiply S, c` are `Softcap S, c`."""

    def run(statements: Block) -> Block:
        found: list[Stmt] = []
        position = 0
        while position < len(statements):
            stmt = statements[position]
            three = statements[position : position + 3]
            match three:
                case (
                    Arith(op="Divide", a=a, b=c, out=a1),
                    Custom(op="Tanh", name=a2, out=out),
                    Arith(op="Multiply", a=a3, b=c1, out=a4),
                ) if a == a1 == a2 == a3 == a4 and c == c1 and out in (None, a):
                    arg: Expr = Name(c) if isinstance(c, str) else Num(c)
                    found.append(Custom("Softcap", a, (arg,), None, False, stmt.span))
                    position += 3
                    continue
            if isinstance(stmt, For):
                stmt = replace(stmt, body=run(stmt.body))
            elif isinstance(stmt, If):
                stmt = replace(stmt, body=run(stmt.body), orelse=run(stmt.orelse))
            found.append(stmt)
            position += 1
        return tuple(found)

    def default(stmt: Stmt) -> Stmt:
        if isinstance(stmt, Custom) and stmt.op == "Softcap" and not stmt.args:
            return replace(stmt, args=(Name("softcap"),))
        return stmt

    return rewrite(run(block), default)


def unify_masks(block: Block, causal: bool, tensors: frozenset[str]) -> Block:
    """One `Mask S, kind` each, holes filled; a bias tensor added to the scores is a mask."""
    scores = scores_of(block)

    def kind(expr: Expr) -> Expr:
        if isinstance(expr, Call) and expr.function == "window" and not expr.args:
            right: Expr = Num(0) if causal else Name("window_right")
            return Call("window", (Name("window_left"), right))
        return expr

    def change(stmt: Stmt) -> Stmt | Block:
        match stmt:
            case Custom(op="Mask"):
                kinds = stmt.args or (Name("causal" if causal else "padding"),)
                return tuple(replace(stmt, args=(kind(k),)) for k in kinds)
            case Arith(op="Add", a=a, b=str(b)) if a in scores and b in tensors and a == stmt.out:
                return Custom("Mask", a, (Call("bias", (Name(b),)),), None, False, stmt.span)
            case _:
                return stmt

    return rewrite(block, change)


def number_scalars(block: Block, numbers: Mapping[str, Number]) -> Block:
    """Second operands and arguments that are Params become their numbers."""

    def change(stmt: Stmt) -> Stmt:
        match stmt:
            case Arith(b=str(b)) if b in numbers:
                return replace(stmt, b=float(numbers[b]))
            case Custom(op=op) if op != "Scale":
                args = tuple(
                    Num(numbers[a.id]) if isinstance(a, Name) and a.id in numbers else a
                    for a in stmt.args
                )
                return replace(stmt, args=args)
            case _:
                return stmt

    return rewrite(block, change)


# ---- names ---------------------------------------------------------------------------------------


def merge_names(block: Block, kept: frozenset[str]) -> Block:
    """Results that take the place of a tile no longer needed get that tile's name.

    `Softmax S and get P`, `Cast S and get P`, `Copy S_next to S`. Names in `kept` stay.
    """
    while (pair := _mergeable(block, kept)) is not None:
        stmt, old, new = pair
        block = rename(rewrite(block, lambda s, t=stmt: _in_place(s) if s is t else s), {new: old})  # type: ignore[misc]
    return rewrite(block, _in_place_of_itself)


def _in_place(stmt: Stmt) -> Stmt | None:
    match stmt:
        case Copy() | Custom(op="Cast"):
            return None
        case Custom():
            return replace(stmt, out=None, new=False)
        case Arith():
            return replace(stmt, out=stmt.a, new=True)
        case _:
            return stmt


def _in_place_of_itself(stmt: Stmt) -> Stmt | None:
    match stmt:
        case Custom(op="Cast", out=None):
            return None
        case Custom(out=str(out)) if out == stmt.name and stmt.op not in ROW_OPS:
            return replace(stmt, out=None, new=False)
        case Copy(target=str(target)) if target == stmt.name:
            return None
        case Arith() if stmt.out == stmt.a and not stmt.new:
            return replace(stmt, new=True)
        case _:
            return stmt


def _mergeable(block: Block, kept: frozenset[str]) -> tuple[Stmt, str, str] | None:
    order = list(places(block))
    for position, place in enumerate(order):
        match place.stmt:
            case Custom(name=old, out=str(new), op=op) if op not in ROW_OPS:
                pass
            case Arith(a=old, out=new):
                pass
            case Copy(name=old, target=str(new), src=None):
                pass
            case _:
                continue
        if old == new or old in kept or new in kept:
            continue
        before = [p.stmt for p in order[:position]]
        after = [p.stmt for p in order[position + 1 :]]
        if any(old in reads(s) or _names_global(s, old) for s in after):
            continue
        if any(new in reads(s) or written(s) == new for s in before):
            continue
        if sum(written(s) == new and not isinstance(s, Reshape) for s in _definitions(order)) != 1:
            continue
        bodies = [s.body for s in walk(block) if isinstance(s, For) and s.var in place.loops]
        if any(old in exposed(b) or new in exposed(b) for b in bodies):
            continue
        return place.stmt, old, new
    return None


def _definitions(order: list[Place]) -> list[Stmt]:
    """Return statements that make a name anew, leaving out those that change it in place."""
    return [
        p.stmt for p in order if (own := written(p.stmt)) is not None and own not in reads(p.stmt)
    ]


def _names_global(stmt: Stmt, name: str) -> bool:
    return isinstance(stmt, Copy) and stmt.name == name and Memory.GLOBAL in (stmt.src, stmt.dst)


# ---- the end of a softmax ------------------------------------------------------------------------


def unify_softmax_tail(block: Block, known: frozenset[str]) -> Block:
    """For each `Softmax S`: rescaling is implied, and O is divided by l exactly once.

    `known` are names of scalars and tensors; a factor that nothing defines is the softmax's own
    state (alpha, l).
    """
    for scores in scores_of(block):
        if not has_softmax(block, scores):
            continue
        for accumulator in accumulators_of(block, scores):
            block = _one_normalize(_without_state(block, accumulator, known), accumulator, scores)
    return rewrite(
        block, lambda s: replace(s, args=()) if isinstance(s, Custom) and s.op == "Softmax" else s
    )


def _without_state(block: Block, accumulator: str, known: frozenset[str]) -> Block:
    defined = (all_written(block) - _only_scaled(block)) | known

    def change(stmt: Stmt) -> Stmt | None:
        match stmt:
            case Custom(op="Rescale" | "Normalize", name=name) if name == accumulator:
                return None
            case Arith(op="Multiply" | "Divide", a=a, b=str(b)) if a == accumulator:
                if b in defined:
                    return stmt
                # under another name it is a renaming, not a division
                return None if stmt.out == a else Copy(a, target=stmt.out, span=stmt.span)
            case _:
                return stmt

    return rewrite(block, change)


def _only_scaled(block: Block) -> frozenset[str]:
    """Return names that are written only by statements that also read them: running state."""
    whole = all_written(block)
    fresh = {n for s in walk(block) if (n := written(s)) is not None and n not in reads(s)}
    return frozenset(whole - fresh)


def _one_normalize(block: Block, accumulator: str, scores: str) -> Block:
    new = Custom("Normalize", accumulator, (Name(scores),))
    found: list[Stmt] = []
    placed = False
    for stmt in block:
        found.append(stmt)
        if placed or not isinstance(stmt, For | Gemm):
            continue
        if any(isinstance(s, Gemm) and s.out == accumulator for s in walk((stmt,))):
            # behind the loop; a later accumulation of the same tile moves it further
            later = block[len(found) :]
            if not any(isinstance(s, Gemm) and s.out == accumulator for s in walk(later)):
                found.append(replace(new, span=stmt.span))
                placed = True
    return tuple(found)


def one_division(block: Block) -> Block:
    """A softmax spelt out divides each accumulator by its running sum once, after the loop."""
    loaded = {s.name for s in walk(block) if isinstance(s, Copy) and s.src is Memory.GLOBAL}
    row_sums = {s.out for s in walk(block) if isinstance(s, Custom) and s.op == "RowSum"}
    running = {
        s.a
        for s in walk(block)
        if isinstance(s, Arith) and s.op == "Add" and s.a == s.out and s.b in row_sums
    }
    for scores in scores_of(block):
        accumulators = [a for a in accumulators_of(block, scores) if a not in loaded]
        if has_softmax(block, scores) or len(running) != 1 or len(accumulators) != 1:
            continue
        block = _divide_once(block, accumulators[0], next(iter(running)))
    return block


def _divide_once(block: Block, accumulator: str, total: str) -> Block:
    found: list[Stmt] = []
    divided = False
    end = -1
    for stmt in block:
        repeats = (isinstance(stmt, Arith) and stmt.op == "Divide" and stmt.a == accumulator
                   and stmt.b == total)  # fmt: skip
        repeats |= isinstance(stmt, Custom) and stmt.op == "Normalize" and stmt.name == accumulator
        if repeats and divided:
            continue
        divided = divided or repeats
        found.append(stmt)
        if any(isinstance(s, Gemm) and s.out == accumulator for s in walk((stmt,))):
            end = len(found)
    if not divided and end > 0:
        span = found[end - 1].span
        found.insert(end, Arith("Divide", accumulator, total, accumulator, True, span))
    return tuple(found)
