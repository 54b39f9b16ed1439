"""One line of TL to its statement, tolerant of the clauses that models add or leave out."""

from __future__ import annotations

from dataclasses import dataclass, field

from codegen.tl.ast import (
    Allocate,
    Arith,
    BinOp,
    Call,
    Coord,
    Copy,
    Custom,
    Expr,
    Gemm,
    Memory,
    Name,
    Num,
    Operand,
    Param,
    Refused,
    Reshape,
    Slice,
    Stmt,
)
from codegen.tl.source import Diagnostic, Span
from codegen.tl.tokens import Cursor, arguments, expression
from codegen.tl.vocabulary import MEMORIES, arith_operator, nearest_operator, operator

_COPY_HINT = "Write `Copy K (BN, D) in coordinate [L = i] from global to shared`"
_GEMM_HINT = "Write `Compute GEMM Q, K.T and get S` or `Compute GEMM S, V and accumulate O`"
_RESHAPE_HINT = "Write `Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)`"
_OFFSET_HINT = "Write `Allocate Q in global (M, D) with offset q_offset`"


@dataclass(slots=True)
class Read:
    """The statements of one line, what is wrong with it, and what of it the checker refuses."""

    statements: list[Stmt] = field(default_factory=list)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


def read_statement(cursor: Cursor) -> Read:
    """Read a Param, Allocate, Copy, Compute or Reshape. Raises Fault when it makes no sense."""
    span = cursor.span
    word = cursor.token.text
    cursor.at += 1
    read = Read()
    match word:
        case "Param":
            read.statements.append(_param(cursor, span))
        case "Allocate":
            _allocate(cursor, span, read)
        case "Copy":
            _copy(cursor, span, read)
        case "Reshape":
            read.statements.append(_reshape(cursor, span))
        case _:
            read.statements.append(_compute(cursor, span))
    _leftover(cursor, read)
    return read


def _leftover(cursor: Cursor, read: Read) -> None:
    """Say what stands after a complete statement, which is kept."""
    if cursor.finished():
        return
    rest = cursor.rest()
    span = cursor.span
    if rest.startswith(("where", "with mask")) and isinstance(read.statements[-1], Custom):
        hint = "Write `Compute Mask S, causal`, `window(l, r)`, `bias(B)` or `padding`"
    elif "zero" in rest or "bound" in rest or "fill" in rest:
        hint = "Take it out: reads past the end give zeros and writes past it are dropped already"
    elif rest.startswith("with"):
        hint = "Take it out: only an Allocate has `with offset NAME`"
    else:
        hint = "Take it out, or put it behind `#` as a comment"
    message = f"`{rest}` is no part of a TL statement"
    read.diagnostics.append(Diagnostic(span, "unknown-clause", message, hint))


# ---- Param and Allocate --------------------------------------------------------------------------


def _param(cursor: Cursor, span: Span) -> Param:
    hint = "Write `Param BM in {64, 128}` or `Param BM = 128`"
    name = cursor.name("a parameter's name", hint)
    if cursor.accept("in"):
        opening = cursor.token.text
        if opening not in ("{", "[", "("):
            raise cursor.fault("syntax", "a set of whole numbers expected", hint)
        cursor.at += 1
        found = arguments(cursor, {"{": "}", "[": "]", "(": ")"}[opening])
        choices = [_choice(e) for e in found]
        if not choices or None in choices:
            raise cursor.fault("syntax", f"the choices of {name} are not whole numbers", hint)
        return Param(name, tuple(c for c in choices if c is not None), None, span)
    cursor.expect("=", hint)
    return Param(name, (), _boolean(expression(cursor)), span)


def _boolean(expr: Expr) -> Expr:
    """`true`, `on` and the like are the numbers 1 and 0."""
    words = {"true": 1, "True": 1, "on": 1, "false": 0, "False": 0, "off": 0}
    return Num(words[expr.id]) if isinstance(expr, Name) and expr.id in words else expr


def _choice(expr: Expr) -> int | None:
    value = _boolean(expr)
    return value.value if isinstance(value, Num) and isinstance(value.value, int) else None


def _memory(cursor: Cursor, hint: str) -> Memory:
    word = cursor.token.text
    if word not in MEMORIES:
        found = f"`{word}`" if word else "the end of the line"
        raise cursor.fault(
            "unknown-memory", f"global, shared or register expected, found {found}", hint
        )
    cursor.at += 1
    cursor.accept("memory")
    return MEMORIES[word]


