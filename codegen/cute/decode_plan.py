"""Plan of a decode kernel with warp-level MMA: one split of a sequence's keys.

Rows of a block are the query heads of one KV head, of all its queries. Its warps form a grid:
`column_warps` of them share rows, and each has a share of a tile's keys in Q.K^T and of V's columns
in P.V. What they must agree on, row maxima and P, goes through shared memory; the barrier that ends
the exchange is the one that V's tile lands with, so that an iteration has two.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.cute.bias import uses_distance
from codegen.cute.layout import Fragment, SharedLayout
from codegen.cute.plan import (
    Buffer,
    KernelPlan,
    LoopPlan,
    loop_plan,
    softmax_plans,
    swizzle_for,
)
from codegen.cute.structure import bias_names, block_rows, loads, mask_kind, stores, used_scalars
from codegen.errors import PlanError
from codegen.kernel import Arg, ArgKind, GridAxis
from codegen.tl import ast
from space.decode_mma import mma_decode_smem_bytes, shares_rows_buffer, uneven_share
from space.gpu import GpuSpec
from space.params import Point
from space.tiles import MMA_N, WARP
from space.variant import Problem

#: statements that have a lowering where warps share rows: the others would need their own exchange
SHARED_OPERATORS = ("Softmax", "Normalize", "LogSumExp", "Scale", "Mask", "Fill", "Softcap")


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Everything emission prints for one `partial` kernel.

    `base` is the plan of a warp's share: its `warps` are those down the rows, its register tiles
    have the columns of one column warp.
    """

    base: KernelPlan
    column_warps: int
    loop: LoopPlan
    before: tuple[ast.Stmt, ...]
    after: tuple[ast.Stmt, ...]
    rows_tile: str  #: the tile of packed query heads, the A operand of the scores
    output: str  #: the tensor that a launch with one split writes in place of the workspaces
    exchange_offset: int  #: one float for each row and column warp

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.base.warps * self.column_warps * WARP

    @property
    def shared(self) -> bool:
        """Whether warps share rows."""
        return self.column_warps > 1


