"""Which tiles are scores, what accumulates them, and which row vectors are running maxima."""

from __future__ import annotations

from codegen.tl.ast import (
    Arith,
    Copy,
    Custom,
    Gemm,
    walk,
)
from codegen.tl.flow import (
    Block,
    all_written,
)
from codegen.tl.vocabulary import ROW_OPS


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


def softmax_tiles(block: Block) -> frozenset[str]:
    """Return the names that a Softmax of the block works on."""
    return frozenset(s.name for s in walk(block) if isinstance(s, Custom) and s.op == "Softmax")
