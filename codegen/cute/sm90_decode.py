"""sm_90a decode kernels: text of the frame, of the warp that loads, and of the consumers.

The owner publishes P and its rows' maxima through shared memory, each thread for the thread of the
follower with the same place in the fragment, so that the follower rescales and multiplies alike.
"""

from __future__ import annotations

from codegen.cute.plan import LoopPlan, MaskPlan
from codegen.cute.pointwise import START_KERNEL_BEHIND, packed_row
from codegen.cute.sm90 import BARRIERS_PRELUDE, WAITS_PRELUDE
from codegen.cute.sm90_consumer import NoCopies, WgmmaStatements
from codegen.cute.sm90_decode_plan import DecodePlan, Part
from codegen.cute.statements import comment
from codegen.cute.target import COMMON_PRELUDE, PACK, UNPACK
from codegen.cute.wgmma import CORE_BYTES, PANEL_COLUMNS, ROW_BYTES, define_product, product_name
from codegen.cute.wgmma import PRELUDE as WGMMA_PRELUDE
from codegen.cute.writer import Writer
from codegen.errors import PlanError
from codegen.kernel import ArgKind
from codegen.tl import ast
from space.hopper import WARPGROUP_ROWS, panels
from space.tiles import CHUNK_BYTES

STEP = 16
#: named barriers: 0 is __syncthreads; one for each warpgroup, then the two of the exchange of P
OWN_BARRIER, P_FULL, P_EMPTY = 1, 3, 4

