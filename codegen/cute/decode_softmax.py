"""Online softmax of rows that warps share: one vote an iteration instead of an exchange.

Each warp weighs its keys by the maximum that all agreed on last and writes its part of P. At the
barrier that makes P visible they vote whether any score has grown past that maximum by more than
the threshold. Only then do the maxima go through shared memory, and P is written again.
"""

from __future__ import annotations

from codegen.cute.decode_plan import DecodePlan
from codegen.cute.layout import SharedLayout
from codegen.cute.plan import SoftmaxPlan
from codegen.cute.register_copies import element_row, fragment_of
from codegen.cute.softmax import SoftmaxLowering
from codegen.cute.writer import Writer
from codegen.tl import ast

VOTE = "bool const moved = __syncthreads_or(grown);"


class SharedSoftmax(SoftmaxLowering):
    """The state of a row is held by all its warps, its sum by each for its own keys."""

    def __init__(self, plan: DecodePlan, out: Writer) -> None:
        super().__init__(plan.base, out)
        self.decode = plan
        self._joined: set[str] = set()

    def declare(self) -> None:
        """Declare the running state, and where a row's value of each column warp lies."""
        super().declare()
        out, columns = self.out, self.decode.column_warps
        out.line(
            f"float* const of_row = reinterpret_cast<float*>(smem + {self.decode.exchange_offset}) "
            f"+ (warp * {self.m_atoms * 16} + lane / 4) * {columns};"
        )
        with out.block("auto share = [&](float x, int m, int r)", "};"):
            out.line(f"if (lane % 4 == 0) of_row[(m * 16 + r * 8) * {columns} + column_warp] = x;")

    def weigh(self, s: SoftmaxPlan) -> None:
        """Find the warp's own maxima, and write its part of P by the maximum so far."""
        out, name, base = self.out, s.scores, self.plan
        fragment = fragment_of(base, name)
        layout = SharedLayout(base.rows, fragment.columns * self.decode.column_warps, 0)
        out.line(f"float {name}_top[{self.m_atoms}][2], {name}_part[{self.m_atoms}][2];")
        out.line(f"bool grown = {name}_huge;")
        slack = f" + {name}_slack" if s.threshold else ""
        with out.unrolled("m", self.m_atoms), out.unrolled("r", 2):
            self._top(name, fragment.n_atoms)
            out.line(f"grown |= x > {name}_max[m][r]{slack};")
        out.line("// weights by the maximum so far, rounded to 16 bits for the warps of these rows")
        with (
            out.block(f"auto weigh_{name} = [&]()", "};"),
            out.unrolled("m", self.m_atoms),
            out.unrolled("r", 2),
        ):
            out.line(f"int const row = {element_row(fragment.rows_per_warp, '0')};")
            out.line("float part[2] = {0.f, 0.f};  // two chains of additions")
            with out.unrolled("n", fragment.n_atoms):
                for c, x in enumerate(("low", "high")):
                    power = f"fmaf({name}[m][n][r * 2 + {c}], {name}_log2, -{name}_shift[m][r])"
                    out.line(f"float const {x} = exp2_approx({power});")
                out.line("part[0] += low, part[1] += high;")
                chunk = f"(column_warp * {fragment.n_atoms} + n)"
                at = f"{base.p_offset} + {layout.offset_text('row', chunk)} + (lane & 3) * 4"
                out.line(f"*reinterpret_cast<uint32_t*>(smem + {at}) = pack(low, high);")
            out.line(f"{name}_part[m][r] = part[0] + part[1];")
        out.line(f"weigh_{name}();")

    def settle(self, s: SoftmaxPlan) -> None:
        """After the vote: where a maximum has moved, agree on it, rescale and weigh again."""
        out, name, columns = self.out, s.scores, self.decode.column_warps
        if s.threshold:
            out.line(f"// a maximum may lag by 2^{s.threshold}: the division at the end cancels it")
        with out.block("if (moved)"):
            with out.unrolled("m", self.m_atoms), out.unrolled("r", 2):
                out.line(f"share(quad_max({name}_top[m][r]), m, r);")
            out.line("__syncthreads();")
            with out.unrolled("m", self.m_atoms), out.unrolled("r", 2):
                out.line(f"{name}_top[m][r] = -INFINITY;")
                with out.unrolled("w", columns):
                    at = f"of_row[(m * 16 + r * 8) * {columns} + w]"
                    out.line(f"{name}_top[m][r] = fmaxf({name}_top[m][r], {at});")
            self._new_maximum(s)
            out.line(f"weigh_{name}();")
            out.line("__syncthreads();")
        with out.unrolled("m", self.m_atoms), out.unrolled("r", 2):
            out.line(f"{name}_sum[m][r] += {name}_part[m][r];")

    def _row_top(self, name: str) -> str:
        return f"{name}_top[m][r]"

    def _row_total(self, name: str) -> str:
        return f"{name}_total[m][r]"

    def normalize(self, stmt: ast.Custom) -> None:
        """Divide an accumulator by the row sum over all warps of the row."""
        (arg,) = stmt.args
        assert isinstance(arg, ast.Name)
        self._join(arg.id)
        super().normalize(stmt)

    def log_sum_exp(self, stmt: ast.Custom, target: str) -> None:
        """Natural logarithm of the row's sum of exponentials; minus infinity where it is empty."""
        self._join(stmt.name)
        super().log_sum_exp(stmt, target)

    def _join(self, name: str) -> None:
        """Add up the sums of a row's warps, once and in the same order in each."""
        if name in self._joined:
            return
        self._joined.add(name)
        out, columns = self.out, self.decode.column_warps
        out.line(f"float {name}_total[{self.m_atoms}][2];")
        with out.unrolled("m", self.m_atoms), out.unrolled("r", 2):
            out.line(f"share(quad_sum({name}_sum[m][r]), m, r);")
        out.line("__syncthreads();")
        with out.unrolled("m", self.m_atoms), out.unrolled("r", 2):
            out.line(f"{name}_total[m][r] = 0.f;")
            with out.unrolled("w", columns):
                out.line(f"{name}_total[m][r] += of_row[(m * 16 + r * 8) * {columns} + w];")
