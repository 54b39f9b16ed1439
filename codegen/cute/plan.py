"""Program × GPU → KernelPlan: buffers, layouts, copy schedule, roles. Emission decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from codegen.cute.bias import without_bias_copies
from codegen.cute.layout import Fragment, SharedLayout
from codegen.cute.masks import POSITIONAL_MASKS, MaskPlan, masks_of
from codegen.cute.pipeline import Pipeline, TileUse, schedule
from codegen.cute.structure import (
    block_rows,
    copies,
    is_key_loop,
    loads,
    mask_kind,
    number,
    number_columns,
    reads,
    stores,
    used_scalars,
    uses_name,
    window_scalars,
)
from codegen.errors import PlanError
from codegen.kernel import Arg, ArgKind, GridAxis
from codegen.tl import ast
from space.gpu import GpuSpec
from space.tiles import WARP
from space.variant import Problem


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tile in shared memory: `stages` copies of its layout from `offset` on."""

    name: str
    layout: SharedLayout
    stages: int
    offset: int
    by_rows: bool = False  #: a thread's chunks are of few rows, each of which it finds once

    @property
    def bytes(self) -> int:
        """Size of all stages."""
        return self.layout.bytes * self.stages


@dataclass(frozen=True, slots=True)
class SoftmaxPlan:
    """An online softmax: its scores, whether the scale is folded in, and what it rescales."""

    scores: str
    scale_folded: bool
    accumulators: tuple[str, ...]
    threshold: int  #: log2 growth of the maximum before a rescale; 0 rescales always
    integer_max: bool  #: maxima of three by integer comparison; needs a threshold
    fma_share: int  #: one column of so many takes 2^x on the FMA pipes; 0 none


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """A loop over tiles: its bound, its copies and its masks."""

    var: str
    key_tiles: bool  #: runs over the tiles of the key rows, trimmed by the masks
    columns: int  #: key rows of a tile, when `key_tiles`
    hi: ast.Expr
    lo: ast.Expr
    body: tuple[ast.Stmt, ...]
    pipeline: Pipeline | None
    masks: tuple[MaskPlan, ...]
    peel: bool


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Everything emission prints for one `__global__` function."""

    entry: str
    problem: Problem
    sm: int
    warps: int
    blocks_per_sm: int
    rows: int  #: rows of a block: queries, or queries of several heads
    buffers: tuple[Buffer, ...]
    fragments: tuple[tuple[str, Fragment], ...]
    row_vectors: tuple[str, ...]
    a_fragments: tuple[str, ...]  #: tiles preloaded as A operands in registers
    softmaxes: tuple[SoftmaxPlan, ...]
    loops: tuple[LoopPlan, ...]
    kernel: ast.Kernel
    program: ast.Program
    scalars: tuple[str, ...]
    smem_bytes: int
    grid: tuple[GridAxis, ...]
    args: tuple[Arg, ...]
    head_group: int  #: planes walked together; 1 rows first, 0 all planes first
    longest_first: bool
    p_in_registers: bool
    p_offset: int
    epilogue_smem: bool
    q_overlaps: bool  #: the row tile shares bytes with the loop's tiles
    lines: tuple[str, ...] = field(default=())
    pack_heads: int = 1  #: query heads of one KV head that are neighbouring rows

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP

    @property
    def queries(self) -> int:
        """Queries that a block's rows span."""
        return self.rows // self.pack_heads

    def buffer(self, name: str) -> Buffer | None:
        """Return the shared buffer of `name`, or None."""
        return next((b for b in self.buffers if b.name == name), None)

    def fragment(self, name: str) -> Fragment | None:
        """Return the register tile of `name`, or None."""
        return next((f for n, f in self.fragments if n == name), None)

    def softmax(self, scores: str) -> SoftmaxPlan:
        """Return the plan of the softmax over `scores`."""
        return next(s for s in self.softmaxes if s.scores == scores)

    def loop(self, stmt: ast.For) -> LoopPlan:
        """Return the plan of a loop."""
        return next(p for p in self.loops if p.body is stmt.body)


