"""The parts of an online softmax that programs leave out or say twice."""

from __future__ import annotations

from dataclasses import replace

from codegen.tl.ast import (
    Arith,
    Copy,
    Custom,
    For,
    Gemm,
    Memory,
    Name,
    Stmt,
    walk,
)
from codegen.tl.flow import (
    Block,
    all_written,
    reads,
    rewrite,
    written,
)
from codegen.tl.roles import (
    accumulators_of,
    has_softmax,
    implied_maxima,
    scores_of,
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
