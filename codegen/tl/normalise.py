"""Elementwise statements in their canonical spelling: softcap, masks, numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from codegen.tl.ast import (
    Arith,
    BinOp,
    Call,
    Custom,
    Expr,
    For,
    If,
    Name,
    Num,
    Stmt,
)
from codegen.tl.evaluate import Number
from codegen.tl.flow import (
    Block,
    rewrite,
)
from codegen.tl.roles import (
    scores_of,
)
from codegen.tl.vocabulary import ALIBI_EXPONENT


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
        if expr == Name("alibi") or expr == Call("alibi", ()):
            return Call("alibi", (Num(ALIBI_EXPONENT),))
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

    def number(expr: Expr) -> Expr:
        if isinstance(expr, Name) and expr.id in numbers:
            return Num(numbers[expr.id])
        if isinstance(expr, Call) and expr.function in ("window", "alibi"):
            return replace(expr, args=tuple(number(a) for a in expr.args))
        if isinstance(expr, BinOp):
            return replace(expr, left=number(expr.left), right=number(expr.right))
        return expr

    def change(stmt: Stmt) -> Stmt:
        match stmt:
            case Arith(b=str(b)) if b in numbers:
                return replace(stmt, b=float(numbers[b]))
            case Custom(op=op) if op != "Scale":
                return replace(stmt, args=tuple(number(a) for a in stmt.args))
            case _:
                return stmt

    return rewrite(block, change)