def plan_kernel(
    program: ast.Program, kernel: ast.Kernel, problem: Problem, gpu: GpuSpec
) -> KernelPlan:
    """Plan one kernel of a bound program. Raises PlanError naming the limit that is broken."""
    kernel = without_bias_copies(kernel)
    warps = program.param("warps", 4)
    body = kernel.body
    rows = block_rows(kernel)
    if rows % (16 * warps):
        raise PlanError(f"{rows} rows over {warps} warps are not a multiple of 16 rows a warp")
    loops = [s for s in ast.walk(body) if isinstance(s, ast.For)]
    stages = program.param("stages", 1) if gpu.has_cp_async else 1
    swizzle = program.param("swizzle", 0)
    looped = {c.name for loop in loops for c in loads(loop.body)}
    a_fragments = _a_fragments(program, kernel, looped)
    softmaxes = softmax_plans(program, body)
    loop_plans = tuple(loop_plan(program, kernel, loop, stages) for loop in loops)
    row_buffers, loop_buffers = _layouts(kernel, swizzle, stages, looped)
    q_overlaps = bool(row_buffers) and all(name in a_fragments for name, _, _ in row_buffers)
    buffers, end = _place(row_buffers, loop_buffers, q_overlaps)
    p_in_registers = bool(program.param("p_in_registers", 1))
    p_offset, p_bytes = end, 0
    if not p_in_registers:
        reshaped = [s.name for s in ast.walk(body) if isinstance(s, ast.Reshape)]
        p_bytes = max(
            (SharedLayout(rows, number_columns(kernel, n), 0).bytes for n in reshaped), default=0
        )
    epilogue = bool(program.param("epilogue_smem", 1))
    staged = _out_columns(kernel) if epilogue else []
    out_bytes = max(
        (SharedLayout(rows, c, swizzle_for(c, swizzle)).bytes for c in staged), default=0
    )
    smem = max(end + p_bytes, out_bytes)
    if smem > gpu.smem_per_block_bytes:
        parts = ", ".join(f"{b.name} {b.bytes}" for b in buffers)
        raise PlanError(
            f"{smem} bytes of shared memory wanted, {gpu.smem_per_block_bytes} on {gpu.name} "
            f"({parts})"
        )
    fragments, vectors = register_tiles(kernel, warps)
    return KernelPlan(
        entry=kernel.name,
        problem=problem,
        sm=gpu.sm,
        warps=warps,
        blocks_per_sm=program.param("blocks_per_sm", 1),
        rows=rows,
        buffers=buffers,
        fragments=fragments,
        row_vectors=vectors,
        a_fragments=a_fragments,
        softmaxes=softmaxes,
        loops=loop_plans,
        kernel=kernel,
        program=program,
        scalars=used_scalars(program, kernel),
        smem_bytes=smem,
        grid=_grid(program, kernel, rows),
        args=_args(program, kernel),
        head_group=program.param("head_group", 1),
        longest_first=bool(program.param("causal_longest_first", 0)),
        p_in_registers=p_in_registers,
        p_offset=p_offset,
        epilogue_smem=epilogue,
        q_overlaps=q_overlaps,
        lines=program.lines,
    )


def swizzle_for(columns: int, swizzle: int) -> int:
    """Return `swizzle` where a row of `columns` elements admits it, else 0 (padded)."""
    return swizzle if swizzle and columns * 2 % swizzle == 0 else 0


def _a_fragments(program: ast.Program, kernel: ast.Kernel, looped: set[str]) -> tuple[str, ...]:
    """Tiles read as an A operand from registers: copied there by the program, or by choice."""
    to_registers = copies(ast.walk(kernel.body), ast.Memory.SHARED, ast.Memory.REGISTER)
    explicit = [s.name for s in to_registers]
    if explicit or not program.param("q_in_registers", 0):
        return tuple(dict.fromkeys(explicit))
    chosen = []
    for stmt in ast.walk(kernel.body):
        if isinstance(stmt, ast.Gemm) and stmt.a.name not in looped and not stmt.a.transposed:
            tile = kernel.tile(stmt.a.name, ast.Memory.SHARED)
            if tile is not None and not stmt.a.slices:
                chosen.append(stmt.a.name)
    return tuple(dict.fromkeys(chosen))


def softmax_plans(program: ast.Program, body: tuple[ast.Stmt, ...]) -> tuple[SoftmaxPlan, ...]:
    found = []
    for loop in (s for s in ast.walk(body) if isinstance(s, ast.For)):
        for at, stmt in enumerate(loop.body):
            if not (isinstance(stmt, ast.Custom) and stmt.op == "Softmax"):
                continue
            scores = stmt.name
            accumulators = tuple(
                dict.fromkeys(
                    g.out for g in loop.body
                    if isinstance(g, ast.Gemm) and g.a.name == scores and g.accumulate
                )
            )  # fmt: skip
            folded = _scale_before(loop.body[:at], scores) is not None
            threshold = program.param("rescale_threshold", 0)
            integer_max = bool(threshold and program.param("integer_max", 0))
            share = program.param("exp2_fma", 0)
            found.append(SoftmaxPlan(scores, folded, accumulators, threshold, integer_max, share))
    return tuple(found)


def _scale_before(before: tuple[ast.Stmt, ...], scores: str) -> ast.Custom | None:
    """The Scale of `scores` that only position masks separate from the end of `before`."""
    for stmt in reversed(before):
        if isinstance(stmt, ast.Custom) and stmt.name == scores:
            if stmt.op == "Scale":
                return stmt
            if stmt.op != "Mask" or mask_kind(stmt) not in POSITIONAL_MASKS:
                return None
        elif isinstance(stmt, ast.Gemm | ast.Arith) and scores in (
            stmt.out,
            getattr(stmt, "a", ""),
        ):
            return None
    return None


