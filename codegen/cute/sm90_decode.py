"""sm_90a decode kernels: text of the frame and of the warp that loads."""

from __future__ import annotations

from codegen.cute import sm90_decode_join as join
from codegen.cute.panel import Panel
from codegen.cute.sm90 import BARRIERS_PRELUDE, WAITS_PRELUDE
from codegen.cute.sm90_decode_consumer import DecodeConsumer
from codegen.cute.sm90_decode_plan import DecodePlan, Part
from codegen.cute.sm90_decode_rows import BARRIERS_MADE, ROWS_ISSUED
from codegen.cute.statements import comment
from codegen.cute.target import COMMON_PRELUDE, LDMATRIX_PRELUDE, PACK, UNPACK
from codegen.cute.wgmma import PRELUDE as WGMMA_PRELUDE
from codegen.cute.wgmma import define_descriptor, define_product
from codegen.cute.writer import Writer
from codegen.kernel import ArgKind
from codegen.tl import ast
from space.decode import PANEL_COLUMNS, ROW_BYTES
from space.hopper import WARPGROUP_ROWS

PRELUDE = """
// makes plain stores to shared memory visible to wgmma and to bulk copies
__device__ __forceinline__ void visible_to_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// 16 bytes from global to shared memory, or zeros; waited for by cp.async.wait_all
__device__ __forceinline__ void copy_chunk(uint32_t to, uint16_t const* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// a descriptor takes as long to come as the keys do
__device__ __forceinline__ void fetch_map(TensorMap const* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// bytes in one piece, from shared to global memory
__device__ __forceinline__ void store_bulk(void* to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
// an address that is worked out again where it is used: descriptors that outlive a loop are spilled
__device__ __forceinline__ uint32_t here(uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}
__device__ __forceinline__ void store_words(
    uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void load_words(
    uint32_t address, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address) : "memory");
}
"""


def emit_decode(plan: DecodePlan, out: Writer) -> None:
    """Write the includes, the device functions and the kernel. Same plan, same bytes."""
    _Emitter(plan, out).write()


