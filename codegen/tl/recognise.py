"""An online softmax spelt out by hand becomes `Softmax S`, and only under proof.

A candidate is the same dataflow with every statement about running maxima and sums left out and
`Softmax S` in place of the first row maximum. It is taken when the interpreter gives the same
output for both, in float64, on random problems of several tiles and odd lengths. The same
candidate undoes FlashAttention-1's loop order, where the loop over query tiles is the inner one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from codegen.tl.ast import (
    Arith,
    Coord,
    Copy,
    Custom,
    For,
    Gemm,
    Kernel,
    Memory,
    Name,
    Num,
    Program,
    Reshape,
    Rows,
    Stmt,
    Tensor,
    Tile,
    walk,
)
from codegen.tl.axes import loop_kinds
from codegen.tl.flow import Block, names_in, reads, written
from codegen.tl.interpreter import run
from codegen.tl.numerics import Array
from codegen.tl.roles import accumulators_of, derived, has_softmax, scores_of
from codegen.tl.vocabulary import BLOCK_ROW, ELEMENTWISE, SPLIT_BOUNDS
from space.variant import DType

TOLERANCE = 1e-9
#: query and key rows of the proof's problems, as (tiles, rows more): odd lengths, more queries
#: than keys, fewer queries than keys
_LENGTHS = (((1, 5), (2, 3)), ((2, 1), (1, 7)), ((0, 3), (3, 1)))


def recognised(program: Program) -> Program:
    """Return `program` with every provable online softmax as Softmax and Normalize."""
    kernels = list(program.kernels)
    for position, kernel in enumerate(kernels):
        found = _candidate(kernel)
        if found is None:
            continue
        changed = [*kernels[:position], found, *kernels[position + 1 :]]
        candidate = replace(program, kernels=tuple(changed))
        if _same(program, candidate):
            return recognised(candidate)
    return program


# ---- candidate -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Roles:
    """What an explicit kernel's statements work on."""

    scores: str
    accumulator: str
    family: frozenset[str]  # the scores and what is computed elementwise from them
    vectors: frozenset[str]
    key_loop: For


def _roles(kernel: Kernel) -> _Roles | None:
    """Return the roles of a kernel with one explicit softmax, or None when it has none."""
    block = kernel.body
    vectors = frozenset(
        t.name for t in kernel.tiles if t.columns == 1 and t.memory is Memory.REGISTER
    )
    stored = {s.name for s in walk(block) if isinstance(s, Copy) and s.dst is Memory.GLOBAL}
    loaded = {s.name for s in walk(block) if isinstance(s, Copy) and s.src is Memory.GLOBAL}
    if stored & vectors - loaded:
        return None  # a log-sum-exp goes out: the running state has a use of its own
    loops = loop_kinds(block)
    for scores in scores_of(block):
        accumulators = accumulators_of(block, scores)
        family = derived(block, scores)
        explicit = any(isinstance(s, Custom) and s.op == "RowMax" and s.name in family
                       for s in walk(block))  # fmt: skip
        if len(accumulators) != 1 or not explicit or has_softmax(block, scores):
            continue
        for stmt in walk(block):
            bounds = isinstance(stmt, For) and {*names_in(stmt.lo), *names_in(stmt.hi)}
            if (
                isinstance(stmt, For)
                and loops.get(stmt.var) == "key"
                and not (bounds and bounds & set(SPLIT_BOUNDS))
                and any(isinstance(s, Gemm) and s.out == scores for s in walk(stmt.body))
            ):
                return _Roles(scores, accumulators[0], family, vectors, stmt)
    return None


def _candidate(kernel: Kernel) -> Kernel | None:
    roles = _roles(kernel)
    if roles is None:
        return None
    before, after = _around(kernel.body, roles.key_loop)
    loads = [s for s in before if isinstance(s, Copy)]
    body: list[Stmt] = []
    softened = False
    for stmt in walk(roles.key_loop.body):
        if isinstance(stmt, Copy) and stmt.src is Memory.GLOBAL:
            if _is_query(kernel, stmt.name):
                if stmt.name != roles.accumulator and stmt.name not in roles.vectors:
                    row = (Coord("L", Name(BLOCK_ROW)), *stmt.coords[1:])
                    loads.append(replace(stmt, coords=row))
                continue
            body.append(stmt)
        elif isinstance(stmt, Gemm | Reshape):
            body.append(_on_scores(stmt, roles))
        elif isinstance(stmt, Custom) and stmt.op == "RowMax" and not softened:
            body.append(Custom("Softmax", roles.scores, (), None, False, stmt.span))
            softened = True
        elif not softened and _is_elementwise(stmt, roles):
            body.append(stmt)
    if not softened:
        return None
    body = _scaled(body, roles.scores)
    fill = Custom("Fill", roles.accumulator, (Num(0.0),), None, False, roles.key_loop.span)
    loop = replace(roles.key_loop, body=tuple(body))
    last = roles.key_loop.span
    normalize = Custom("Normalize", roles.accumulator, (Name(roles.scores),), None, False, last)
    tail = [s for s in after if _belongs_to_tail(s, roles)]
    if not any(isinstance(s, Copy) and s.dst is Memory.GLOBAL for s in tail):
        tail += _stores(roles)  # the stores stood inside the loops
    return _kernel_of(kernel, (*loads, fill, loop, normalize, *tail))