def loop_plan(program: ast.Program, kernel: ast.Kernel, loop: ast.For, stages: int) -> LoopPlan:
    uses = []
    for stmt in loads(loop.body):
        at = loop.body.index(stmt)
        readers = [
            k for k, s in enumerate(loop.body)
            if (isinstance(s, ast.Gemm) and stmt.name in (s.a.name, s.b.name))
            or (isinstance(s, ast.For) and reads(s.body, stmt.name))
        ]  # fmt: skip
        if not readers:
            raise PlanError(f"{stmt.name} is copied in loop {loop.var} and never read there")
        uses.append(TileUse(stmt.name, at, max(readers), stages))
    key_tiles = is_key_loop(loop)
    columns = number(loads(loop.body)[0].shape[0]) if key_tiles else 0
    masks = tuple(masks_of(loop)) if key_tiles else ()
    peel = bool(program.param("peel", 0)) and not any(m.window for m in masks)
    return LoopPlan(
        loop.var, key_tiles, columns, loop.hi, loop.lo, loop.body,
        schedule(tuple(uses)) if uses else None, masks, peel,
    )  # fmt: skip


Layouts = list[tuple[str, SharedLayout, int]]


def _layouts(
    kernel: ast.Kernel, swizzle: int, stages: int, looped: set[str]
) -> tuple[Layouts, Layouts]:
    """(name, layout, stages) of the tiles that live for the whole block, and of the loop's."""
    row_tiles: Layouts = []
    loop_tiles: Layouts = []
    for name in dict.fromkeys(c.name for c in loads(ast.walk(kernel.body))):
        tile = kernel.tile(name, ast.Memory.SHARED)
        if tile is None:
            raise PlanError(f"{name} is copied to shared memory and has no tile there")
        if tile.columns % 8:
            raise PlanError(f"{name} has {tile.columns} columns, not a multiple of 8")
        layout = SharedLayout(tile.rows, tile.columns, swizzle_for(tile.columns, swizzle))
        if name in looped:
            loop_tiles.append((name, layout, stages))
        else:
            row_tiles.append((name, layout, 1))
    return row_tiles, loop_tiles


def _place(
    row_tiles: Layouts, loop_tiles: Layouts, overlap: bool
) -> tuple[tuple[Buffer, ...], int]:
    """Give every buffer its offset; return them and the first free byte."""
    buffers = []
    offset = 0
    for name, layout, stages in row_tiles:
        buffers.append(Buffer(name, layout, stages, offset))
        offset += layout.bytes * stages
    end = offset
    if overlap:
        offset = 0
    for name, layout, stages in loop_tiles:
        buffers.append(Buffer(name, layout, stages, offset))
        offset += layout.bytes * stages
    return tuple(buffers), max(end, offset)


def _out_columns(kernel: ast.Kernel) -> list[int]:
    """Columns of the 16-bit tiles that are copied from registers to global memory."""
    found = []
    for stmt in stores(ast.walk(kernel.body)):
        tensor = kernel.tensor(stmt.target or stmt.name)
        columns = number_columns(kernel, stmt.name)
        if tensor is not None and tensor.elem is ast.Elem.OPERAND and columns > 1:
            found.append(columns)
    return found


def register_tiles(
    kernel: ast.Kernel, warps: int
) -> tuple[tuple[tuple[str, Fragment], ...], tuple[str, ...]]:
    tiles = [t for t in kernel.tiles if t.memory is ast.Memory.REGISTER and t.elem is ast.Elem.F32]
    fragments = tuple((t.name, Fragment(t.rows, t.columns, warps)) for t in tiles if t.columns > 1)
    return fragments, tuple(t.name for t in tiles if t.columns == 1)


def _grid(program: ast.Program, kernel: ast.Kernel, rows: int) -> tuple[GridAxis, ...]:
    axes = [GridAxis("M", rows)]
    if uses_name(kernel, "block_n"):
        axes.append(GridAxis("N", program.param("BN")))
    if any(isinstance(s, ast.For) and s.hi == ast.Name("split_end") for s in ast.walk(kernel.body)):
        axes.append(GridAxis(str(program.param("num_splits", 1)), 1))
    return (*axes, GridAxis("heads", 1), GridAxis("batch", 1))


def _args(program: ast.Program, kernel: ast.Kernel) -> tuple[Arg, ...]:
    args = [Arg(ArgKind.POINTER, t.name) for t in kernel.tensors]
    for t in kernel.tensors:
        if not t.workspace:
            args += [Arg(ArgKind.STRIDE, f"{t.name}.{axis}") for axis in ("b", "s", "h")]
    args += [Arg(ArgKind.INT, n) for n in ("M", "N", "heads", "group")]
    symbols = sorted({t.columns for t in kernel.tensors if isinstance(t.columns, str)} - {"N"})
    args += [Arg(ArgKind.INT, n) for n in symbols]
    whole = window_scalars(kernel)
    args += [
        Arg(ArgKind.INT if s in whole else ArgKind.FLOAT, s) for s in used_scalars(program, kernel)
    ]
    return tuple(args)