class _Emitter:
    def __init__(self, plan: DecodePlan, out: Writer) -> None:
        self.plan, self.out, self.var = plan, out, plan.loop.var

    # ---- frame ---------------------------------------------------------------------------------

    def write(self) -> None:
        plan, out, dtype = self.plan, self.out, self.plan.base.problem.dtype
        for header in ("copy_sm75", "copy_sm90", "copy_sm90_desc", "copy_sm90_tma"):
            out.line(f"#include <cute/arch/{header}.hpp>")
        out.lines(COMMON_PRELUDE)
        out.line(f"constexpr int kBarriers = {plan.barrier_offset};")
        out.lines(PACK["async", dtype])
        out.lines(UNPACK[dtype])
        out.lines(BARRIERS_PRELUDE)
        out.lines(WAITS_PRELUDE)
        out.lines(WGMMA_PRELUDE)
        define_descriptor(out, Panel())
        out.lines(PRELUDE)
        if plan.split_cluster > 1:
            out.lines(join.PRELUDE)
        if plan.q_panels:
            out.lines(LDMATRIX_PRELUDE)
            define_product(out, dtype, plan.keys, True, b_rows=False)
        define_product(out, dtype, plan.keys, False, b_rows=False)
        define_product(out, dtype, plan.own_columns, True, b_rows=True)
        out.line()
        self._kernel()

    def _signature(self) -> list[str]:
        kernel, parts = self.plan.base.kernel, []
        for arg in self.plan.base.args:
            tensor = kernel.tensor(arg.name)
            match arg.kind:
                case ArgKind.TENSOR_MAP:
                    parts.append(f"__grid_constant__ TensorMap const map{arg.name}")
                case ArgKind.POINTER:
                    read = tensor is not None and not tensor.workspace
                    wide = tensor is not None and tensor.elem is ast.Elem.F32
                    element = "float" if wide else "uint16_t"
                    parts.append(f"{element}{' const' if read else ''}* __restrict__ g{arg.name}")
                case ArgKind.STRIDE:
                    parts.append(f"int64_t {arg.name.replace('.', '_stride_')}")
                case ArgKind.KEY_COUNTS | ArgKind.PAGES:
                    parts.append(f"int const* __restrict__ {arg.name}")
                case ArgKind.PAGE_STRIDE:
                    parts.append(f"int64_t {arg.name}_stride")
                case ArgKind.FLOAT:
                    parts.append(f"float {arg.name}")
                case _:
                    parts.append(f"int {arg.name}")
        return parts

    def _kernel(self) -> None:
        plan, out = self.plan, self.out
        blocks = plan.split_cluster
        dims = f" __cluster_dims__({blocks}, 1, 1)" if blocks > 1 else ""
        out.line(
            f'extern "C" __global__ void{dims} '
            f"__launch_bounds__({plan.threads}, {plan.blocks_per_sm})"
        )
        out.line(f"{plan.base.entry}(")
        out.parameters(self._signature())
        with out.block(")"):
            out.line("int const warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);")
            out.line("uint32_t const smem_at = cast_smem_ptr_to_uint(smem);")
            self._position()
            with out.block(f"if (warpgroup == {plan.consumers})"):
                self._producer()
            with out.block("else"):
                DecodeConsumer(plan, out).write()

    def _position(self) -> None:
        """Decode the 1-D grid: row blocks change fastest, so that they share keys in the L2."""
        plan, out, var = self.plan, self.out, self.var
        at, blocks = "blockIdx.x", plan.split_cluster
        out.line(f"int const row_blocks = ceil_div(rows, {WARPGROUP_ROWS});")
        if blocks > 1:
            at = f"(blockIdx.x / {blocks})"
            out.line(f"int const cluster_rank = blockIdx.x % {blocks};")
        if plan.column_blocks > 1:
            at = f"(blockIdx.x / {plan.column_blocks})"
            out.line("// the columns of the output, and of V, that are this block's")
            out.line(f"int const column_block = blockIdx.x % {plan.column_blocks};")
        out.line(f"int const row0 = {at} % row_blocks * {WARPGROUP_ROWS};")
        out.line(f"int const rest = {at} / row_blocks;")
        own, every = ("split", "splits") if blocks == 1 else ("part", f"splits * {blocks}")
        out.line(f"int const {own} = rest % splits, plane = rest / splits;")
        if blocks > 1:
            out.line("// the blocks of a cluster have neighbouring splits of one part of the keys")
            out.line(f"int const split = part * {blocks} + cluster_rank;")
        out.line("int const kv_head = plane % kv_heads, sequence = plane / kv_heads;")
        out.line("int const keys = key_counts == nullptr ? N : key_counts[sequence];")
        out.line(f"int const tiles = ceil_div(keys, {plan.keys});")
        out.line(f"int const tiles_per_split = ceil_div(tiles, {every});")
        out.line(f"int const {var}_lo = split * tiles_per_split;")
        out.line(f"int const {var}_hi = min(tiles, {var}_lo + tiles_per_split);")
        whole = "keys"
        if any(m.causal or m.window for m in plan.loop.masks):
            out.line("// bottom-right: query r sees keys up to r + this")
            out.line("int const diagonal = keys - M;")
        if any(m.causal for m in plan.loop.masks):
            whole = "min(keys, max(0, row0 / group + diagonal + 1))"
        out.line(f"int const {var}_full = {whole} / {plan.keys};  // no mask touches tiles below")

    # ---- producer ------------------------------------------------------------------------------

    def _producer(self) -> None:
        out, var, plan = self.out, self.var, self.plan
        if plan.consumers > 1:
            out.line(f"registers_down<{plan.producer_registers}>();")
        with out.block(f"if (threadIdx.x == {128 * plan.consumers})"):
            for name in dict.fromkeys(p.tensor for p in plan.parts):
                out.line(f"fetch_map(&map{name});")
            for part in plan.parts:
                with out.unrolled("stage", plan.stages):
                    out.line(f"initialize_barrier(*barrier_at({part.barrier} + stage), 1);")
                    out.line(f"initialize_barrier(*barrier_at({part.empty} + stage), 1);")
            out.line('asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");')
            self._first_tile()
        out.line("// the consumers may wait on the barriers now")
        out.line("__syncwarp();")
        out.line(f"named_arrive({BARRIERS_MADE}, {plan.threads});")
        out.line("// the first product waits for the rows: they come before the second tile")
        out.line(f"named_sync({ROWS_ISSUED}, {plan.threads});")
        with out.block(f"if (threadIdx.x == {128 * plan.consumers})"):
            out.line("uint32_t count = 1;")
            out.line("#pragma unroll 1")
            head = f"for (int {var} = {var}_lo + 1; {var} < {var}_hi; ++{var}, ++count)"
            with out.block(head):
                out.line(f"uint32_t const slot = count % {plan.stages};")
                out.line(f"uint32_t const parity = (count / {plan.stages} & 1) ^ 1;")
                self._tile()

    def _first_tile(self) -> None:
        """Load the first tile: its place was never used."""
        out, var = self.out, self.var
        with out.block(f"if ({var}_lo < {var}_hi)"):
            out.line(f"int const {var} = {var}_lo;")
            out.line("uint32_t const slot = 0, parity = 1;")
            self._tile()

    def _tile(self) -> None:
        """Load tile `i` into `slot`, part by part."""
        if self.plan.page:
            self._page_numbers()
        for part in self.plan.parts:
            self._load(part)

    def _page_numbers(self) -> None:
        """Declare the pages of a tile. Past the sequence's last key the row is one past a page."""
        plan, out, var = self.plan, self.out, self.var
        pieces = max(1, plan.keys // plan.page)
        out.line(f"int page[{pieces}], page_row[{pieces}];")
        with out.unrolled("piece", pieces):
            out.line(f"int const key = {var} * {plan.keys} + piece * {plan.page};")
            out.line("bool const there = key < keys;")
            at = f"sequence * pages_stride + key / {plan.page}"
            out.line(f"page[piece] = there ? pages[{at}] : 0;")
            out.line(f"page_row[piece] = there ? key % {plan.page} : {plan.page};")

    def _load(self, part: Part) -> None:
        out, plan, var = self.out, self.plan, self.var
        stmt = next(
            s for s in plan.loop.body
            if isinstance(s, ast.Copy) and s.name == part.tensor and s.dst is ast.Memory.SHARED
        )  # fmt: skip
        comment(out, stmt, part.name if part.name != part.tensor else "")
        out.line(f"wait({part.empty} + slot, parity);")
        out.line(f"expect({part.barrier} + slot, {part.bytes});")
        hint = "kEvictFirst" if plan.evict_first else "kEvictNormal"
        at = f"smem + {part.offset} + slot * {part.stage_bytes} + panel * {part.panel_bytes}"
        with out.unrolled("p", part.panels):
            out.line(f"int const panel = {part.first_panel} + p;" if part.first_panel else
                     "int const panel = p;")  # fmt: skip
            column = f"{plan.panel_from('panel')} * {PANEL_COLUMNS}"
            copy = f"SM90_TMA_LOAD_4D::copy(&map{part.tensor}, barrier_at({part.barrier} + slot), "
            if not plan.page:
                out.line(f"{copy}{hint}, {at},")
                out.line(f"    {column}, {var} * {plan.keys}, kv_head, sequence);")
                return
            with out.unrolled("piece", max(1, plan.keys // plan.page)):
                out.line(f"{copy}{hint},")
                out.line(f"    {at} + piece * {plan.page * ROW_BYTES},")
                out.line(f"    {column}, page_row[piece], kv_head, page[piece]);")
