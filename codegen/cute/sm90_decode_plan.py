"""Plan of a Hopper decode kernel: packed rows, one split of the keys, parts of tiles with barriers.

One warp loads key tiles with TMA. The first consumer warpgroup, the owner, computes scores, softmax
and its columns of the output. For absorbed MLA, whose V is the first columns of K's tile, a second
one, the follower, takes P from the owner through shared memory and has the other columns.

A tile is loaded in parts, each with its own barriers, in the order in which their room is let go:
K and V; or, of a latent tile, the columns that only the scores read, the follower's and the
owner's. Each part is let go by one warpgroup, the last to read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.cute.bias import uses_distance
from codegen.cute.decode_protocol import Rings, check_decode_protocol
from codegen.cute.layout import Fragment
from codegen.cute.masks import has_sinks
from codegen.cute.plan import KernelPlan, LoopPlan, loop_plan, register_tiles, softmax_plans
from codegen.cute.structure import (
    bias_names,
    block_rows,
    loads,
    number_columns,
    used_scalars,
    window_scalars,
)
from codegen.errors import PlanError
from codegen.kernel import Arg, ArgKind, GridAxis
from codegen.tl import ast
from space.decode import (
    BARRIER_BYTES,
    PANEL_COLUMNS,
    ROW_BYTES,
    decode_smem_bytes,
    decode_threads,
    exchange_bytes,
    panels,
)
from space.gpu import GpuSpec
from space.hopper import REGISTERS_BY_ROLE, WARPGROUP_ROWS
from space.params import Point
from space.variant import Problem

NOT_HERE = "has no lowering in a Hopper decode kernel; leave it to prefill"


@dataclass(frozen=True, slots=True)
class Part:
    """Panels of a ring's tile that are loaded, waited for and let go together."""

    name: str
    tensor: str
    offset: int  #: of its ring in shared memory
    stage_bytes: int  #: from one stage of the ring to the next
    first_panel: int
    panels: int
    panel_bytes: int
    barrier: int  #: number of its first `full` barrier; `empty` ones follow
    stages: int
    releaser: int  #: the consumer warpgroup that reads it last

    @property
    def empty(self) -> int:
        """Number of its first `empty` barrier."""
        return self.barrier + self.stages

    @property
    def bytes(self) -> int:
        """What TMA brings for one tile, zeros included."""
        return self.panels * self.panel_bytes


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Everything emission prints for one Hopper decode kernel."""

    base: KernelPlan
    loop: LoopPlan
    front: tuple[ast.Stmt, ...]
    scores: ast.Gemm
    product: ast.Gemm
    after: tuple[ast.Stmt, ...]
    output: str  #: the problem's output, written here when the keys are not split
    parts: tuple[Part, ...]  #: in the order of loading
    keys: int
    head_dim: int
    columns: int  #: of the block's output, all warpgroups together
    consumers: int
    stages: int
    blocks_per_sm: int
    overlap: bool
    combine_early: bool  #: the kernel behind may be scheduled before this one's results are stored
    evict_first: bool  #: keys and values leave the L2 first
    page: int
    exchange_offset: int
    barrier_offset: int
    smem_bytes: int
    q_panels: int  #: the last panels of Q, which stay in registers
    split_cluster: int  #: blocks of a cluster, which combine their splits before they store
    column_blocks: int  #: blocks of the same rows and keys that share the output's columns

    @property
    def first_held(self) -> int:
        """The first panel of Q that stays in registers."""
        return panels(self.head_dim) - self.q_panels

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return decode_threads(self.consumers)

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer thread, where the loading warpgroup gives its own away."""
        return REGISTERS_BY_ROLE[self.consumers][0]

    @property
    def producer_registers(self) -> int:
        """Registers that a loading thread keeps."""
        return REGISTERS_BY_ROLE[self.consumers][1]

    @property
    def output_columns(self) -> int:
        """Columns of the output, all blocks together."""
        return self.columns * self.column_blocks

    @property
    def own_columns(self) -> int:
        """Output columns of one warpgroup."""
        return self.columns // self.consumers

    def panel_from(self, panel: str) -> str:
        """C++ for the panel of Q and K that stands at a place of their tiles in shared memory.

        A block's own columns of V come first: those of the blocks change places.
        """
        if self.column_blocks == 1:
            return panel
        shared = self.output_columns // PANEL_COLUMNS
        own = self.columns // PANEL_COLUMNS
        return f"({panel} < {shared} ? ({panel} + column_block * {own}) % {shared} : {panel})"

    @property
    def key_parts(self) -> tuple[Part, ...]:
        """The parts that the scores read, in the order in which they come."""
        return tuple(p for p in self.parts if p.tensor == self.scores.b.name)

    def value_part(self, consumer: int) -> Part:
        """The part that holds a warpgroup's columns of V."""
        mine = [p for p in self.parts if p.tensor == self.product.b.name]
        return next(p for p in mine if p.releaser == consumer and p.name != "rest")