def plan_decode(program: ast.Program, problem: Problem, gpu: GpuSpec, output: str) -> DecodePlan:
    """Plan the kernel of one split, which writes `output` itself when there is only one.

    Raises PlanError naming the limit that is broken.
    """
    kernel = program.kernels[0]
    if bias_names(kernel.body) or uses_distance(kernel):
        raise PlanError("a bias or alibi has no lowering in a decode kernel; leave it to prefill")
    warps, columns = program.param("warps", 4), program.param("column_warps", 1)
    rows = block_rows(kernel)
    if warps % columns or rows % (16 * (warps // columns)):
        raise PlanError(
            f"{rows} rows over {warps} warps, {columns} to the same rows, are not a multiple of "
            f"16 rows a warp"
        )
    loop = _key_loop(kernel)
    at = kernel.body.index(loop)
    before, after = kernel.body[:at], kernel.body[at + 1 :]
    stages = program.param("stages", 1) if gpu.has_cp_async else 1
    looped = loop_plan(program, kernel, loop, stages)
    rows_tile = _rows_tile(kernel, before, loop)
    if any(m.window for m in looped.masks):
        raise PlanError("a window mask has no lowering in a decode kernel; leave it to prefill")
    if columns > 1:
        _check_shared(loop, after)
    point = Point(program.params)
    if columns > 1 and (torn := uneven_share(problem, point)) is not None:
        raise PlanError(torn)
    buffers, end = _buffers(kernel, problem, point, stages, rows_tile)
    scores = softmax_plans(program, kernel.body)
    if columns > 1 and not scores:
        raise PlanError("warps that share rows need a Softmax; use column_warps = 1")
    p_bytes = exchange = 0
    if columns > 1:
        p_bytes = SharedLayout(rows, looped.columns, 0).bytes
        exchange = 4 * rows * columns
    smem = end + p_bytes + exchange
    if smem != (predicted := mma_decode_smem_bytes(problem, point)):
        raise PlanError(f"the tiles take {smem} bytes of shared memory, not {predicted}")
    if smem > gpu.smem_per_block_bytes:
        parts = ", ".join(f"{b.name} {b.bytes}" for b in buffers)
        raise PlanError(
            f"{smem} bytes of shared memory wanted, {gpu.smem_per_block_bytes} on {gpu.name} "
            f"({parts})"
        )
    fragments, vectors = _register_tiles(kernel, warps // columns, columns)
    in_registers = bool(program.param("q_in_registers", 0))
    base = KernelPlan(
        entry=kernel.name,
        problem=problem,
        sm=gpu.sm,
        warps=warps // columns,
        blocks_per_sm=program.param("blocks_per_sm", 1),
        rows=rows,
        buffers=buffers,
        fragments=fragments,
        row_vectors=vectors,
        a_fragments=(rows_tile,) if in_registers else (),
        softmaxes=scores,
        loops=(looped,),
        kernel=kernel,
        program=program,
        scalars=used_scalars(program, kernel),
        smem_bytes=smem,
        grid=(
            GridAxis("rows", rows), GridAxis("kv_heads", 1), GridAxis("splits", 1),
            GridAxis("batch", 1),
        ),
        args=_args(program, kernel, problem, output),
        head_group=1,
        longest_first=False,
        p_in_registers=columns == 1,
        p_offset=end,
        epilogue_smem=False,
        q_overlaps=shares_rows_buffer(problem, point),
        lines=program.lines,
    )  # fmt: skip
    return DecodePlan(base, columns, looped, before, after, rows_tile, output, end + p_bytes)


def _key_loop(kernel: ast.Kernel) -> ast.For:
    """The one loop of the kernel, over the key tiles of a split."""
    loops = [s for s in ast.walk(kernel.body) if isinstance(s, ast.For)]
    if len(loops) != 1 or loops[0].hi != ast.Name("split_end") or loops[0] not in kernel.body:
        raise PlanError(
            f"kernel {kernel.name} of a decode program needs one loop, "
            f"over i = split_start:split_end"
        )
    return loops[0]


def _rows_tile(kernel: ast.Kernel, before: tuple[ast.Stmt, ...], loop: ast.For) -> str:
    """The tile that is loaded once: the only one, read as A operand in the loop."""
    names = list(dict.fromkeys(c.name for c in loads(before)))
    read = {s.a.name for s in loop.body if isinstance(s, ast.Gemm) and not s.a.transposed}
    if len(names) != 1 or names[0] not in read:
        raise PlanError(f"kernel {kernel.name} of a decode program loads one tile of queries")
    stored = [kernel.tensor(c.target or c.name) for c in stores(kernel.body)]
    if any(t is None or not t.workspace for t in stored):
        raise PlanError(
            f"kernel {kernel.name} of a decode program stores O_s and lse_s, one of each split; "
            f"a second kernel combines them"
        )
    return names[0]


def _check_shared(loop: ast.For, after: tuple[ast.Stmt, ...]) -> None:
    """Raise PlanError unless every statement keeps to a warp's share, but for the softmax."""
    for stmt in (*loop.body, *after):
        ours = isinstance(stmt, ast.Gemm | ast.Copy | ast.Reshape)
        if isinstance(stmt, ast.Custom):
            ours = stmt.op in SHARED_OPERATORS
            ours &= stmt.op != "Mask" or mask_kind(stmt) in ("causal", "padding")
        if not ours:
            what = getattr(stmt, "op", type(stmt).__name__)
            raise PlanError(
                f"{what} has no lowering where warps share rows; use column_warps = 1, or "
                f"Compute Softmax in its place"
            )
    ops = [s.op if isinstance(s, ast.Custom) else type(s).__name__ for s in loop.body]
    if "Softmax" not in ops or "Reshape" not in ops:
        raise PlanError("warps that share rows need a Softmax and a Reshape behind it")
    between = ops[ops.index("Softmax") + 1 : ops.index("Reshape")]
    if any(op != "Copy" for op in between):
        raise PlanError(f"{between[0]} between Softmax and Reshape needs column_warps = 1")


def _buffers(
    kernel: ast.Kernel, problem: Problem, point: Point, stages: int, rows_tile: str
) -> tuple[tuple[Buffer, ...], int]:
    """Q's tile and the stages of K (and V), and the first free byte."""
    swizzle = point.get("swizzle", 0)
    found, offset, end = [], 0, 0
    for name in dict.fromkeys(c.name for c in loads(ast.walk(kernel.body))):
        tile = kernel.tile(name, ast.Memory.SHARED)
        if tile is None or tile.columns % MMA_N:
            raise PlanError(f"{name} needs a tile in shared memory of a multiple of 8 columns")
        layout = SharedLayout(tile.rows, tile.columns, swizzle_for(tile.columns, swizzle))
        copies = 1 if name == rows_tile else stages
        found.append(Buffer(name, layout, copies, offset, by_rows=True))
        offset += layout.bytes * copies
        end = max(end, offset)
        if name == rows_tile and shares_rows_buffer(problem, point):
            offset = 0
    return tuple(found), end


def _register_tiles(
    kernel: ast.Kernel, row_warps: int, column_warps: int
) -> tuple[tuple[tuple[str, Fragment], ...], tuple[str, ...]]:
    """Register tiles with a warp's share of their columns, and row vectors."""
    tiles = [t for t in kernel.tiles if t.memory is ast.Memory.REGISTER and t.elem is ast.Elem.F32]
    fragments = []
    for t in tiles:
        if t.columns == 1:
            continue
        if t.columns % (MMA_N * column_warps):
            raise PlanError(
                f"{t.columns} columns of {t.name} over {column_warps} column warps are not a "
                f"multiple of 8 each"
            )
        fragments.append((t.name, Fragment(t.rows, t.columns // column_warps, row_warps)))
    return tuple(fragments), tuple(t.name for t in tiles if t.columns == 1)


def _args(
    program: ast.Program, kernel: ast.Kernel, problem: Problem, output: str
) -> tuple[Arg, ...]:
    inputs = [t.name for t in kernel.tensors if not t.workspace]
    args = [Arg(ArgKind.POINTER, t.name) for t in kernel.tensors]
    args.append(Arg(ArgKind.POINTER, output))
    args += [Arg(ArgKind.STRIDE, f"{n}.{axis}") for n in (*inputs, output) for axis in "bsh"]
    args += [
        Arg(ArgKind.INT, n) for n in ("M", "N", "group", "kv_heads", "rows", "splits", "batch")
    ]
    args.append(Arg(ArgKind.KEY_COUNTS, "key_counts"))
    if problem.page:
        args += [Arg(ArgKind.PAGES, "pages"), Arg(ArgKind.PAGE_STRIDE, "pages")]
    return (*args, *(Arg(ArgKind.FLOAT, s) for s in used_scalars(program, kernel)))
