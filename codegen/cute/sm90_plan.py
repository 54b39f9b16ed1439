"""Plan of a Hopper kernel: panels for TMA, rings of stages, barriers, registers by role.

One producer warpgroup loads tiles with TMA; each consumer warpgroup owns 64 rows of the block. The
loop over key tiles is split at the Reshape: what stands before it (the product that gives the
scores, masks, softmax) is the front, the rest (the product that consumes them) is the back. With
`overlap`, the front's product of tile i + 1 is issued before the back's of tile i.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.cute.packing import check_pack, grid_of
from codegen.cute.panel import CORE_ROWS, Panel
from codegen.cute.plan import KernelPlan, LoopPlan, loop_plan, register_tiles, softmax_plans
from codegen.cute.protocol import check_protocol
from codegen.cute.structure import bias_names, block_rows, loads, number, stores, used_scalars
from codegen.errors import PlanError
from codegen.kernel import Arg, ArgKind
from codegen.tl import ast
from space.gpu import GpuSpec
from space.hopper import (
    SWIZZLES,
    TILE_BARRIERS,
    TILE_SLOT_BYTES,
    WARPGROUP_ROWS,
    hopper_smem_bytes,
    registers_by_role,
)
from space.params import Point
from space.variant import Problem

BARRIER_BYTES = 8
CLUSTER_BLOCKS = 8  #: blocks of a cluster on every card that has them


@dataclass(frozen=True, slots=True)
class Ring:
    """`stages` tiles of (rows, columns) in shared memory, in panels of equal width."""

    name: str
    rows: int
    columns: int
    stages: int
    offset: int
    per_tile: bool  #: filled once for each block of rows, not for each key tile
    barrier: int  #: number of its first `full` barrier; `empty` ones follow
    panel: Panel
    loaders: int  #: blocks of the cluster that each load a part of every tile, for all of them

    @property
    def empty(self) -> int:
        """Number of its first `empty` barrier."""
        return self.barrier + self.stages

    @property
    def panels(self) -> int:
        """Panels of a tile; columns past the tensor's are zero."""
        return self.panel.count(self.columns)

    @property
    def panel_bytes(self) -> int:
        """Bytes of one panel."""
        return self.rows * self.panel.row_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage: what TMA brings for a tile, zeros included."""
        return self.panels * self.panel_bytes

    @property
    def box_rows(self) -> int:
        """Rows that one copy brings."""
        return self.rows // self.loaders


@dataclass(frozen=True, slots=True)
class Sm90Plan:
    """Everything emission prints for one Hopper kernel."""

    base: KernelPlan
    rings: tuple[Ring, ...]
    front: tuple[ast.Stmt, ...]
    back: tuple[ast.Stmt, ...]
    loop: LoopPlan
    before: tuple[ast.Stmt, ...]
    after: tuple[ast.Stmt, ...]
    consumers: int
    consumer_registers: int
    producer_registers: int
    overlap: bool
    pingpong: bool
    late_wait: bool  #: the last product is waited for after the exponentials, not after the vote
    scheduler: int  #: 0 one tile a block, 1 static persistent, 2 dynamic persistent
    skip: bool  #: a warpgroup passes over key tiles that none of its rows sees
    out_offset: int
    out_panel_bytes: int  #: from one 64-column panel of the output buffer to the next
    out_direct: bool  #: O goes from registers to global memory
    cluster: int  #: blocks on neighbouring rows that load each K and V tile together
    q_in_registers: bool  #: the row tile is read into A operands once
    out_in_rows: bool  #: O is staged in the row tile's buffer, read no more by then
    barrier_offset: int
    smem_bytes: int

    @property
    def tile_barrier(self) -> int:
        """Number of the tile scheduler's first barrier: two full, then two empty."""
        return sum(2 * r.stages for r in self.rings)

    @property
    def tile_slot_offset(self) -> int:
        """Byte offset of the two published tile numbers."""
        return self.barrier_offset + (self.tile_barrier + TILE_BARRIERS) * BARRIER_BYTES

    @property
    def own_queries(self) -> int:
        """Queries that a warpgroup's rows span."""
        return WARPGROUP_ROWS // self.base.pack_heads

    @property
    def threads(self) -> int:
        """Threads of a block: one producer warpgroup and the consumers."""
        return 128 * (self.consumers + 1)

    def ring(self, name: str) -> Ring:
        """Return the ring of `name`. Raises PlanError when it is not in shared memory."""
        for r in self.rings:
            if r.name == name:
                return r
        raise PlanError(f"{name} is not in shared memory")