def plan_decode(program: ast.Program, problem: Problem, gpu: GpuSpec, output: str) -> DecodePlan:
    """Plan the first kernel of a decode program. Raises PlanError naming the limit it breaks."""
    kernel = program.kernels[0]
    loops = [s for s in kernel.body if isinstance(s, ast.For)]
    if len(loops) != 1 or loops[0].hi != ast.Name("split_end"):
        raise PlanError("a decode kernel has one loop, from split_start to split_end")
    rows, consumers = block_rows(kernel), program.param("consumer_warpgroups")
    if rows != WARPGROUP_ROWS:
        raise PlanError(f"a Hopper decode kernel has {WARPGROUP_ROWS} packed rows, not {rows}")
    stages = program.param("stages")
    if bias_names(kernel.body) or uses_distance(kernel):
        raise PlanError(f"a bias or alibi {NOT_HERE}")
    loop = loop_plan(program, kernel, loops[0], stages=1)
    if has_sinks(loop.masks):
        raise PlanError(f"a window with sinks {NOT_HERE}")
    front, scores, product = _split(loop.body)
    wide = number_columns(kernel, product.out)
    column_blocks = program.param("column_blocks", 1)
    wide = wide // column_blocks
    parts, end = _parts(kernel, problem, scores, product, consumers, stages, column_blocks)
    exchange = exchange_bytes(loop.columns) if consumers > 1 else 0
    barrier_offset = end + exchange
    smem = barrier_offset + 2 * len(parts) * stages * BARRIER_BYTES
    wanted = decode_smem_bytes(problem, Point(program.params))
    if smem != wanted:
        raise PlanError(f"planned {smem} bytes of shared memory, predicted {wanted}")
    if smem > gpu.smem_per_block_bytes:
        raise PlanError(
            f"{smem} bytes of shared memory wanted, {gpu.smem_per_block_bytes} on {gpu.name}"
        )
    overlap = bool(program.param("overlap", 1))
    check_decode_protocol(_rings(parts, scores.b.name, product.b.name, stages, overlap))
    fragments, vectors = register_tiles(kernel, WARPGROUP_ROWS // 16)
    own = tuple(
        (n, Fragment(f.rows, wide // consumers, f.warps) if n == product.out else f)
        for n, f in fragments
    )
    base = KernelPlan(
        entry=kernel.name,
        problem=problem,
        sm=gpu.sm,
        warps=WARPGROUP_ROWS // 16,
        blocks_per_sm=program.param("blocks_per_sm", 1),
        rows=rows,
        buffers=(),
        fragments=own,
        row_vectors=vectors,
        a_fragments=(),
        softmaxes=softmax_plans(program, kernel.body),
        loops=(loop,),
        kernel=kernel,
        program=program,
        scalars=used_scalars(program, kernel),
        smem_bytes=smem,
        grid=(
            *((GridAxis(str(column_blocks), 1),) if column_blocks > 1 else ()),
            GridAxis("rows", rows), GridAxis("splits", 1), GridAxis("kv_heads", 1),
            GridAxis("batch", 1),
        ),
        args=_args(program, kernel, problem, parts, output),
        head_group=0,
        longest_first=False,
        p_in_registers=True,
        p_offset=0,
        epilogue_smem=False,
        q_overlaps=False,
    )  # fmt: skip
    at = kernel.body.index(loops[0])
    return DecodePlan(
        base=base,
        loop=loop,
        front=front,
        scores=scores,
        product=product,
        after=kernel.body[at + 1 :],
        output=output,
        parts=parts,
        keys=loop.columns,
        head_dim=problem.head_dim,
        columns=wide,
        consumers=consumers,
        stages=stages,
        blocks_per_sm=base.blocks_per_sm,
        overlap=overlap,
        combine_early=bool(program.param("combine_early", 0)),
        evict_first=bool(program.param("evict_first", 0)),
        page=problem.page,
        exchange_offset=end,
        barrier_offset=barrier_offset,
        smem_bytes=smem,
        q_panels=program.param("q_panels", 0),
        split_cluster=_split_cluster(program, kernel.body[at + 1 :], vectors),
        column_blocks=column_blocks,
    )


def _split_cluster(
    program: ast.Program, after: tuple[ast.Stmt, ...], vectors: tuple[str, ...]
) -> int:
    """Blocks that combine their splits. Raises PlanError when these have no sum to weigh by."""
    blocks = program.param("split_cluster", 1)
    if blocks == 1:
        return 1
    if program.param("column_blocks", 1) > 1:
        raise PlanError("a cluster combines splits of all columns: column_blocks = 1")
    made = {s.out or s.name: s.op for s in after if isinstance(s, ast.Custom)}
    stored = [s.name for s in after if isinstance(s, ast.Copy)]
    sums = [n for n in stored if n in vectors and made.get(n) == "LogSumExp"]
    if sorted(made.values()) != ["LogSumExp", "Normalize"] or len(stored) != 2 or len(sums) != 1:
        raise PlanError(
            f"split_cluster={blocks} combines normalised outputs by the log-sum-exp of their "
            f"scores, and a split of this program stores {', '.join(stored)}; use 1"
        )
    return blocks


def _split(body: tuple[ast.Stmt, ...]) -> tuple[tuple[ast.Stmt, ...], ast.Gemm, ast.Gemm]:
    """What stands between the products that give and take the scores, and both products."""
    own = [s for s in body if s not in loads(body)]
    shape = [type(s) for s in own if isinstance(s, ast.Gemm | ast.Reshape)]
    if shape != [ast.Gemm, ast.Reshape, ast.Gemm] or not isinstance(own[0], ast.Gemm):
        raise PlanError("a decode kernel has one product, a Reshape and one product in its loop")
    reshape = next(k for k, s in enumerate(own) if isinstance(s, ast.Reshape))
    product = own[reshape + 1]
    assert isinstance(product, ast.Gemm)
    if not own[0].b.transposed or reshape + 2 != len(own):
        raise PlanError(
            "a decode kernel multiplies rows with keys, and the scores with values last"
        )
    return tuple(own[1:reshape]), own[0], product


def _parts(
    kernel: ast.Kernel,
    problem: Problem,
    scores: ast.Gemm,
    product: ast.Gemm,
    consumers: int,
    stages: int,
    column_blocks: int,
) -> tuple[tuple[Part, ...], int]:
    """Return the parts in the order of loading, and the first byte behind the rings.

    The panels whose columns are a block's own come first in a latent tile.
    """
    key_tile = kernel.tile(scores.b.name, ast.Memory.SHARED)
    assert key_tile is not None
    panel_bytes = key_tile.rows * ROW_BYTES
    offset = WARPGROUP_ROWS * panels(problem.head_dim) * ROW_BYTES
    keys = scores.b.name

    def part(name: str, tensor: str, at: int, whole: int, first: int, count: int, n: int) -> Part:
        releaser = 1 if name == "right" else 0
        return Part(
            name, tensor, at, whole * panel_bytes, first, count, panel_bytes, 2 * n * stages,
            stages, releaser,
        )  # fmt: skip

    wide = panels(problem.head_dim)
    if product.b.name == keys:
        values, torn = divmod(problem.head_dim_v, PANEL_COLUMNS * column_blocks)
        if consumers != 2 or torn or values % 2 or values >= wide:
            raise PlanError("a latent tile is shared by two warpgroups, in whole panels each")
        half = values // 2
        found = (
            part("rest", keys, offset, wide, values, wide - values, 0),
            part("right", keys, offset, wide, half, half, 1),
            part("left", keys, offset, wide, 0, half, 2),
        )
        return found, offset + stages * wide * panel_bytes
    if consumers != 1:
        raise PlanError("one warpgroup computes a decode kernel whose V is not part of K")
    if column_blocks != 1:
        raise PlanError("blocks share the columns of a latent tile alone: column_blocks = 1")
    own = panels(problem.head_dim_v)
    second = offset + stages * wide * panel_bytes
    found_own = (
        part("keys", keys, offset, wide, 0, wide, 0),
        part("values", product.b.name, second, own, 0, own, 1),
    )
    return found_own, second + stages * own * panel_bytes


def _rings(parts: tuple[Part, ...], keys: str, values: str, stages: int, overlap: bool) -> Rings:
    """What the barriers' protocol depends on."""
    read = tuple(p.name for p in parts if p.tensor == keys)
    own = [p for p in parts if p.tensor == values and p.name != "rest"]
    by_consumer = tuple(p.name for p in sorted(own, key=lambda p: p.releaser))
    only = next(n for n in read if n not in by_consumer)
    return Rings(tuple(p.name for p in parts), read, only, by_consumer, stages, overlap)


def _args(
    program: ast.Program,
    kernel: ast.Kernel,
    problem: Problem,
    parts: tuple[Part, ...],
    output: str,
) -> tuple[Arg, ...]:
    looped = dict.fromkeys(p.tensor for p in parts)
    args = []
    for t in kernel.tensors:
        if t.name in looped:
            box = program.param("BN")
            rows = min(box, problem.page) if problem.page else box
            args.append(Arg(ArgKind.TENSOR_MAP, t.name, (PANEL_COLUMNS, rows)))
        else:
            args.append(Arg(ArgKind.POINTER, t.name))
    args.append(Arg(ArgKind.POINTER, output))
    queries = next(t.name for t in kernel.tensors if t.rows is ast.Rows.QUERY and not t.workspace)
    for name in (queries, output):
        args += [Arg(ArgKind.STRIDE, f"{name}.{axis}") for axis in ("b", "s", "h")]
    args.append(Arg(ArgKind.KEY_COUNTS, "key_counts"))
    if problem.page:
        args += [Arg(ArgKind.PAGES, "pages"), Arg(ArgKind.PAGE_STRIDE, "pages")]
    args += [
        Arg(ArgKind.INT, n) for n in ("M", "N", "rows", "group", "kv_heads", "batch", "splits")
    ]
    whole = window_scalars(kernel)
    args += [
        Arg(ArgKind.INT if s in whole else ArgKind.FLOAT, s) for s in used_scalars(program, kernel)
    ]
    return tuple(args)