def _allocate(cursor: Cursor, span: Span, read: Read) -> None:
    name = cursor.name("the name of what is allocated", _OFFSET_HINT)
    cursor.expect("in", _OFFSET_HINT)
    if cursor.token.text in ("barrier", "mbarrier"):
        read.refused.append(Refused(cursor.line.text.strip(), (name,), span))
        cursor.at = len(cursor.tokens) - 1
        return
    memory = _memory(cursor, _OFFSET_HINT)
    if not cursor.accept("("):
        raise cursor.fault("missing-shape", f"Allocate {name} has no shape", _OFFSET_HINT)
    shape = arguments(cursor, ")")
    dtype = offset = None
    while True:
        if dtype is None and cursor.accept("as"):
            dtype = cursor.name("an element type", "Write `as f32` or `as f16`")
        elif offset is None and cursor.accept("with", "offset"):
            offset = cursor.name("an offset's name", _OFFSET_HINT)
        else:
            break
    read.statements.append(Allocate(name, memory, shape, dtype, offset, span))


# ---- Copy ----------------------------------------------------------------------------------------


def _copy(cursor: Cursor, span: Span, read: Read) -> None:
    names = [cursor.name("the name of a tensor", _COPY_HINT)]
    index: tuple[Expr, ...] = arguments(cursor, "]") if cursor.accept("[") else ()
    while cursor.accept(","):
        names.append(cursor.name("the name of a tensor", _COPY_HINT))
    shape: tuple[Expr, ...] = ()
    coords: tuple[Coord, ...] = ()
    src: Memory | None = None
    dst: Memory | None = None
    target: str | None = None
    while True:
        if not shape and cursor.accept("("):
            shape = arguments(cursor, ")")
        elif not coords and (cursor.accept("in", "coordinate") or cursor.accept("at")):
            coords = _coords(cursor)
        elif src is None and cursor.accept("from"):
            src = _memory(cursor, _COPY_HINT)
        elif dst is None and target is None and cursor.accept("to"):
            if cursor.token.text in MEMORIES:
                dst = _memory(cursor, _COPY_HINT)
                if cursor.token.kind == "name" and cursor.token.text not in ("in", "with", "at"):
                    target = cursor.name("the name of a tile", _COPY_HINT)
                    if cursor.accept("["):  # a pipeline's buffer: which one is not TL's to say
                        arguments(cursor, "]")
                        read.refused.append(Refused(cursor.line.text.strip(), (), span))
            else:
                target = cursor.name("a memory or the name of a tile", _COPY_HINT)
        else:
            break
    if src is not None and target is not None and dst is None:
        raise cursor.fault(
            "unknown-memory", f"global, shared or register expected, found `{target}`", _COPY_HINT
        )
    if (dst is None and target is None) or (src is None and dst is not None):
        missing = "from global" if src is None else "to shared"
        raise cursor.fault("syntax", f"Copy {names[0]} does not say `{missing}`", _COPY_HINT)
    for name in names:
        read.statements.append(Copy(name, shape, coords, src, dst, target, index, span))


def _coords(cursor: Cursor) -> tuple[Coord, ...]:
    hint = "Write `in coordinate [L = i]`"
    close = "]" if cursor.accept("[") else ")"
    if close == ")":
        cursor.expect("(", hint)
    found: list[Coord] = []
    while True:
        axis = "L" if not found else "D"
        if cursor.token.kind == "name" and cursor.tokens[cursor.at + 1].text == "=":
            axis = cursor.name("an axis", hint)
            cursor.expect("=", hint)
        found.append(Coord(axis, expression(cursor)))
        if not cursor.accept(","):
            break
    cursor.expect(close, hint)
    return tuple(found)


# ---- Compute and Reshape -------------------------------------------------------------------------


def _compute(cursor: Cursor, span: Span) -> Stmt:
    word = cursor.token.text
    if cursor.token.kind != "name":
        raise cursor.fault("syntax", "an operator expected after `Compute`", _GEMM_HINT)
    if cursor.tokens[cursor.at + 1].text == "=":
        raise cursor.fault(
            "invented-statement",
            f"`{cursor.line.text.strip()}` is an assignment, not TL",
            _GEMM_HINT,
        )
    cursor.at += 1
    if word.lower() in ("gemm", "matmul"):
        return _gemm(cursor, span)
    if (arith := arith_operator(word)) is not None:
        return _arith(cursor, span, arith)
    known = operator(word)
    if known is None:
        cursor.at -= 1
        raise cursor.fault(
            "unknown-operator",
            f"`{word}` is not an operator",
            f"The nearest known one is `{nearest_operator(word)}`",
        )
    return _custom(cursor, span, *known)