def _scaled(body: list[Stmt], scores: str) -> list[Stmt]:
    """Scale the scores behind their GEMMs, where the program did it inside its exponentials."""
    if any(isinstance(s, Custom) and (s.op, s.name) == ("Scale", scores) for s in body):
        return body
    last = max(n for n, s in enumerate(body) if isinstance(s, Gemm) and s.out == scores)
    scale = Custom("Scale", scores, (Name("scale"),), None, False, body[last].span)
    return [*body[: last + 1], scale, *body[last + 1 :]]


def _around(block: Block, loop: For) -> tuple[Block, Block]:
    """Return the top-level statements before and after the one that holds `loop`."""
    for position, stmt in enumerate(block):
        if stmt is loop or any(s is loop for s in walk((stmt,))):
            return block[:position], block[position + 1 :]
    return block, ()


def _is_query(kernel: Kernel, name: str) -> bool:
    tensor = kernel.tensor(name)
    return tensor is not None and tensor.rows is Rows.QUERY


def _on_scores(stmt: Gemm | Reshape, roles: _Roles) -> Stmt:
    """The probabilities under a name of their own are the scores again."""
    if isinstance(stmt, Reshape):
        return replace(stmt, name=roles.scores) if stmt.name in roles.family else stmt
    if stmt.a.name in roles.family:
        return replace(stmt, a=replace(stmt.a, name=roles.scores))
    return stmt


def _is_elementwise(stmt: Stmt, roles: _Roles) -> bool:
    """Whether a statement changes the scores element by element, before the softmax."""
    match stmt:
        case Custom():
            own = stmt.name in roles.family and stmt.out is None
            return own and stmt.op in (*ELEMENTWISE, "Mask") and stmt.op not in ("Exp", "Exp2")
        case Arith():
            if stmt.a not in roles.family or stmt.out != stmt.a or stmt.b in roles.vectors:
                return False
            # the factor log2(e) of an exponential in base two goes with that exponential
            return not (isinstance(stmt.b, float) and abs(stmt.b - np.log2(np.e)) < 1e-6)
        case _:
            return False


def _belongs_to_tail(stmt: Stmt, roles: _Roles) -> bool:
    names = {*reads(stmt), written(stmt) or ""}
    return not (names & roles.vectors) and not isinstance(stmt, For)


def _stores(roles: _Roles) -> list[Stmt]:
    found: list[Stmt] = []
    for stmt in walk(roles.key_loop.body):
        if isinstance(stmt, Copy) and stmt.dst is Memory.GLOBAL and stmt.name not in roles.vectors:
            found.append(replace(stmt, coords=(Coord("L", Name(BLOCK_ROW)), *stmt.coords[1:])))
    return found


def _kernel_of(kernel: Kernel, body: Block) -> Kernel:
    """Return the kernel with a new body, and only the tensors and tiles it still uses."""
    used = {n for s in walk(body) for n in (*reads(s), written(s) or "")}
    moved = {s.name for s in walk(body) if isinstance(s, Copy) and s.src is not None}
    held = {(s.name, m) for s in walk(body) if isinstance(s, Copy) for m in (s.src, s.dst) if m}
    computed = {n for s in walk(body) if not isinstance(s, Copy) and (n := written(s)) is not None}

    def keeps(tile: Tile) -> bool:
        if (tile.name, tile.memory) in held:
            return True
        return tile.name in computed & used and tile.memory is Memory.REGISTER

    tensors: list[Tensor] = [t for t in kernel.tensors if t.name in moved]
    return replace(
        kernel, body=body, tensors=tuple(tensors), tiles=tuple(filter(keeps, kernel.tiles))
    )


# ---- proof ---------------------------------------------------------------------------------------


def _same(one: Program, other: Program) -> bool:
    """Whether two programs give the same outputs, to 1e-9 in float64, on random problems."""
    bm, bn = one.param("BM"), one.param("BN")
    generator = np.random.default_rng(20260101)
    for (query_tiles, query_more), (key_tiles, key_more) in _LENGTHS:
        m, n = query_tiles * bm + query_more, key_tiles * bn + key_more
        tensors = _random_inputs(one, m, n, generator)
        scalars = {name: _scalar(name) for name in one.scalars}
        try:
            expected = run(one, tensors, scalars, DType.FP16, exact=True)
            found = run(other, tensors, scalars, DType.FP16, exact=True)
        except ValueError:  # the literal program reads what nothing wrote: nothing to prove
            return False
        for name, values in found.items():
            if name not in expected or not _close(values, expected[name]):
                return False
    return True


def _close(values: Array, expected: Array) -> bool:
    return bool(np.all(np.abs(values - expected) <= TOLERANCE * (1.0 + np.abs(expected))))


def _scalar(name: str) -> float:
    """Some number for each run-time scalar: a window is whole, others are near one."""
    if name.startswith("window"):
        return 37.0
    return 0.31 if name == "scale" else 1.7


def _random_inputs(
    program: Program, m: int, n: int, generator: np.random.Generator
) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for kernel in program.kernels:
        for tensor in kernel.tensors:
            if tensor.output or tensor.workspace or tensor.name in found:
                continue
            rows = m if tensor.rows is Rows.QUERY else n
            heads = 2 if tensor.rows is Rows.QUERY else 1
            columns = n if isinstance(tensor.columns, str) else tensor.columns
            found[tensor.name] = generator.normal(size=(1, rows, heads, columns))
    return found
