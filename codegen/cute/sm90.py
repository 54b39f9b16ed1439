"""sm_90a: TMA loads by a producer warpgroup, mbarrier rings, wgmma consumers, TMA stores.

Barriers cannot deadlock by construction: producer and consumers walk the same tiles in the same
order, a ring's slot and phase are functions of one running count, and every consumer arrives on
`empty` exactly once for each time it waited on `full`, for skipped tiles too: on that of each block
of its cluster, where blocks load tiles together.
"""

from __future__ import annotations

from codegen.cute import cluster
from codegen.cute.masks import tile_of
from codegen.cute.packing import declare_planes
from codegen.cute.sm90_consumer import Consumer
from codegen.cute.sm90_plan import Ring, Sm90Plan
from codegen.cute.sm90_writer import Sm90Writer
from codegen.cute.statements import comment
from codegen.cute.target import COMMON_PRELUDE, LDMATRIX_PRELUDE, PACK, UNPACK
from codegen.cute.wgmma import EXP2_FMA, define_descriptor, define_product
from codegen.cute.wgmma import PRELUDE as WGMMA_PRELUDE
from codegen.cute.writer import Writer
from codegen.kernel import ArgKind
from codegen.tl import ast

STEP = 16
#: choices that change nothing of the text; programs made before there was one have it too
UNSTATED = (("cluster", 1), ("swizzle", 128), ("pack_heads", 1))

BARRIERS_PRELUDE = """
struct alignas(64) TensorMap { char bytes[128]; };

__device__ __forceinline__ uint64_t* barrier_at(int number) {
  return reinterpret_cast<uint64_t*>(smem + kBarriers) + number;
}
"""

TILE_SLOTS_PRELUDE = """
__device__ __forceinline__ int volatile* tile_slots() {
  return reinterpret_cast<int volatile*>(smem + kTileSlots);
}
"""

WAITS_PRELUDE = """
// waits until the barrier's phase of this parity has ended
__device__ __forceinline__ void wait(int number, uint32_t parity) {
  asm volatile(
      "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again;}"
      ::"r"(cast_smem_ptr_to_uint(barrier_at(number))), "r"(parity) : "memory");
}
__device__ __forceinline__ void arrive(int number) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               ::"r"(cast_smem_ptr_to_uint(barrier_at(number))) : "memory");
}
// the bytes that TMA will bring before the phase ends
__device__ __forceinline__ void expect(int number, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(cast_smem_ptr_to_uint(barrier_at(number))), "r"(bytes) : "memory");
}
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
template <int N> __device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
constexpr uint64_t kEvictNormal = 0x1000000000000000, kEvictFirst = 0x12f0000000000000,
                   kEvictLast = 0x14f0000000000000;
"""


def emit_sm90(plan: Sm90Plan) -> str:
    """Return the source of a Hopper kernel. Same plan, same bytes."""
    return _Emitter(plan).text()


