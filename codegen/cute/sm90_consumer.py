"""The consumer warpgroups of a Hopper kernel: scores, softmax, accumulation, epilogue."""

from __future__ import annotations

from codegen.cute.sm90_plan import Sm90Plan
from codegen.cute.sm90_writer import STEP, Sm90Writer
from codegen.cute.statements import comment
from codegen.cute.wgmma import product_name
from codegen.cute.wgmma_statements import NoCopies, WgmmaStatements
from codegen.cute.writer import Writer
from codegen.errors import PlanError
from codegen.tl import ast
from space.hopper import WARPGROUP_ROWS
from space.tiles import CHUNK_BYTES

#: named barriers: 0 is __syncthreads
OUT_BARRIER = 1
TURN_BARRIER = 8


class Consumer(Sm90Writer):
    """Writes what each consumer warpgroup does."""

    def __init__(self, plan: Sm90Plan, out: Writer) -> None:
        self.wgmma = WgmmaStatements(plan.base, NoCopies(), out)
        super().__init__(plan, out, self.wgmma)

    def write(self) -> None:
        out, plan = self.out, self.plan
        out.line(f"registers_up<{plan.consumer_registers}>();")
        out.line("int const tid = threadIdx.x - 128, lane = tid & 31, warp = tid >> 5;")
        out.line("int const consumer = warpgroup - 1;")
        out.line("bool const leader = tid % 128 == 0;  // arrives and stores for its warpgroup")
        for ring in plan.rings:
            out.line(f"uint32_t {ring.name}_count = 0;")
        if plan.pingpong:
            out.line("// the first warpgroup has the first turn")
            out.line(f"if (consumer == {plan.consumers - 1}) named_arrive({TURN_BARRIER}, 256);")
        if plan.scheduler == 2:
            out.line("uint32_t drawn = 0;")
        self.tiles(self._tile, self.read_tile)
        out.line('if (leader) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");')

    def _tile(self) -> None:
        out, plan, var = self.out, self.plan, self.var
        out.line(f"int const own_row0 = row0 + consumer * {plan.own_queries};")
        own = plan.skip and bool(plan.loop.masks)
        if own:
            self.statements.loop_bounds(plan.loop, "own_row0", plan.own_queries, "_own")
        elif plan.loop.masks:
            # the masks' edge is the warpgroup's own even where the loop's end is the block's
            self.statements.loop_bounds(plan.loop, "own_row0", plan.own_queries, "_own")
        hi = f"{var}_hi_own" if own else f"{var}_hi"
        self.statements.declare()
        for stmt in plan.before:
            self.statements.emit(stmt, None)
        row_ring = self.row_ring
        self.wait_full(row_ring)
        if plan.q_in_registers:
            self._read_rows()
        out.line(f"int {var} = {var}_lo;")
        if plan.overlap:
            self._overlapped(hi)
        else:
            self._serial(hi)
            self._release_rows()
        if own:
            self._pass_over(hi)
        for stmt in plan.after:
            if isinstance(stmt, ast.Copy):
                self._store(stmt)
            else:
                self.statements.emit(stmt, None)
        out.line(f"++{row_ring.name}_count;")

    def _serial(self, hi: str) -> None:
        out, var = self.out, self.var
        out.line("#pragma unroll 1")
        with out.block(f"for (; {var} < {hi}; ++{var})"):
            self._scores()
            self._pass_turn()
            self._drain(0, self.front_gemm.out)
            self.release(self.k)
            self._front(after_product=False)
            self._reshape()
            self._accumulate()
            self._drain(0, self.back_gemm.out)
            self.release(self.v)

    def _overlapped(self, hi: str) -> None:
        out, var = self.out, self.var
        p = self.back_gemm.a.name
        fragment = self.plan.base.fragment(p)
        assert fragment is not None
        out.line(f"uint32_t {p}_a[1][{fragment.columns // STEP}][4];")
        with out.block(f"if ({var} < {hi})"):
            self._scores()
            self._pass_turn()
            self._drain(0, self.front_gemm.out)
            self.release(self.k)
            self._front(after_product=False)
            self._reshape(declare=False)
            out.line("#pragma unroll 1")
            with out.block(f"for (++{var}; {var} < {hi}; ++{var})"):
                self._next_tile()
            self._accumulate()
            self._release_rows()
            self._drain(0, self.back_gemm.out)
            self.release(self.v)
        with out.block("else"):
            self._release_rows()

    def _next_tile(self) -> None:
        """Issue this tile's scores and the last one's product; then the softmax between them."""
        self._scores()
        self._accumulate()
        self._pass_turn()
        self._drain(1, self.front_gemm.out)
        self.release(self.k)

        self._front(after_product=True)
        self._reshape(declare=False)

    def _read_rows(self) -> None:
        """Read this warpgroup's rows as A operands of all steps, and give their slot back."""
        out, ring, panel = self.out, self.row_ring, self.row_ring.panel
        steps = -(-ring.columns // STEP)
        out.line(f"uint32_t {ring.name}_r[{steps}][4];")
        with out.block(""):
            out.line(f"int const row = consumer * {WARPGROUP_ROWS} + warp % 4 * 16 + (lane & 15);")
            out.line(
                f"uint32_t const rows_at = smem_at + {ring.offset} + "
                f"{ring.name}_count % {ring.stages} * {ring.stage_bytes} + "
                f"row * {panel.row_bytes};"
            )
            with out.unrolled("k", steps):
                chunk = panel.swizzled(f"k % {panel.steps} * 2 + (lane >> 4)", "row")
                out.line(
                    f"ldsm({ring.name}_r[k], rows_at + k / {panel.steps} * {ring.panel_bytes} + "
                    f"{chunk} * {CHUNK_BYTES});"
                )
        out.line(f"named_sync({OUT_BARRIER} + consumer, 128);")
        self._give_rows_back()

    def _release_rows(self) -> None:
        """The row tile is read no more: its products have been waited for."""
        if not self.plan.q_in_registers:
            self._give_rows_back()

    def _give_rows_back(self) -> None:
        if not self.plan.out_in_rows:
            ring = self.row_ring
            self.out.line(f"if (leader) arrive({ring.empty} + {ring.name}_count % {ring.stages});")

    def _pass_turn(self) -> None:
        """Let the next warpgroup issue its products."""
        if self.plan.pingpong:
            after = f"(consumer + 1) % {self.plan.consumers}"
            self.out.line(f"named_arrive({TURN_BARRIER} + {after}, 256);")

    def _drain(self, pending: int, accumulator: str) -> None:
        """Wait until at most `pending` batches of products are in flight; then read the result."""
        self.out.line(f"warpgroup_wait<{pending}>();")
        self.out.line(f"hold({accumulator});")

    def _pass_over(self, hi: str) -> None:
        """Keep the rings' counts equal for tiles that none of this warpgroup's rows sees."""
        out, var = self.out, self.var
        out.line("// tiles of later rows: all their keys are hidden from this warpgroup")
        out.line("#pragma unroll 1")
        with out.block(f"for ({var} = max({hi}, {var}_lo); {var} < {var}_hi; ++{var})"):
            for ring in (self.k, self.v):
                self.wait_full(ring)
                self.release(ring)
            if self.plan.pingpong:
                out.line(f"named_sync({TURN_BARRIER} + consumer, 256);")
                self._pass_turn()

    def _scores(self) -> None:
        """Issue the front's product for the tile K_count stands at."""
        out, stmt, k, q = self.out, self.front_gemm, self.k, self.row_ring
        if not stmt.b.transposed or stmt.a.name != q.name:
            raise PlanError("the Hopper back end lowers row tile times key tile transposed")
        comment(out, stmt)
        self.wait_full(k)
        if self.plan.pingpong:
            out.line(f"named_sync({TURN_BARRIER} + consumer, 256);")
        held = self.plan.q_in_registers
        with out.block(""):
            if not held:
                out.line(
                    f"uint64_t const a = tile_descriptor(smem_at + {q.offset} + "
                    f"{q.name}_count % {q.stages} * {q.stage_bytes} + "
                    f"consumer * {WARPGROUP_ROWS * q.panel.row_bytes}, 16);"
                )
            out.line(
                f"uint64_t const b = tile_descriptor(smem_at + {k.offset} + "
                f"{k.name}_count % {k.stages} * {k.stage_bytes}, 16);"
            )
            out.line("warpgroup_fence();")
            name = product_name(k.rows, held, False)
            a = f"{q.name}_r[k]" if held else f"a + (panel * {q.panel_bytes} + within) / 16"
            with out.unrolled("k", -(-k.columns // STEP)):
                steps = k.panel.steps
                out.line(f"int const panel = k / {steps}, within = k % {steps} * 32;")
                out.line(
                    f"{name}({stmt.out}, {a}, b + (panel * {k.panel_bytes} + within) / 16, k > 0);"
                )
            out.line("warpgroup_commit();")

    def _accumulate(self) -> None:
        """Issue the back's product for the tile V_count stands at."""
        out, stmt, v = self.out, self.back_gemm, self.v
        comment(out, stmt)
        self.wait_full(v)
        with out.block(""):
            out.line(
                f"uint64_t const b = tile_descriptor(smem_at + {v.offset} + "
                f"{v.name}_count % {v.stages} * {v.stage_bytes}, {v.panel_bytes});"
            )
            out.line("warpgroup_fence();")
            name = product_name(self.out_columns(), True, True)
            core = STEP * v.panel.row_bytes // CHUNK_BYTES
            with out.unrolled("k", v.rows // STEP):
                out.line(f"{name}({stmt.out}, {stmt.a.name}_a[0][k], b + k * {core}, 1);")
            out.line("warpgroup_commit();")

    def _front(self, after_product: bool) -> None:
        """Everything between the scores and the Reshape, masks where they are planned.

        `after_product` says that a product is in flight: its accumulators may be touched, and P
        packed again, only when it has been waited for.
        """
        plan, statements = self.plan, self.statements
        softmax = any(isinstance(s, ast.Custom) and s.op == "Softmax" for s in plan.front)

        def wait() -> None:
            self._drain(0, self.back_gemm.out)

        def let_go() -> None:
            wait()
            self.release(self.v)

        late = plan.late_wait or not softmax
        self.wgmma.before_rescale = wait if after_product else None
        self.wgmma.after_vote = let_go if after_product and not late else None
        body = plan.loop.body
        reshape = next(k for k, s in enumerate(body) if isinstance(s, ast.Reshape))
        pending: list[tuple[int, ast.Stmt]] = [
            (body.index(s), s) for s in plan.front if not isinstance(s, ast.Gemm)
        ]
        if (rare := self._rarely_touched(pending)) is not None:
            with self.out.block(f"if ({rare})"):
                for at, stmt in pending[:1]:
                    statements.emit(stmt, None)
                    self._masks_at(at + 1)
            done, pending = pending[0][0] + 1, pending[1:]
        else:
            done = -1
        for at, stmt in pending:
            if at != done:
                self._masks_at(at)
            statements.emit(stmt, None)
        self._masks_at(reshape)
        if after_product and late:
            let_go()

    def _rarely_touched(self, pending: list[tuple[int, ast.Stmt]]) -> str | None:
        """C++ for «this tile's scores change before the softmax»: one branch for sign and masks.

        None when the front does not start with a scale that is folded into the softmax.
        """
        at, first = pending[0]
        folded = [s.scores for s in self.plan.base.softmaxes if s.scale_folded]
        if not (isinstance(first, ast.Custom) and first.op == "Scale" and first.name in folded):
            return None
        masks = [m for m in self.plan.loop.masks if m.at == at + 1]
        if any(m.window for m in masks):
            return None
        touched = [f"{self.var} >= {self.var}_full_own"] if masks else []
        return " || ".join([*touched, "scale < 0.f"])

    def _masks_at(self, at: int) -> None:
        loop = self.plan.loop
        for mask in loop.masks:
            if mask.at == at:
                stated = self.statements.is_mask(loop.body[at], mask)
                own = ("own_row0", self.plan.own_queries, "_own")
                stmt = loop.body[at] if stated else None
                self.statements.mask(loop, mask, stmt, always=False, own=own)

    def _reshape(self, declare: bool = True) -> None:
        stmt = self.plan.back[0]
        assert isinstance(stmt, ast.Reshape)
        comment(self.out, stmt)
        self.statements.gemms.pack(stmt.name, declare)

    # ---- epilogue ------------------------------------------------------------------------------

    def _store(self, stmt: ast.Copy) -> None:
        """Registers to this warpgroup's part of O's buffer, and from there by TMA."""
        out, plan = self.out, self.plan
        if plan.out_direct:
            comment(out, stmt)
            self.statements.copies.store(stmt, plan.loop)
            return
        fragment = plan.base.fragment(stmt.name)
        assert fragment is not None
        ring, panel = self.row_ring, self.row_ring.panel
        tensor = stmt.target or stmt.name
        comment(out, stmt)
        if not plan.out_in_rows:
            out.line("// the previous tile's store has read the buffer")
            out.line('if (leader) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");')
            out.line(f"named_sync({OUT_BARRIER} + consumer, 128);")
        own = WARPGROUP_ROWS * panel.row_bytes
        slot = f" + {ring.name}_count % {ring.stages} * {ring.stage_bytes}"
        slot = slot if plan.out_in_rows else ""
        out.line(f"uint32_t const out_at = {plan.out_offset}{slot} + consumer * {own};")
        out.line("int const out_row = warp % 4 * 16 + (lane & 15);")
        chunk = panel.swizzled(f"n % {panel.chunks} + (lane >> 4)", "out_row")
        at = (
            f"out_at + n / {panel.chunks} * {plan.out_panel_bytes} + "
            f"out_row * {panel.row_bytes} + {chunk} * {CHUNK_BYTES}"
        )
        out.line("#pragma unroll")
        with out.block(f"for (int n = 0; n + 1 < {fragment.n_atoms}; n += 2)"):
            out.line(f"float const(&x)[4] = {stmt.name}[0][n];")
            out.line(f"float const(&y)[4] = {stmt.name}[0][n + 1];")
            out.line("SM90_U32x4_STSM_N::copy(pack(x[0], x[1]), pack(x[2], x[3]),")
            out.line("    pack(y[0], y[1]), pack(y[2], y[3]),")
            out.line(f"    *reinterpret_cast<uint128_t*>(smem + {at}));")
        if fragment.n_atoms % 2:
            with out.block(""):
                out.line(f"int const n = {fragment.n_atoms - 1};")
                out.line(f"float const(&x)[4] = {stmt.name}[0][n];")
                out.line("SM90_U32x2_STSM_N::copy(pack(x[0], x[1]), pack(x[2], x[3]),")
                out.line(f"    *reinterpret_cast<uint128_t*>(smem + {at}));")
        out.line("tma_store_fence();")
        out.line(f"named_sync({OUT_BARRIER} + consumer, 128);")
        with out.block("if (leader && own_row0 < M)"):
            with out.unrolled("panel", panel.count(fragment.columns)):
                place = self.row_coordinates("own_row0")
                out.line(
                    f"SM90_TMA_STORE_{len(place) + 1}D::copy(&map{tensor}, smem + out_at + "
                    f"panel * {plan.out_panel_bytes},"
                )
                out.line(f"    panel * {panel.columns}, {', '.join(place)});")
            out.line("tma_store_arrive();")
        if plan.out_in_rows:
            with out.block("if (leader)"):
                out.line("// the row tile's buffer is free once the store has read it")
                out.line('asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");')
                out.line(f"arrive({ring.empty} + {ring.name}_count % {ring.stages});")
