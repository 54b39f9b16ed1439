"""The dataflow that remains of a program once pipelines and roles are taken out."""

from __future__ import annotations

from dataclasses import replace

from codegen.tl.ast import (
    Allocate,
    Copy,
    Custom,
    Expr,
    For,
    Gemm,
    If,
    Memory,
    Name,
    Num,
    Param,
    Reshape,
    Sketch,
    Stmt,
    walk,
)
from codegen.tl.flow import Block, is_query_name, names_in, reads, rewrite, written
from codegen.tl.prepare import tile_names
from codegen.tl.subject import facts_of

ROLE_NAMES = frozenset(
    {
        "warpgroup", "warp_group", "wg", "wg_idx", "warpgroup_idx", "warp", "warp_id", "warp_idx",
        "role", "producer", "consumer", "is_producer", "is_consumer", "thread", "tid", "lane",
        "threadIdx.x", "thread_idx",
    }
)  # fmt: skip
_FRAGMENTS = ("MMA_C", "MMA_M", "MMA_N"), ("MMA_A", "MMA_M", "MMA_N_new")


def is_role(stmt: Stmt) -> bool:
    """Whether a branch gives warps different roles."""
    return isinstance(stmt, If) and bool(ROLE_NAMES & set(names_in(stmt.condition)))


def strip_schedule(sketch: Sketch) -> Sketch:
    """Return the sketch without barriers, roles and hand-made pipelines, spans kept."""
    barriers = {n for r in sketch.refused for n in r.names}
    moved = {n for s in walk(sketch.statements) for n in (*reads(s), _moved(s)) if n}

    def flatten(stmt: Stmt) -> Stmt | Block | None:
        if isinstance(stmt, Allocate):
            if stmt.name in barriers - moved:
                return None
            # (stages, rows, columns): how many tiles there are at once is the pipeline's
            return replace(stmt, shape=stmt.shape[-2:])
        if is_role(stmt):
            assert isinstance(stmt, If)
            return (*stmt.body, *stmt.orelse)
        if isinstance(stmt, Gemm):
            a, b = stmt.a, stmt.b
            cut_a = () if len(a.slices) == 1 else a.slices
            cut_b = () if len(b.slices) == 1 else b.slices
            return replace(stmt, a=replace(a, slices=cut_a), b=replace(b, slices=cut_b))
        return stmt

    flat = rewrite(sketch.statements, flatten)
    tiles = {s.target: s.name for s in walk(flat) if isinstance(s, Copy) and s.src and s.target}
    flat = rewrite(
        flat,
        lambda s: replace(s, name=tiles.get(s.name, s.name)) if isinstance(s, Allocate) else s,
    )
    return replace(sketch, statements=_unpipelined(tile_names(flat)), refused=())


def _moved(stmt: Stmt) -> str:
    return stmt.name if isinstance(stmt, Copy) else ""


def _unpipelined(block: Block) -> Block:
    """Fold a software pipeline: loads in a loop of their own, a first step, a shifted loop, a last.

    What the first step does to the scores and the last step does with them is one step's work.
    """
    loads = next((s for s in block if isinstance(s, For) and _only_copies(s)), None)
    shifted = next((s for s in block if isinstance(s, For) and s.lo == Num(1)), None)
    if loads is None or shifted is None or block.index(loads) > block.index(shifted):
        return block
    start, middle = block.index(loads), block.index(shifted)
    after = block[middle + 1 :]
    last = max((n for n, s in enumerate(after) if isinstance(s, Gemm)), default=-1)
    step = [*block[start + 1 : middle], *after[: last + 1]]
    if last < 0 or not any(isinstance(s, Gemm) for s in block[start + 1 : middle]):
        return block
    body: list[Stmt] = []
    waiting = list(loads.body)
    for stmt in step:
        for load in [w for w in waiting if isinstance(w, Copy) and w.name in reads(stmt)]:
            body.append(load)
            waiting.remove(load)
        body.append(stmt)
    return (*block[:start], replace(loads, body=tuple(body)), *after[last + 1 :])


def _only_copies(loop: For) -> bool:
    return bool(loop.body) and all(isinstance(s, Copy) for s in loop.body)


def mend(sketch: Sketch) -> Sketch:
    """Return the sketch with what can only be meant in one way put right.

    Fragments get their names, a Reshape stands before each GEMM that needs one, and tensors that
    are copied have their Allocate in global.
    """
    facts = facts_of(tuple(s for s in sketch.statements if not isinstance(s, Allocate | Param)))
    is_code = any(isinstance(s, Allocate) for s in sketch.statements)
    reshaped = {s.name for s in walk(sketch.statements) if isinstance(s, Reshape)}

    used = {n for s in walk(facts.block) for n in (*reads(s), written(s) or "", _moved(s))}

    def change(stmt: Stmt) -> Stmt | Block | None:
        if isinstance(stmt, Allocate) and stmt.memory is not Memory.GLOBAL:
            return stmt if stmt.name in used else None
        if isinstance(stmt, Reshape):
            return replace(stmt, src=_FRAGMENTS[0], dst=_FRAGMENTS[1])
        if isinstance(stmt, Custom) and stmt.op == "Rescale" and not stmt.args:
            return None  # a Softmax does it
        if isinstance(stmt, Gemm) and is_code and stmt.a.name in facts.products - reshaped:
            return (Reshape(stmt.a.name, *_FRAGMENTS, stmt.span), stmt)
        return stmt

    statements = rewrite(sketch.statements, change)
    if not is_code:
        return replace(sketch, statements=statements)
    has = {s.name for s in statements if isinstance(s, Allocate) and s.memory is Memory.GLOBAL}
    columns: tuple[Expr, ...] = (Name("D"),)
    for stmt in statements:
        if isinstance(stmt, Allocate) and stmt.memory is Memory.GLOBAL:
            columns = stmt.shape[-1:]
    missing = [n for n in sorted(facts.loaded | facts.stored) if n not in has]
    new = tuple(
        Allocate(
            name,
            Memory.GLOBAL,
            (Name("M" if is_query_name(name) else "N"), *columns),
            None,
            f"{name.lower()}_offset",
        )
        for name in missing
    )
    first = next((n for n, s in enumerate(statements) if isinstance(s, Allocate)), 0)
    return replace(sketch, statements=(*statements[:first], *new, *statements[first:]))
