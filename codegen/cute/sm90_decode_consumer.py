"""The consumers of a Hopper decode kernel: rows, scores, softmax, products.

The owner publishes P and its rows' maxima through shared memory, each thread for the thread of the
follower with the same place in the fragment, so that the follower rescales and multiplies alike.
"""

from __future__ import annotations

from codegen.cute.masks import MaskPlan, last_key
from codegen.cute.panel import Panel
from codegen.cute.plan import LoopPlan
from codegen.cute.pointwise import START_KERNEL_BEHIND
from codegen.cute.sm90_decode_join import ClusterJoin
from codegen.cute.sm90_decode_plan import DecodePlan, Part
from codegen.cute.sm90_decode_rows import STEPS, hold_rows, load_rows
from codegen.cute.sm90_decode_store import OWN_BARRIER, STEP, ResultStore
from codegen.cute.statements import comment
from codegen.cute.wgmma import product_name
from codegen.cute.wgmma_statements import NoCopies, WgmmaStatements
from codegen.cute.writer import Writer
from codegen.errors import PlanError
from codegen.tl import ast
from space.decode import ROW_BYTES
from space.hopper import WARPGROUP_ROWS
from space.tiles import CHUNK_BYTES

#: named barriers of the exchange of P
P_FULL, P_EMPTY = 3, 4


class DecodeConsumer:
    """Writes what the owner and, of absorbed MLA, the follower do."""

    def __init__(self, plan: DecodePlan, out: Writer) -> None:
        self.plan, self.out = plan, out
        self.statements = WgmmaStatements(plan.base, NoCopies(), out)
        self.results = ResultStore(plan, out)
        self.join = ClusterJoin(plan, out) if plan.split_cluster > 1 else None
        self.var = plan.loop.var
        self.p = plan.product.a.name
        self.queries = plan.scores.a.name

    def write(self) -> None:
        out, plan = self.out, self.plan
        if plan.consumers > 1:
            out.line(f"registers_up<{plan.consumer_registers}>();")
        out.line("int const tid = threadIdx.x % 128, lane = tid & 31, warp = tid >> 5;")
        out.line("bool const leader = tid == 0;  // arrives for its warpgroup")
        load_rows(plan, out, self.queries)
        if plan.consumers == 1:
            self._owner()
        else:
            with out.block("if (warpgroup == 0)"):
                self._owner()
            with out.block("else"):
                self._follower()
        if self.join:
            self.join.write()
            if not plan.combine_early:
                out.line(START_KERNEL_BEHIND)

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
        if plan.q_panels:
            hold_rows(plan, out, self.queries)
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
            steps = -(-plan.head_dim // STEP)
            for n, part in enumerate(parts):
                first = part.first_panel * STEPS
                end = min(first + part.panels * STEPS, steps)
                out.line(f"wait({part.barrier} + slot, scored / {plan.stages} & 1);")
                out.line("warpgroup_fence();")
                held = min(max(plan.first_held * STEPS, first), end)
                for lo, hi, in_registers in ((first, held, False), (held, end, True)):
                    if lo == hi:
                        continue
                    name = product_name(plan.keys, in_registers, False)
                    a = f"a + (panel * {q_panel} + within) / 16"
                    a = f"{self.queries}_r[k - {plan.first_held * STEPS}]" if in_registers else a
                    keep = f"k > {first}" if n == 0 and lo == first else "1"
                    with out.unrolled("k", hi, lo):
                        out.line("int const panel = k / 4, within = k % 4 * 32;")
                        at = f"b + (panel * {part.panel_bytes} + within) / 16"
                        out.line(f"{name}({stmt.out}, {a}, {at}, {keep});")
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
            step = 2 * Panel().core_bytes // 16  # 16 rows down a panel
            with out.unrolled("k", plan.keys // STEP):
                out.line(f"{name}({stmt.out}, {self.p}_a[0][k], b + k * {step}, 1);")
            out.line("warpgroup_commit();")

    def _clear_tail(self, consumer: int, part: Part, tile: str) -> None:
        """Zero rows of V past the sequence's end: the cache may hold anything there, NaN too."""
        out, plan = self.out, self.plan
        partly = f"({tile} + 1) * {plan.keys} > keys"
        with out.block(f"if ({partly})" if plan.page else f"if (keys < N && {partly})"):
            out.line(f"int const left = keys - ({tile}) * {plan.keys};")
            out.line("#pragma unroll 1")
            with out.block(f"for (int at = tid; at < {plan.keys * part.panels * 8}; at += 128)"):
                out.line(f"int const r = at % {plan.keys}, chunk = at / {plan.keys};")
                out.line(
                    f"if (r >= left) chunk_at(values_at + chunk / 8 * {part.panel_bytes} + "
                    f"r * {ROW_BYTES} + chunk % 8 * {CHUNK_BYTES}) = uint128_t{{}};"
                )
            out.line("visible_to_async();")
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
        self.statements.before_rescale = self._wait_product if in_flight else None
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
            self._let_go(0)
        stmt = body[reshape]
        comment(out, stmt)
        self.statements.gemms.pack(self.p, False)

    def _wait_product(self) -> None:
        self.out.line("warpgroup_wait<0>();")
        self.out.line(f"hold({self.plan.product.out});")

    def _mask(self, loop: LoopPlan, mask: MaskPlan, stmt: ast.Stmt | None) -> None:
        """Mask scores of a tile: keys past the sequence, past the diagonal, out of a window."""
        out, var, plan = self.out, self.var, self.plan
        if stmt is not None:
            comment(out, stmt)
        out.line(f"// keys of tile {var} that a row must not see")
        touched = f"{var} >= {var}_full"
        if mask.window:
            first_query = f"(row0 + {WARPGROUP_ROWS} - 1) / group"
            touched += f" || {var} * {plan.keys} < {first_query} + diagonal - {mask.window.left}"
            touched += (
                f" || ({var} + 1) * {plan.keys} > row0 / group + diagonal + {mask.window.right}"
            )
        with out.block(f"if ({touched})"), out.unrolled("r", 2):
            first = f"{var} * {plan.keys} + (lane & 3) * 2"
            if mask.causal or mask.window:
                out.line(f"int const query = (row0 + warp * {STEP} + r * 8 + lane / 4) / group;")
            out.line(f"int const last = {last_key(mask, 'query', 'keys - 1')} - ({first});")
            test = "n * 8 + c > last"
            if mask.window:
                out.line(f"int const first = query + diagonal - {mask.window.left} - ({first});")
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
            grown = "if (__any_sync(~0u, high.x != top[0] || high.y != top[1]))"
            with out.block(grown), out.unrolled("r", 2):
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

    # ---- end of the keys -----------------------------------------------------------------------

    def _finish(self, consumer: int) -> None:
        """Normalise, and store: the output itself, or this split's part of it and its sum."""
        out, plan = self.out, self.plan
        name = plan.product.out
        if plan.combine_early:
            out.line(START_KERNEL_BEHIND)
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
        if self.join:
            self.join.leave(consumer)
            return
        for stmt in plan.after:
            if isinstance(stmt, ast.Copy):
                self.results.store(stmt, consumer)
        if not plan.combine_early:
            out.line(START_KERNEL_BEHIND)

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
