"""What the checks look at: a sketch with its parameters, its kernels and what they compute."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.tl.ast import Allocate, Copy, For, Gemm, Memory, Param, Sketch, walk
from codegen.tl.evaluate import Params, read_params
from codegen.tl.flow import Block, all_written, names_in
from codegen.tl.prepare import commuted, rename_indices, scalar_loads, split_kernels
from codegen.tl.roles import derived
from codegen.tl.vocabulary import BLOCK_COLUMN, BLOCK_ROW, SPLIT, SPLIT_BOUNDS
from space.params import Point
from space.variant import Problem

HEAD_DIM_NAMES = frozenset({"D", "Dv", "DV", "Dqk", "DQK", "d", "dv"})
LENGTH_NAMES = frozenset({"M", "N", "seq_len", "kv_len", "q_len"})
INDEX_NAMES = frozenset({BLOCK_ROW, BLOCK_COLUMN, SPLIT, *SPLIT_BOUNDS})


@dataclass(frozen=True, slots=True)
class Subject:
    """A sketch under check."""

    sketch: Sketch
    params: Params
    problem: Problem | None
    point: Point | None
    kernels: tuple[Block, ...]

    @property
    def is_code(self) -> bool:
        """Whether sizes are written, so that none may be missing."""
        return any(
            isinstance(s, Allocate) or (isinstance(s, Copy) and s.shape)
            for s in walk(self.sketch.statements)
        )

    @property
    def allocations(self) -> tuple[Allocate, ...]:
        """The Allocate statements in order."""
        return tuple(s for s in self.sketch.statements if isinstance(s, Allocate))

    def allocated(self, name: str, memory: Memory) -> Allocate | None:
        """Return the allocation of `name` at `memory`, or None."""
        return next((a for a in self.allocations if (a.name, a.memory) == (name, memory)), None)

    def lengths(self) -> frozenset[str]:
        """Names that stand for the problem's lengths and head dims."""
        found = set(HEAD_DIM_NAMES | LENGTH_NAMES)
        for a in self.allocations:
            if a.memory is Memory.GLOBAL:
                found |= {n for e in a.shape for n in names_in(e)}
        return frozenset(found)


def subject_of(sketch: Sketch, problem: Problem | None, point: Point | None) -> Subject:
    """Return a sketch with what the checks need to know of it."""
    params = read_params(sketch, problem, point)
    rest = tuple(s for s in sketch.statements if not isinstance(s, Allocate | Param))
    kernels = tuple(rename_indices(b, params.declared) for b in split_kernels(commuted(rest)))
    return Subject(sketch, params, problem, point, kernels)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is true of one kernel as a whole."""

    block: Block
    loaded: frozenset[str]
    stored: frozenset[str]
    written: frozenset[str]
    products: frozenset[str]  # GEMM outputs and what is computed elementwise from them
    scalars: frozenset[str]
    loop_vars: frozenset[str]

    def copy_line(self, name: str) -> int | None:
        """Return the line of the first Copy of `name` out of global memory, or None."""
        for stmt in walk(self.block):
            if isinstance(stmt, Copy) and stmt.name == name and stmt.src is Memory.GLOBAL:
                return stmt.span.line
        return None


def facts_of(block: Block) -> Facts:
    """Return what is true of a kernel as a whole."""
    copies = [s for s in walk(block) if isinstance(s, Copy)]
    outs = {s.out for s in walk(block) if isinstance(s, Gemm)}
    return Facts(
        block,
        frozenset(s.name for s in copies if s.src is Memory.GLOBAL),
        frozenset(s.name for s in copies if s.dst is Memory.GLOBAL),
        all_written(block),
        frozenset(n for o in outs for n in derived(block, o)),
        scalar_loads(block),
        frozenset(s.var for s in walk(block) if isinstance(s, For)),
    )


def place_of(name: str, is_query: bool) -> str:
    """Return a Copy statement to suggest for a tensor."""
    where, rows = ("block_idx", "BM") if is_query else ("i", "BN")
    return f"Copy {name} ({rows}, D) in coordinate [L = {where}] from global to shared"
