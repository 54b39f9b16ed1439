"""Checks at the end of a kernel: every result is used or stored, every tensor moved."""

from __future__ import annotations

from codegen.tl.ast import (
    Arith,
    Copy,
    Custom,
    Gemm,
    Memory,
    Reshape,
    Stmt,
    walk,
)
from codegen.tl.flow import Block, names_in, reads, written
from codegen.tl.report import Report
from codegen.tl.source import Span
from codegen.tl.subject import Facts, Subject


def check_end(subject: Subject, facts: Facts, report: Report) -> None:
    """Report results of a kernel that are computed and never stored or used."""
    block = facts.block
    if not block:
        if not subject.sketch.refused:
            report.add(
                Span(1), "no-output", "the program computes nothing",
                "Write Copy and Compute statements, and a Copy of the output to global",
            )  # fmt: skip
        return
    read = {n for s in walk(block) for n in _read_apart(s)}
    for stmt in walk(block):
        if not isinstance(stmt, Gemm) or stmt.out in facts.stored | read:
            continue
        if stmt.accumulate:
            hint = f"Write `Copy {stmt.out} (BM, D) in coordinate [L = block_idx] from "
            report.add(
                stmt.span, "never-stored", f"{stmt.out} is accumulated and never copied back",
                hint + "register to global` after the loop",
            )  # fmt: skip
        else:
            report.add(
                stmt.span, "never-used", f"{stmt.out} is computed and never used",
                f"Use it, or `Copy {stmt.out} from register to global`",
            )  # fmt: skip
    if not facts.stored and not report.has("never-stored"):
        report.add(
            block[-1].span, "no-output", "nothing is copied back to global memory",
            "Write `Copy O (BM, D) in coordinate [L = block_idx] from register to global`",
        )  # fmt: skip


def _read_apart(stmt: Stmt) -> frozenset[str]:
    """Return the names a statement reads for another's sake than its own."""
    if isinstance(stmt, Gemm):
        return frozenset({stmt.a.name, stmt.b.name})
    if isinstance(stmt, Arith) and stmt.out == stmt.a:
        return frozenset({stmt.b} if isinstance(stmt.b, str) and stmt.b != stmt.a else ())
    if isinstance(stmt, Custom) and stmt.out in (None, stmt.name):
        return frozenset(n for a in stmt.args for n in names_in(a))
    return frozenset() if isinstance(stmt, Reshape) else reads(stmt)


def defined_by(block: Block) -> frozenset[str]:
    """Return names that a block gives a value, not only changes element by element."""
    found: set[str] = set()
    for stmt in walk(block):
        name = written(stmt)
        in_place = isinstance(stmt, Custom) and stmt.op not in ("Max", "Min", "Fill")
        if name is not None and not isinstance(stmt, Reshape) and not (
            in_place and name in reads(stmt)
        ):  # fmt: skip
            found.add(name)
    return frozenset(found)


def unwritten_tensors(subject: Subject, report: Report) -> None:
    """Report tensors that are allocated in global and neither read nor written."""
    moved = {
        s.name
        for b in subject.kernels
        for s in walk(b)
        if isinstance(s, Copy) and Memory.GLOBAL in (s.src, s.dst)
    }
    used = {n for b in subject.kernels for s in walk(b) for n in reads(s)}
    for a in subject.allocations:
        if a.memory is Memory.GLOBAL and a.name not in moved | used:
            report.add(
                a.span, "never-moved", f"{a.name} is allocated in global and never copied",
                f"Copy {a.name} from or to global, or take the Allocate out",
            )  # fmt: skip