def plan_sm90(program: ast.Program, kernel: ast.Kernel, problem: Problem, gpu: GpuSpec) -> Sm90Plan:
    """Plan a Hopper kernel. Raises PlanError when the program is not of the shape it lowers."""
    loops = [s for s in kernel.body if isinstance(s, ast.For)]
    if len(loops) != 1 or any(isinstance(s, ast.For) for s in loops[0].body):
        raise PlanError("the Hopper back end lowers one loop; use consumer_warpgroups = 0")
    if biases := bias_names(kernel.body):
        raise PlanError(
            f"the Hopper back end reads no bias tensor ({min(biases)}); use --backend mma_sync"
        )
    rows = block_rows(kernel)
    consumers = program.param("consumer_warpgroups")
    if rows != consumers * WARPGROUP_ROWS:
        raise PlanError(
            f"BM={rows} is not {WARPGROUP_ROWS} rows for each of {consumers} consumer warpgroups"
        )
    pack = program.param("pack_heads", 1)
    check_pack(kernel, pack)
    loop = loop_plan(program, kernel, loops[0], stages=1)
    if not loop.key_tiles:
        raise PlanError("the Hopper back end lowers loops over key tiles")
    front, back = _split(loop.body)
    at = kernel.body.index(loops[0])
    cluster = program.param("cluster", 1)
    rings, end = _rings(program, kernel)
    out_columns = _out_columns(kernel)
    row_ring = next(r for r in rings if r.per_tile)
    out_in_rows, direct = (program.param("out_buffer", 1) == k for k in (0, 2))
    if out_in_rows and out_columns > row_ring.columns:
        raise PlanError(f"{out_columns} output columns do not fit over {row_ring.columns} of a row")
    out_offset = row_ring.offset if out_in_rows else end
    panel = row_ring.panel
    panel_bytes = row_ring.panel_bytes if out_in_rows else rows * panel.row_bytes
    out_bytes = 0 if out_in_rows or direct else panel.count(out_columns) * panel_bytes
    barrier_offset = end + out_bytes
    smem = barrier_offset + (_barriers(rings) + TILE_BARRIERS) * BARRIER_BYTES + TILE_SLOT_BYTES
    wanted = hopper_smem_bytes(problem.head_dim, problem.head_dim_v, Point(program.params))
    if smem != wanted:
        raise PlanError(f"planned {smem} bytes of shared memory, predicted {wanted}")
    if smem > gpu.smem_per_block_bytes:
        raise PlanError(
            f"{smem} bytes of shared memory wanted, {gpu.smem_per_block_bytes} on {gpu.name}"
        )
    overlap, skip = bool(program.param("overlap", 1)), bool(program.param("skip", 0))
    check_protocol(
        row_ring.stages, program.param("stages", 2), consumers, overlap, skip, out_in_rows,
        bool(program.param("pingpong", 0)), cluster,
    )  # fmt: skip
    scheduler = program.param("persistent", 1)
    if cluster > 1 and scheduler == 2:
        raise PlanError("blocks of a cluster take their tiles together; use persistent = 0 or 1")
    consumer_registers, producer_registers = registers_by_role(consumers, scheduler, cluster)
    fragments, vectors = register_tiles(kernel, 4 * consumers)
    base = KernelPlan(
        entry=kernel.name,
        problem=problem,
        sm=gpu.sm,
        warps=4 * consumers,
        blocks_per_sm=1,
        rows=rows,
        buffers=(),
        fragments=fragments,
        row_vectors=vectors,
        a_fragments=(),
        softmaxes=softmax_plans(program, kernel.body),
        loops=(loop,),
        kernel=kernel,
        program=program,
        scalars=used_scalars(program, kernel),
        smem_bytes=smem,
        grid=grid_of(rows // pack * cluster, pack),
        args=_args(program, kernel, rings, direct),
        head_group=program.param("head_group", 0),
        longest_first=bool(program.param("causal_longest_first", 0)),
        p_in_registers=True,
        p_offset=0,
        epilogue_smem=True,
        q_overlaps=False,
        pack_heads=pack,
    )
    return Sm90Plan(
        base=base,
        rings=rings,
        front=front,
        back=back,
        loop=loop,
        before=tuple(s for s in kernel.body[:at] if not isinstance(s, ast.Copy)),
        after=kernel.body[at + 1 :],
        consumers=consumers,
        consumer_registers=consumer_registers,
        producer_registers=producer_registers,
        overlap=overlap,
        late_wait=bool(program.param("late_wait", 0)),
        pingpong=bool(program.param("pingpong", 0)) and consumers > 1,
        scheduler=scheduler,
        skip=skip and consumers > 1,
        out_offset=out_offset,
        out_panel_bytes=panel_bytes,
        out_in_rows=out_in_rows,
        out_direct=direct,
        cluster=cluster,
        q_in_registers=bool(program.param("q_in_registers", 0)),
        barrier_offset=barrier_offset,
        smem_bytes=smem,
    )


def _split(body: tuple[ast.Stmt, ...]) -> tuple[tuple[ast.Stmt, ...], tuple[ast.Stmt, ...]]:
    """Statements before the Reshape and from it on; copies are the producer's."""
    reshapes = [k for k, s in enumerate(body) if isinstance(s, ast.Reshape)]
    if len(reshapes) != 1:
        raise PlanError(f"the Hopper back end lowers one Reshape in the loop, not {len(reshapes)}")
    copied = loads(body)
    own = [s for s in body if s not in copied]
    at = next(k for k, s in enumerate(own) if isinstance(s, ast.Reshape))
    front, back = tuple(own[:at]), tuple(own[at:])
    if sum(isinstance(s, ast.Gemm) for s in front) != 1 or [type(s) for s in back] != [
        ast.Reshape,
        ast.Gemm,
    ]:
        raise PlanError("the Hopper back end lowers one GEMM before the Reshape and one after it")
    return front, back


def _rings(program: ast.Program, kernel: ast.Kernel) -> tuple[tuple[Ring, ...], int]:
    stages, row_stages = program.param("stages", 2), program.param("q_stages", 1)
    panel, cluster = Panel(program.param("swizzle", SWIZZLES[0])), program.param("cluster", 1)
    if panel.row_bytes not in SWIZZLES:
        offered = ", ".join(map(str, SWIZZLES))
        raise PlanError(f"swizzle={panel.row_bytes} is none that TMA and wgmma know: {offered}")
    rings: list[Ring] = []
    offset = barrier = 0
    looped = {c.name for loop in kernel.body if isinstance(loop, ast.For) for c in loads(loop.body)}
    for name in dict.fromkeys(c.name for c in loads(ast.walk(kernel.body))):
        tile = kernel.tile(name, ast.Memory.SHARED)
        if tile is None:
            raise PlanError(f"{name} is copied to shared memory and has no tile there")
        count = stages if name in looped else row_stages
        once = name not in looped
        loaders = 1 if once else cluster
        if not 1 <= cluster <= CLUSTER_BLOCKS or tile.rows % (CORE_ROWS * loaders):
            raise PlanError(
                f"cluster={cluster}: 1 to {CLUSTER_BLOCKS} blocks that each load a multiple of "
                f"{CORE_ROWS} of the {tile.rows} rows of {name}"
            )
        ring = Ring(
            name, tile.rows, tile.columns, count, offset, once, barrier, panel, loaders
        )  # fmt: skip
        rings.append(ring)
        offset += ring.stage_bytes * count
        barrier += 2 * count
    return tuple(rings), offset


def _barriers(rings: tuple[Ring, ...]) -> int:
    return sum(2 * r.stages for r in rings)


def _out_columns(kernel: ast.Kernel) -> int:
    written = stores(ast.walk(kernel.body))
    if len(written) != 1:
        raise PlanError(f"the Hopper back end writes one output, not {len(written)}")
    return number(written[0].shape[1])


def _args(
    program: ast.Program, kernel: ast.Kernel, rings: tuple[Ring, ...], direct: bool
) -> tuple[Arg, ...]:
    boxes = {r.name: r.box_rows for r in rings}
    columns = rings[0].panel.columns
    args = []
    for t in kernel.tensors:
        if t.elem is not ast.Elem.OPERAND:
            raise PlanError(f"{t.name} is not of the operand type")
        if t.output and direct:
            args.append(Arg(ArgKind.POINTER, t.name))
            args += [Arg(ArgKind.STRIDE, f"{t.name}.{axis}") for axis in ("b", "s", "h")]
            continue
        rows = boxes.get(t.name, WARPGROUP_ROWS)
        pack = program.param("pack_heads", 1) if t.rows is ast.Rows.QUERY else 1
        args.append(Arg(ArgKind.TENSOR_MAP, t.name, (columns, rows // pack), pack))
    args += [Arg(ArgKind.INT, n) for n in ("M", "N", "heads", "group", "batch")]
    if program.param("persistent", 1) == 2:
        args.append(Arg(ArgKind.TICKETS, "tickets"))
    args += [Arg(ArgKind.FLOAT, s) for s in used_scalars(program, kernel)]
    return tuple(args)