class _Emitter(Sm90Writer):
    """Writes the frame of the kernel and its producer."""

    def __init__(self, plan: Sm90Plan) -> None:
        self.consumer = Consumer(plan, Writer())
        super().__init__(plan, self.consumer.out, self.consumer.statements)

    # ---- frame ---------------------------------------------------------------------------------

    def text(self) -> str:
        plan, out = self.plan, self.out
        base = plan.base
        out.line(f"// {base.problem.key} for sm_90a")
        stated = [p for p in base.program.params if p not in UNSTATED]
        out.line("// " + " ".join(f"{k}={v}" for k, v in stated))
        for header in ("copy_sm75", "copy_sm90", "copy_sm90_desc", "copy_sm90_tma"):
            out.line(f"#include <cute/arch/{header}.hpp>")
        out.lines(COMMON_PRELUDE)
        out.line(f"constexpr int kBarriers = {plan.barrier_offset};")
        out.line(f"constexpr int kTileSlots = {plan.tile_slot_offset};")
        out.lines(PACK["async", base.problem.dtype])
        out.lines(UNPACK[base.problem.dtype])
        for part in (BARRIERS_PRELUDE, TILE_SLOTS_PRELUDE, WAITS_PRELUDE):
            out.lines(part)
        if plan.cluster > 1:
            out.lines(cluster.PRELUDE)
        out.lines(WGMMA_PRELUDE)
        define_descriptor(out, self.row_ring.panel)
        if any(s.fma_share for s in base.softmaxes):
            out.lines(EXP2_FMA)
        if plan.q_in_registers:
            out.lines(LDMATRIX_PRELUDE)
        dtype = base.problem.dtype
        define_product(out, dtype, self.k.rows, plan.q_in_registers, b_rows=False)
        define_product(out, dtype, self.out_columns(), True, b_rows=True)
        out.line()
        self._kernel()
        return out.text()

    def _kernel(self) -> None:
        plan, out = self.plan, self.out
        dims = f" __cluster_dims__({plan.cluster}, 1, 1)" if plan.cluster > 1 else ""
        out.line(f'extern "C" __global__ void{dims} __launch_bounds__({plan.threads}, 1)')
        out.line(f"{plan.base.entry}(")
        parts = []
        for arg in plan.base.args:
            if arg.kind is ArgKind.TENSOR_MAP:
                parts.append(f"__grid_constant__ TensorMap const map{arg.name}")
            elif arg.kind is ArgKind.POINTER:
                parts.append(f"uint16_t* __restrict__ g{arg.name}")
            elif arg.kind is ArgKind.STRIDE:
                parts.append(f"int64_t {arg.name.replace('.', '_stride_')}")
            elif arg.kind is ArgKind.TICKETS:
                parts.append(f"int* {arg.name}")
            else:
                parts.append(f"{'float' if arg.kind is ArgKind.FLOAT else 'int'} {arg.name}")
        out.parameters(parts)
        with out.block(")"):
            out.line("int const warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);")
            out.line("uint32_t const smem_at = cast_smem_ptr_to_uint(smem);")
            with out.block("if (threadIdx.x == 0)"):
                for ring in plan.rings:
                    for stage in range(ring.stages):
                        out.line(f"initialize_barrier(*barrier_at({ring.barrier + stage}), 1);")
                        out.line(
                            f"initialize_barrier(*barrier_at({ring.empty + stage}), "
                            f"{plan.consumers * ring.loaders});"
                        )
                if plan.scheduler == 2:
                    first, readers = plan.tile_barrier, 4 * plan.consumers
                    for slot in (0, 1):
                        out.line(f"initialize_barrier(*barrier_at({first + slot}), 1);")
                        out.line(f"initialize_barrier(*barrier_at({first + 2 + slot}), {readers});")
                out.line('asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");')
            if plan.cluster > 1:
                out.line("begin_cluster();")
                out.line(f"int const cluster_rank = blockIdx.x % {plan.cluster};")
            else:
                out.line("__syncthreads();")
            out.line(f"int const row_blocks = ceil_div(M, {plan.cluster * plan.base.queries});")
            declare_planes(plan.base, out)
            self.statements.declare_diagonal()
            with out.block("if (warpgroup == 0)"):
                self._producer()
            with out.block("else"):
                self.consumer.write()
            if plan.cluster > 1:
                out.line("end_cluster();")

    # ---- producer ------------------------------------------------------------------------------

    def _producer(self) -> None:
        out, plan = self.out, self.plan
        out.line(f"registers_down<{plan.producer_registers}>();")
        with out.block("if (threadIdx.x == 0)"):
            for ring in plan.rings:
                out.line(f"uint32_t {ring.name}_count = 0;")
            if plan.scheduler == 2:
                out.line("uint32_t drawn = 0;")
            self.tiles(self._producer_tile, self.draw_tile)

    def _producer_tile(self) -> None:
        out, plan, var = self.out, self.plan, self.var
        if plan.base.pack_heads == 1:
            out.line("int const kv_head = head / group;")
        for stmt in plan.base.kernel.body:
            if isinstance(stmt, ast.Copy) and stmt.dst is ast.Memory.SHARED:
                comment(out, stmt)
                self._load(plan.ring(stmt.name), self.row_coordinates("row0"))
        copies = [s for s in plan.loop.body if isinstance(s, ast.Copy)]
        tile = tile_of(plan.loop.masks, var, var)
        before = tile_of(plan.loop.masks, var, f"({var} - 1)")
        if not plan.overlap:
            out.line("#pragma unroll 1")
            with out.block(f"for (int {var} = {var}_lo; {var} < {var}_hi; ++{var})"):
                for stmt in copies:
                    comment(out, stmt)
                    ring = plan.ring(stmt.name)
                    self._load(ring, (f"{tile} * {ring.rows}", "kv_head", "batch"))
            return
        k_copy, v_copy = (next(s for s in copies if s.name == r.name) for r in (self.k, self.v))
        out.line("// in the order of use: the next tile's scores come before this tile's product")
        out.line("#pragma unroll 1")
        with out.block(f"for (int {var} = {var}_lo; {var} <= {var}_hi; ++{var})"):
            with out.block(f"if ({var} < {var}_hi)"):
                comment(out, k_copy)
                self._load(self.k, (f"{tile} * {self.k.rows}", "kv_head", "batch"))
            with out.block(f"if ({var} > {var}_lo)"):
                comment(out, v_copy)
                self._load(self.v, (f"{before} * {self.v.rows}", "kv_head", "batch"))

    def _load(self, ring: Ring, place: tuple[str, ...]) -> None:
        """Wait for a free slot and start TMA into it, panel by panel, from a place in the map."""
        out, name = self.out, ring.name
        with out.block(""):
            out.line(f"uint32_t const slot = {name}_count % {ring.stages};")
            out.line(f"wait({ring.empty} + slot, ({name}_count / {ring.stages} & 1) ^ 1);")
            out.line(f"expect({ring.barrier} + slot, {ring.stage_bytes});")
            atom, to, part = f"SM90_TMA_LOAD_{len(place) + 1}D", "", ""
            if ring.loaders > 1:
                atom, to = "SM90_TMA_LOAD_MULTICAST_4D", f" {cluster.everyone(ring.loaders)},"
                part = f" + cluster_rank * {ring.box_rows * ring.panel.row_bytes}"
                place = (f"{place[0]} + cluster_rank * {ring.box_rows}", *place[1:])
            with out.unrolled("panel", ring.panels):
                hint = "kEvictFirst" if ring.per_tile else "kEvictLast"
                out.line(f"{atom}::copy(&map{name}, barrier_at({ring.barrier} + slot),{to} {hint},")
                out.line(
                    f"    smem + {ring.offset} + slot * {ring.stage_bytes} + "
                    f"panel * {ring.panel_bytes}{part},"
                )
                out.line(f"    panel * {ring.panel.columns}, {', '.join(place)});")
            out.line(f"++{name}_count;")