def _gemm(cursor: Cursor, span: Span) -> Gemm:
    a = _operand(cursor)
    cursor.expect(",", _GEMM_HINT)
    b = _operand(cursor)
    cursor.expect("and", _GEMM_HINT)
    if cursor.accept("accumulate"):
        if not cursor.accept("to"):
            cursor.accept("into")
        return Gemm(a, b, cursor.name("the output's name", _GEMM_HINT), True, span)
    cursor.expect("get", _GEMM_HINT)
    cursor.accept("new")
    return Gemm(a, b, cursor.name("the output's name", _GEMM_HINT), False, span)


def _operand(cursor: Cursor) -> Operand:
    name = cursor.name("a GEMM operand", _GEMM_HINT)
    slices: list[Slice] = []
    if cursor.accept("["):
        while True:
            slices.append(_slice(cursor))
            if not cursor.accept(","):
                break
        cursor.expect("]", "Write slices as `KV[:, 0:DV]`")
    return Operand(name, tuple(slices), cursor.accept(".T"))


def _slice(cursor: Cursor) -> Slice:
    lo = None if cursor.peek(":") else expression(cursor)
    if not cursor.accept(":"):
        assert lo is not None
        return Slice(lo, BinOp("+", lo, Num(1)))
    hi = None if cursor.peek(",") or cursor.peek("]") else expression(cursor)
    return Slice(lo, hi)


def _result(cursor: Cursor) -> tuple[str | None, bool]:
    """Read `and get [new] NAME`, if it stands there."""
    if not cursor.accept("and"):
        return None, False
    cursor.expect("get", "Write `and get NAME`")
    new = cursor.accept("new")
    return cursor.name("the result's name", "Write `and get NAME`"), new


def _arith(cursor: Cursor, span: Span, op: str) -> Arith:
    hint = f"Write `Compute {op} S, scale and get new S`"
    a = cursor.name("a tile", hint)
    cursor.expect(",", hint)
    negative = cursor.accept("-")
    b: str | float
    if cursor.token.kind == "number":
        b = float(cursor.number()) * (-1.0 if negative else 1.0)
    elif cursor.accept("inf"):
        b = float("-inf") if negative else float("inf")
    else:
        b = cursor.name("a name or a number", hint)
    if cursor.token.text in ("+", "-", "*", "/", "(", "["):
        raise cursor.fault(
            "syntax", f"an expression cannot stand in a {op}", "Name it: `Param c = expression`"
        )
    out, new = _result(cursor)
    return Arith(op, a, b, out or a, new or out is None, span)


def _custom(cursor: Cursor, span: Span, op: str, implied: tuple[Expr, ...]) -> Custom:
    name = cursor.name("a tile", f"Write `Compute {op} S`")
    args: list[Expr] = []
    while cursor.accept(","):
        args.append(expression(cursor))
    out, new = _result(cursor)
    if implied == (Call("window", ()),) and args and not isinstance(args[0], Call):
        args = [Call("window", tuple(args))]  # SlidingWindowMask S, l, r
    elif implied:
        args = args if args and isinstance(args[0], Call) else list(implied)
    if op == "Fill" and not args:
        args = [Num(0.0)]
    return Custom(op, name, tuple(args), out, new, span)


def _reshape(cursor: Cursor, span: Span) -> Reshape:
    name = cursor.name("a tile", _RESHAPE_HINT)
    cursor.expect("from", _RESHAPE_HINT)
    src = _fragment(cursor)
    cursor.expect("to", _RESHAPE_HINT)
    return Reshape(name, src, _fragment(cursor), span)


def _fragment(cursor: Cursor) -> tuple[str, str, str]:
    """Read `(MMA_C, MMA_M, MMA_N)`; anything else is kept as one text for the checker to name."""
    if not cursor.accept("("):
        return cursor.name("a fragment", _RESHAPE_HINT), "", ""
    parts = arguments(cursor, ")")
    names = [p.id for p in parts if isinstance(p, Name)]
    if len(names) != len(parts) or len(names) != 3:
        raise cursor.fault("bad-fragment", "a fragment has three names", _RESHAPE_HINT)
    return names[0], names[1], names[2]
