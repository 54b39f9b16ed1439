"""Nodes to canonical TL text, such that parse(to_text(x)) == x."""

from __future__ import annotations

from codegen.tl.ast import (
    Allocate,
    Arith,
    BinOp,
    Call,
    Compare,
    Coord,
    Copy,
    Custom,
    Expr,
    For,
    Gemm,
    If,
    Index,
    Name,
    Num,
    Operand,
    Param,
    Reshape,
    Sketch,
    Slice,
    Stmt,
)

_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "%": 2}
_ATOM = 4

Node = Sketch | Stmt | Expr | Operand | Slice | Coord


def to_text(node: Node) -> str:
    """Return the canonical text of a node; a sketch, loop or branch spans several lines."""
    match node:
        case Sketch():
            return "".join(f"{line}\n" for s in node.statements for line in _lines(s))
        case Operand():
            slices = f"[{', '.join(map(to_text, node.slices))}]" if node.slices else ""
            return node.name + slices + (".T" if node.transposed else "")
        case Slice():
            return ":".join("" if e is None else expr_text(e) for e in (node.lo, node.hi))
        case Coord():
            return f"{node.axis} = {expr_text(node.index)}"
        case Num() | Name() | BinOp() | Call() | Index() | Compare():
            return expr_text(node)
        case _:
            return "\n".join(_lines(node))


def header(stmt: Stmt) -> str:
    """Return the first line of a statement: the whole of it, or the head of a loop or branch."""
    return _lines(stmt)[0]


def _lines(stmt: Stmt) -> list[str]:
    match stmt:
        case For():
            head = f"for {stmt.var} = {expr_text(stmt.lo)}:{expr_text(stmt.hi)}"
            return [head, *_block(stmt.body), "end"]
        case If():
            orelse = ["else", *_block(stmt.orelse)] if stmt.orelse else []
            return [f"if {expr_text(stmt.condition)}", *_block(stmt.body), *orelse, "end"]
        case _:
            return [_simple(stmt)]


def _block(body: tuple[Stmt, ...]) -> list[str]:
    return [f"  {line}" for stmt in body for line in _lines(stmt)]


def _simple(stmt: Param | Allocate | Copy | Gemm | Arith | Custom | Reshape) -> str:
    match stmt:
        case Param():
            if stmt.value is not None:
                return f"Param {stmt.name} = {expr_text(stmt.value)}"
            return f"Param {stmt.name} in {{{', '.join(map(str, stmt.choices))}}}"
        case Allocate():
            dtype = f" as {stmt.dtype}" if stmt.dtype else ""
            offset = f" with offset {stmt.offset}" if stmt.offset else ""
            return f"Allocate {stmt.name} in {stmt.memory} {_shape(stmt.shape)}{dtype}{offset}"
        case Copy():
            return _copy(stmt)
        case Gemm():
            verb = "accumulate" if stmt.accumulate else "get"
            return f"Compute GEMM {to_text(stmt.a)}, {to_text(stmt.b)} and {verb} {stmt.out}"
        case Arith():
            second = stmt.b if isinstance(stmt.b, str) else _number(stmt.b)
            new = "new " if stmt.new else ""
            return f"Compute {stmt.op} {stmt.a}, {second} and get {new}{stmt.out}"
        case Custom():
            arguments = "".join(f", {expr_text(a)}" for a in stmt.args)
            new = "new " if stmt.new else ""
            out = f" and get {new}{stmt.out}" if stmt.out else ""
            return f"Compute {stmt.op} {stmt.name}{arguments}{out}"
        case Reshape():
            return f"Reshape {stmt.name} from {_fragment(stmt.src)} to {_fragment(stmt.dst)}"


def _copy(stmt: Copy) -> str:
    index = f"[{', '.join(map(expr_text, stmt.index))}]" if stmt.index else ""
    shape = f" {_shape(stmt.shape)}" if stmt.shape else ""
    coords = f" in coordinate [{', '.join(map(to_text, stmt.coords))}]" if stmt.coords else ""
    source = f" from {stmt.src}" if stmt.src else ""
    target = " ".join(w for w in (stmt.dst, stmt.target) if w)
    return f"Copy {stmt.name}{index}{shape}{coords}{source} to {target}"


def _fragment(fragment: tuple[str, str, str]) -> str:
    if not fragment[1]:  # not a fragment: kept as written for the checker to name
        return fragment[0]
    return f"({', '.join(fragment)})"


def _shape(shape: tuple[Expr, ...]) -> str:
    return f"({', '.join(map(expr_text, shape))})"


def _number(value: int | float) -> str:
    return repr(value)


def _precedence(expr: Expr) -> int:
    if isinstance(expr, Compare):
        return 0
    return _PRECEDENCE[expr.op] if isinstance(expr, BinOp) else _ATOM


def expr_text(expr: Expr) -> str:
    """Return the text of an expression with the fewest parentheses."""
    match expr:
        case Num():
            return _number(expr.value)
        case Name():
            return expr.id
        case Call():
            return f"{expr.function}({', '.join(map(expr_text, expr.args))})"
        case Index():
            return f"{expr.name}[{', '.join(map(expr_text, expr.indices))}]"
        case BinOp() | Compare():
            own = _precedence(expr)
            left, right = expr_text(expr.left), expr_text(expr.right)
            if _precedence(expr.left) < max(own, 1):
                left = f"({left})"
            # operators group from the left, so an equal one on the right needs parentheses
            if _precedence(expr.right) <= own:
                right = f"({right})"
            return f"{left} {expr.op} {right}"