PRELUDE = """
// makes plain stores to shared memory visible to wgmma
__device__ __forceinline__ void visible_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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
        self.plan, self.out = plan, out
        self.statements = WgmmaStatements(plan.base, NoCopies(), out)
        self.var = plan.loop.var
        self.p = plan.product.a.name
        self.queries = plan.scores.a.name

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
        out.lines(PRELUDE)
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
        out.line(
            f'extern "C" __global__ void __launch_bounds__({plan.threads}, {plan.blocks_per_sm})'
        )
        out.line(f"{plan.base.entry}(")
        signature = self._signature()
        for k, part in enumerate(signature):
            out.line(f"    {part}{',' if k < len(signature) - 1 else ''}")
        with out.block(")"):
            out.line(START_KERNEL_BEHIND)
            out.line("int const warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);")
            out.line("uint32_t const smem_at = cast_smem_ptr_to_uint(smem);")
            with out.block("if (threadIdx.x == 0)"):
                for part in plan.parts:
                    with out.unrolled("stage", plan.stages):
                        out.line(f"initialize_barrier(*barrier_at({part.barrier} + stage), 1);")
                        out.line(f"initialize_barrier(*barrier_at({part.empty} + stage), 1);")
                out.line('asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");')
            out.line("__syncthreads();")
            self._position()
            with out.block(f"if (warpgroup == {plan.consumers})"):
                self._producer()
            with out.block("else"):
                self._consumers()

    def _position(self) -> None:
        """Decode the 1-D grid: row blocks change fastest, so that they share keys in the L2."""
        plan, out, var = self.plan, self.out, self.var
        out.line(f"int const row_blocks = ceil_div(rows, {WARPGROUP_ROWS});")
        out.line(f"int const row0 = blockIdx.x % row_blocks * {WARPGROUP_ROWS};")
        out.line("int const rest = blockIdx.x / row_blocks;")
        out.line("int const split = rest % splits, plane = rest / splits;")
        out.line("int const kv_head = plane % kv_heads, sequence = plane / kv_heads;")
        out.line("int const keys = key_counts == nullptr ? N : key_counts[sequence];")
        out.line(f"int const tiles = ceil_div(keys, {plan.keys});")
        out.line("int const tiles_per_split = ceil_div(tiles, splits);")
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
            out.line("uint32_t count = 0;")
            out.line("#pragma unroll 1")
            with out.block(f"for (int {var} = {var}_lo; {var} < {var}_hi; ++{var}, ++count)"):
                out.line(f"uint32_t const slot = count % {plan.stages};")
                out.line(f"uint32_t const parity = (count / {plan.stages} & 1) ^ 1;")
                if plan.page:
                    self._page_numbers()
                for part in plan.parts:
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
        hint = "kEvictNormal" if len(plan.key_parts) > 1 else "kEvictFirst"
        at = f"smem + {part.offset} + slot * {part.stage_bytes} + panel * {part.panel_bytes}"
        with out.unrolled("p", part.panels):
            out.line(f"int const panel = {part.first_panel} + p;" if part.first_panel else
                     "int const panel = p;")  # fmt: skip
            copy = f"SM90_TMA_LOAD_4D::copy(&map{part.tensor}, barrier_at({part.barrier} + slot), "
            if not plan.page:
                out.line(f"{copy}{hint}, {at},")
                out.line(f"    panel * {PANEL_COLUMNS}, {var} * {plan.keys}, kv_head, sequence);")
                return
            with out.unrolled("piece", max(1, plan.keys // plan.page)):
                out.line(f"{copy}{hint},")
                out.line(f"    {at} + piece * {plan.page * ROW_BYTES},")
                out.line(f"    panel * {PANEL_COLUMNS}, page_row[piece], kv_head, page[piece]);")

    # ---- consumers -----------------------------------------------------------------------------

    def _consumers(self) -> None:
        out, plan = self.out, self.plan
        if plan.consumers > 1:
            out.line(f"registers_up<{plan.consumer_registers}>();")
        out.line("int const tid = threadIdx.x % 128, lane = tid & 31, warp = tid >> 5;")
        out.line("bool const leader = tid == 0;  // arrives for its warpgroup")
        self._rows()
        if plan.consumers == 1:
            self._owner()
            return
        with out.block("if (warpgroup == 0)"):
            self._owner()
        with out.block("else"):
            self._follower()

    def _rows(self) -> None:
        """Packed rows of Q to shared memory; rows and columns past the end are zero."""
        out, plan, q = self.out, self.plan, self.queries
        stmt = next(s for s in plan.base.kernel.body if isinstance(s, ast.Copy) and s.name == q)
        comment(out, stmt)
        chunks = panels(plan.head_dim) * 8
        threads = 128 * plan.consumers
        out.line("#pragma unroll")
        with out.block(
            f"for (int at = threadIdx.x; at < {WARPGROUP_ROWS * chunks}; at += {threads})"
        ):
            out.line(f"int const r = at / {chunks}, chunk = at % {chunks}, row = row0 + r;")
            out.line("uint128_t x{};")
            own = "" if plan.head_dim % PANEL_COLUMNS == 0 else f" && chunk < {plan.head_dim // 8}"
            out.line(
                f"if (row < rows{own}) x = *reinterpret_cast<uint128_t const*>(g{q} + "
                f"{packed_row(q, 'row', 'sequence')} + chunk * 8);"
            )
            out.line(
                f"chunk_at(smem_at + chunk / 8 * {WARPGROUP_ROWS * ROW_BYTES} + r * {ROW_BYTES} + "
                f"((chunk & 7) ^ (r & 7)) * {CHUNK_BYTES}) = x;"
            )
        out.line("visible_to_products();")
        out.line(f"named_sync({OWN_BARRIER}, {threads});")

    def _owner(self) -> None:
        out, plan, var = self.out, self.plan, self.var
        out.line("uint32_t scored = 0, multiplied = 0;  // tiles")
        if self._shares_work():
            out.line(f"bool const live = row0 + warp * {STEP} < rows;  // rows of this warp exist")
        self.statements.declare()
        for stmt in plan.base.kernel.body:
            if isinstance(stmt, ast.For):
                break
            if not isinstance(stmt, ast.Copy):
                self.statements.emit(stmt, None)
        fragment = plan.base.fragment(self.p)
        assert fragment is not None
        out.line(f"uint32_t {self.p}_a[1][{fragment.columns // STEP}][4];")
        out.line(f"int {var} = {var}_lo;")
        if plan.overlap:
            with out.block(f"if ({var} < {var}_hi)"):
                self._scores()
                self._scores_done(pending=0)
                self._front(in_flight=False)
                self._publish(first=True)
                out.line("#pragma unroll 1")
                with out.block(f"for (++{var}; {var} < {var}_hi; ++{var})"):
                    self._scores()
                    self._accumulate(0, f"{var} - 1", "multiplied")
                    self._scores_done(pending=1)
                    self._front(in_flight=True)
                    self._publish(first=False)
                self._accumulate(0, f"{var} - 1", "multiplied")
                self._let_go(0)
        else:
            out.line("#pragma unroll 1")
            with out.block(f"for (; {var} < {var}_hi; ++{var})"):
                self._scores()
                self._scores_done(pending=0)
                self._front(in_flight=False)
                self._publish(first=None)
                self._accumulate(0, var, "multiplied")
                self._let_go(0)
        self._finish(0)

    def _scores(self) -> None:
        """Issue the product that gives the scores, part by part as they come."""
        out, plan = self.out, self.plan
        stmt, q_panel = plan.scores, WARPGROUP_ROWS * ROW_BYTES
        comment(out, stmt)
        with out.block(""):
            out.line(f"uint32_t const slot = scored % {plan.stages};")
            out.line("uint64_t const a = tile_descriptor(here(smem_at), 16);")
            parts = plan.key_parts
            out.line(
                f"uint64_t const b = tile_descriptor(smem_at + {parts[0].offset} + "
                f"slot * {parts[0].stage_bytes}, 16);"
            )
            name = product_name(plan.keys, False, False)
            steps = -(-plan.head_dim // STEP)
            for n, part in enumerate(parts):
                first = part.first_panel * 4
                count = min(part.panels * 4, steps - first)
                out.line(f"wait({part.barrier} + slot, scored / {plan.stages} & 1);")
                out.line("warpgroup_fence();")
                with out.unrolled("k", first + count, first):
                    out.line("int const panel = k / 4, within = k % 4 * 32;")
                    keep = f"k > {first}" if n == 0 else "1"
                    out.line(
                        f"{name}({stmt.out}, a + (panel * {q_panel} + within) / 16, "
                        f"b + (panel * {part.panel_bytes} + within) / 16, {keep});"
                    )
                out.line("warpgroup_commit();")

    def _scores_done(self, pending: int) -> None:
        """The scores are there: what only they read is let go."""
        out, plan = self.out, self.plan
        out.line(f"warpgroup_wait<{pending}>();")
        out.line(f"hold({plan.scores.out});")
        done = next(p for p in plan.key_parts if p.name in ("keys", "rest"))
        out.line(f"if (leader) arrive({done.empty} + scored % {plan.stages});")
        out.line("++scored;")

    def _accumulate(self, consumer: int, tile: str, count: str) -> None:
        """Issue the product with a warpgroup's columns of V."""
        out, plan = self.out, self.plan
        part, stmt = plan.value_part(consumer), plan.product
        comment(out, stmt)
        out.line(f"wait({part.barrier} + {count} % {plan.stages}, {count} / {plan.stages} & 1);")
        with out.block(""):
            out.line(
                f"uint32_t const values_at = smem_at + {part.offset} + {count} % {plan.stages} * "
                f"{part.stage_bytes} + {part.first_panel * part.panel_bytes};"
            )
            self._clear_tail(consumer, part, tile)
            out.line(f"uint64_t const b = tile_descriptor(values_at, {part.panel_bytes});")
            out.line("warpgroup_fence();")
            name = product_name(plan.own_columns, True, True)
            with out.unrolled("k", plan.keys // STEP):
                out.line(
                    f"{name}({stmt.out}, {self.p}_a[0][k], b + k * {2 * CORE_BYTES // 16}, 1);"
                )
            out.line("warpgroup_commit();")

    def _clear_tail(self, consumer: int, part: Part, tile: str) -> None:
        """Zero rows of V past the sequence's end: the cache may hold anything there, NaN too."""
        out, plan = self.out, self.plan
        partly = f"({tile} + 1) * {plan.keys} > keys"
        with out.block(f"if ({partly})" if plan.page else f"if (keys < N && {partly})"):
            out.line(f"int const left = keys - ({tile}) * {plan.keys};")
            with out.block(f"for (int at = tid; at < {plan.keys * part.panels * 8}; at += 128)"):
                out.line(f"int const r = at % {plan.keys}, chunk = at / {plan.keys};")
                out.line(
                    f"if (r >= left) chunk_at(values_at + chunk / 8 * {part.panel_bytes} + "
                    f"r * {ROW_BYTES} + chunk % 8 * {CHUNK_BYTES}) = uint128_t{{}};"
                )
            out.line("visible_to_products();")
            out.line(f"named_sync({OWN_BARRIER} + {consumer}, 128);")

    def _let_go(self, consumer: int) -> None:
        """A warpgroup's product is done: its columns of V may be filled again."""
        out, plan = self.out, self.plan
        part = plan.value_part(consumer)
        out.line("warpgroup_wait<0>();")
        out.line(f"hold({plan.product.out});")
        out.line(f"if (leader) arrive({part.empty} + multiplied % {plan.stages});")
        out.line("++multiplied;")

    def _shares_work(self) -> bool:
        """Whether warps whose rows do not exist may leave the softmax out."""
        return self.plan.consumers == 1

    def _front(self, in_flight: bool) -> None:
        """Everything between the scores and the Reshape, then P as operands of the product.

        `in_flight` says that the last tile's product is: the output may be touched, and P packed
        again, only when it has been waited for.
        """
        plan, out = self.plan, self.out
        body = plan.loop.body
        softmax = any(isinstance(s, ast.Custom) and s.op == "Softmax" for s in plan.front)
        wait = (lambda: self._wait_product()) if in_flight else None
        self.statements.before_rescale = wait
        self.statements.after_vote = None
        masks = {m.at: m for m in plan.loop.masks}
        reshape = next(k for k, s in enumerate(body) if isinstance(s, ast.Reshape))
        with out.block("if (live)" if self._shares_work() else ""):
            for at in range(reshape + 1):
                if (mask := masks.get(at)) is not None:
                    stated = self.statements.is_mask(body[at], mask)
                    self._mask(plan.loop, mask, body[at] if stated else None)
                if at < reshape and body[at] in plan.front:
                    stmt = body[at]
                    if isinstance(stmt, ast.Custom) and stmt.op == "Mask":
                        continue
                    self.statements.emit(stmt, None)
        if in_flight:
            if not softmax:
                pass
            self._let_go(0)
        stmt = body[reshape]
        comment(out, stmt)
        self.statements.gemms.pack(self.p, False)

    def _wait_product(self) -> None:
        self.out.line("warpgroup_wait<0>();")
        self.out.line(f"hold({self.plan.product.out});")

    def _mask(self, loop: LoopPlan, mask: MaskPlan, stmt: ast.Stmt | None) -> None:
        """Mask the scores of a tile: keys past the sequence, after the diagonal, out of a window."""
        out, var, plan = self.out, self.var, self.plan
        if stmt is not None:
            comment(out, stmt)
        out.line(f"// keys of tile {var} that a row must not see")
        touched = f"{var} >= {var}_full"
        if mask.window:
            first_query = f"(row0 + {WARPGROUP_ROWS} - 1) / group"
            touched += f" || {var} * {plan.keys} < {first_query} + diagonal - {mask.window[0]}"
            touched += f" || ({var} + 1) * {plan.keys} > row0 / group + diagonal + {mask.window[1]}"
        with out.block(f"if ({touched})"), out.unrolled("r", 2):
            first = f"{var} * {plan.keys} + (lane & 3) * 2"
            ends = ["keys - 1"]
            if mask.causal or mask.window:
                out.line(f"int const query = (row0 + warp * {STEP} + r * 8 + lane / 4) / group;")
            if mask.causal:
                ends.append("query + diagonal")
            if mask.window:
                ends.append(f"query + diagonal + {mask.window[1]}")
            last = ends[0]
            for end in ends[1:]:
                last = f"min({last}, {end})"
            out.line(f"int const last = {last} - ({first});")
            test = "n * 8 + c > last"
            if mask.window:
                out.line(f"int const first = query + diagonal - {mask.window[0]} - ({first});")
                test += " || n * 8 + c < first"
            with out.unrolled("n", plan.keys // 8), out.unrolled("c", 2):
                out.line(f"if ({test}) {mask.scores}[0][n][r * 2 + c] = {mask.fill};")

    # ---- exchange between the warpgroups -------------------------------------------------------

    def _publish(self, first: bool | None) -> None:
        """Give P and the rows' maxima to the follower; `first` None asks the loop's variable."""
        out, plan, var = self.out, self.plan, self.var
        if plan.consumers == 1:
            return
        if first is None:
            out.line(f"if ({var} > {var}_lo) named_sync({P_EMPTY}, 256);")
        elif not first:
            out.line(f"named_sync({P_EMPTY}, 256);")
        steps = plan.keys // STEP
        out.line(f"uint32_t const p_at = smem_at + {plan.exchange_offset} + tid * {CHUNK_BYTES};")
        with out.unrolled("k", steps):
            words = ", ".join(f"{self.p}_a[0][k][{n}]" for n in range(4))
            out.line(f"store_words(p_at + k * {128 * CHUNK_BYTES}, {words});")
        self._send(f"{self.p}_max[0][0]", f"{self.p}_max[0][1]")
        out.line(f"named_arrive({P_FULL}, 256);")

    def _numbers_at(self) -> str:
        steps = self.plan.keys // STEP
        return f"smem + {self.plan.exchange_offset + steps * 128 * CHUNK_BYTES} + tid * 8"

    def _send(self, low: str, high: str) -> None:
        self.out.line(f"*reinterpret_cast<float2*>({self._numbers_at()}) = {{{low}, {high}}};")

    def _follower(self) -> None:
        out, plan, var, p = self.out, self.plan, self.var, self.p
        softmax = plan.base.softmax(p)
        name = plan.product.out
        atoms = plan.own_columns // 8
        steps = plan.keys // STEP
        out.line("uint32_t multiplied = 0;  // tiles")
        out.line(f"float {name}[1][{atoms}][4];")
        with out.unrolled("n", atoms), out.unrolled("e", 4):
            out.line(f"{name}[0][n][e] = 0.f;")
        scale = "fmaxf(fabsf(scale), 1e-37f) * 1.44269504089f"
        out.line(f"float const log2 = {scale if softmax.scale_folded else '1.44269504089f'};")
        out.line("float top[2] = {-INFINITY, -INFINITY};")
        out.line("#pragma unroll 1")
        with out.block(f"for (int {var} = {var}_lo; {var} < {var}_hi; ++{var})"):
            out.line(f"uint32_t {p}_a[1][{steps}][4];")
            out.line(f"named_sync({P_FULL}, 256);")
            out.line(
                f"uint32_t const p_at = smem_at + {plan.exchange_offset} + tid * {CHUNK_BYTES};"
            )
            with out.unrolled("k", steps):
                words = ", ".join(f"{p}_a[0][k][{n}]" for n in range(4))
                out.line(f"load_words(p_at + k * {128 * CHUNK_BYTES}, {words});")
            out.line(f"float2 const high = *reinterpret_cast<float2 const*>({self._numbers_at()});")
            out.line(f"named_arrive({P_EMPTY}, 256);")
            with out.block("if (__any_sync(~0u, high.x != top[0] || high.y != top[1]))"):
                with out.unrolled("r", 2):
                    out.line("float const own = r ? high.y : high.x;")
                    out.line(
                        "float const decay = own == -INFINITY ? 1.f : "
                        "exp2_approx((top[r] - own) * log2);"
                    )
                    out.line("top[r] = own;")
                    with out.unrolled("n", atoms):
                        out.line(f"{name}[0][n][r * 2] *= decay;")
                        out.line(f"{name}[0][n][r * 2 + 1] *= decay;")
            self._accumulate(1, var, "multiplied")
            self._let_go(1)
        self._finish(1)

    # ---- epilogue ------------------------------------------------------------------------------

    def _finish(self, consumer: int) -> None:
        """Normalise, and store: the output itself, or this split's part of it and its sum."""
        out, plan, var = self.out, self.plan, self.var
        name = plan.product.out
        if consumer == 0:
            if plan.consumers > 1:
                self._send_inverse()
            for stmt in plan.after:
                if not isinstance(stmt, ast.Copy):
                    self.statements.emit(stmt, None)
        else:
            out.line(f"named_sync({P_FULL}, 256);")
            out.line(
                f"float2 const inverse = *reinterpret_cast<float2 const*>({self._numbers_at()});"
            )
            with out.unrolled("n", plan.own_columns // 8), out.unrolled("e", 4):
                out.line(f"{name}[0][n][e] *= e < 2 ? inverse.x : inverse.y;")
        for stmt in plan.after:
            if isinstance(stmt, ast.Copy):
                self._store(stmt, consumer)

    def _send_inverse(self) -> None:
        """The follower normalises by the same sums, once it has read the last P."""
        out, var, p = self.out, self.var, self.p
        normal = [s for s in self.plan.after if isinstance(s, ast.Custom) and s.op == "Normalize"]
        if len(normal) != 1:
            raise PlanError("two warpgroups normalise one output by one softmax")
        with out.block(""):
            out.line("float inverse[2];")
            with out.unrolled("r", 2):
                out.line(f"float const total = quad_sum({p}_sum[0][r]);")
                out.line("inverse[r] = total == 0.f ? 0.f : 1.f / total;")
            out.line(f"if ({var}_lo < {var}_hi) named_sync({P_EMPTY}, 256);")
            self._send("inverse[0]", "inverse[1]")
            out.line(f"named_arrive({P_FULL}, 256);")

    def _store(self, stmt: ast.Copy, consumer: int) -> None:
        out, plan = self.out, self.plan
        tensor = plan.base.kernel.tensor(stmt.name)
        if tensor is None or not tensor.workspace:
            raise PlanError(f"{stmt.name} is no part of a split's result")
        vector = stmt.name in plan.base.row_vectors
        if vector and consumer:
            return
        comment(out, stmt)
        lead = "(int64_t(split) * kv_heads * batch + plane) * rows + row"
        with out.unrolled("r", 2):
            out.line(f"int const row = row0 + warp * {STEP} + r * 8 + lane / 4;")
            if vector:
                out.line(
                    f"if (splits > 1 && lane % 4 == 0 && row < rows) g{stmt.name}[{lead}] = "
                    f"{stmt.name}[0][r];"
                )
                return
            first = consumer * plan.own_columns
            column = f"{first} + (lane & 3) * 2" if first else "(lane & 3) * 2"
            low, high = (f"{stmt.name}[0][n][r * 2 + {c}]" for c in (0, 1))
            with out.block("if (row < rows && splits > 1)"):
                out.line(f"float* const to = g{stmt.name} + ({lead}) * {plan.columns} + {column};")
                with out.unrolled("n", plan.own_columns // 8):
                    out.line(f"*reinterpret_cast<float2*>(to + n * 8) = {{{low}, {high}}};")
            with out.block("else if (row < rows)"):
                out.line("// the keys are in one piece: this is the output")
                at = packed_row(plan.output, "row", "sequence")
                out.line(f"uint16_t* const to = g{plan.output} + {at} + {column};")
                with out.unrolled("n", plan.own_columns // 8):
                    out.line(f"*reinterpret_cast<uint32_t*>(to + n * 8) = pack({low}, {high});")
