"""Lowering of the online softmax: running maximum, exponentials, rescale, normalisation."""

from __future__ import annotations

from collections.abc import Callable

from codegen.cute.plan import KernelPlan, SoftmaxPlan
from codegen.cute.writer import Writer
from codegen.errors import PlanError
from codegen.tl import ast

LOG2E = "1.44269504089f"
LN2 = "0.69314718056f"
#: past this exponent the rounding of max * scale alone could overflow 2^x
HUGE = "1048576.f"


class SoftmaxLowering:
    """The state of a softmax over S is S_max, S_shift and S_sum, two rows an atom and lane."""

    def __init__(self, plan: KernelPlan, out: Writer) -> None:
        self.plan, self.out = plan, out
        self.m_atoms = plan.rows // plan.warps // 16

    def declare(self) -> None:
        """Declare and clear the running state of every softmax."""
        out = self.out
        for s in self.plan.softmaxes:
            name = s.scores
            if s.scale_folded:
                out.line("// 2^(S * log2): a scale of 0 must not turn masked scores into NaN")
                out.line(f"float const {name}_log2 = fmaxf(fabsf(scale), 1e-37f) * {LOG2E};")
            else:
                out.line(f"float const {name}_log2 = {LOG2E};")
            states = [("max", "-INFINITY"), ("shift", "0.f"), ("sum", "0.f")]
            if s.threshold:
                out.line(f"float const {name}_slack = {s.threshold}.f / {name}_log2;")
            names = ", ".join(f"{name}_{state}[{self.m_atoms}][2]" for state, _ in states)
            out.line(f"float {names};")
            out.line(f"bool {name}_huge = false;")
            with out.unrolled("m", self.m_atoms), out.unrolled("r", 2):
                for state, value in states:
                    out.line(f"{name}_{state}[m][r] = {value};")

    def step(
        self,
        s: SoftmaxPlan,
        before_rescale: Callable[[], None] | None = None,
        after_vote: Callable[[], None] | None = None,
    ) -> None:
        """One online step: S becomes 2^(S * log2 - shift); accumulators follow a new maximum.

        `before_rescale` writes what must happen before an accumulator may be touched, and
        `after_vote` what happens whether or not one was, before the exponentials.
        """
        out, name = self.out, s.scores
        fragment = self.plan.fragment(name)
        if fragment is None:
            raise PlanError(f"softmax over {name}, which is not a tile in registers")
        out.line(f"float {name}_top[{self.m_atoms}][2];")
        if s.threshold:
            out.line(f"bool grown = {name}_huge;")
        with out.unrolled("m", self.m_atoms), out.unrolled("r", 2):
            if s.integer_max:
                self._integer_top(name, fragment.n_atoms)
            else:
                self._top(name, fragment.n_atoms)
                if s.threshold:
                    out.line(f"grown |= x > {name}_max[m][r] + {name}_slack;")
        if s.threshold:
            out.line(f"// a maximum may lag by 2^{s.threshold}: the division at the end cancels it")
            out.line("bool const moved = __any_sync(~0u, grown);")
        with out.block("if (moved)" if s.threshold else ""):
            if before_rescale is not None:
                before_rescale()
            self._new_maximum(s)
        if after_vote is not None:
            after_vote()
        with out.unrolled("m", self.m_atoms), out.unrolled("r", 2):
            out.line("float part[2] = {0.f, 0.f};  // two chains of additions")
            with out.unrolled("n", fragment.n_atoms), out.unrolled("c", 2):
                out.line(f"float& x = {name}[m][n][r * 2 + c];")
                power = f"fmaf(x, {name}_log2, -{name}_shift[m][r])"
                if s.fma_share:
                    on_fma = f"(n * 2 + c) % {s.fma_share} == {s.fma_share - 1}"
                    out.line(f"x = {on_fma} ? exp2_fma({power}) : exp2_approx({power});")
                else:
                    out.line(f"x = exp2_approx({power});")
                out.line("part[c] += x;")
            out.line(f"{name}_sum[m][r] += part[0] + part[1];")

    def _top(self, name: str, n_atoms: int) -> None:
        """The lane's own maximum of a row."""
        out = self.out
        out.line(f"float x = fmaxf({name}[m][0][r * 2], {name}[m][0][r * 2 + 1]);")
        with out.unrolled("n", n_atoms, 1):
            out.line(f"x = fmaxf(x, fmaxf({name}[m][n][r * 2], {name}[m][n][r * 2 + 1]));")
        out.line(f"{name}_top[m][r] = x;")

    def _integer_top(self, name: str, n_atoms: int) -> None:
        """The same by integer comparison, three at a time: right where the maximum is positive.

        Where the limit is not positive the comparison says nothing, and the branch that follows
        takes the exact maximum.
        """
        out = self.out
        out.line(f"int x = __float_as_int({name}[m][0][r * 2]);")
        out.line(f"int y = __float_as_int({name}[m][0][r * 2 + 1]);")
        with out.unrolled("n", n_atoms, 1):
            out.line("int& z = n & 1 ? x : y;  // two chains")
            bits = [f"__float_as_int({name}[m][n][r * 2 + {c}])" for c in (0, 1)]
            out.line(f"z = max(max(z, {bits[0]}), {bits[1]});")
        out.line(f"float const limit = {name}_max[m][r] + {name}_slack;")
        out.line("grown |= !(__int_as_float(max(x, y)) <= limit && limit > 0.f);")

    def _row_top(self, name: str) -> str:
        """C++ for the maximum of row (m, r) of this tile."""
        return f"quad_max({name}_top[m][r])"

    def _row_total(self, name: str) -> str:
        """C++ for the sum of row (m, r) of all tiles."""
        return f"quad_sum({name}_sum[m][r])"

    def _new_maximum(self, s: SoftmaxPlan) -> None:
        out, name = self.out, s.scores
        out.line("bool huge = false;")
        with out.unrolled("m", self.m_atoms), out.unrolled("r", 2):
            if s.integer_max:
                fragment = self.plan.fragment(name)
                assert fragment is not None
                self._top(name, fragment.n_atoms)
            out.line(f"float const high = fmaxf({name}_max[m][r], {self._row_top(name)});")
            out.line(
                "float const decay = high == -INFINITY ? 1.f : "
                f"exp2_approx(({name}_max[m][r] - high) * {name}_log2);"
            )
            out.line(f"{name}_max[m][r] = high;")
            out.line(f"{name}_shift[m][r] = high == -INFINITY ? 0.f : high * {name}_log2;")
            out.line(f"huge |= fabsf({name}_shift[m][r]) > {HUGE};")
            out.line(f"{name}_sum[m][r] *= decay;")
            for accumulator in s.accumulators:
                fragment = self.plan.fragment(accumulator)
                assert fragment is not None
                with out.unrolled("n", fragment.n_atoms):
                    out.line(f"{accumulator}[m][n][r * 2] *= decay;")
                    out.line(f"{accumulator}[m][n][r * 2 + 1] *= decay;")
        out.line(f"{name}_huge = __any_sync(~0u, huge);")
        fragment = self.plan.fragment(name)
        assert fragment is not None
        with out.block(f"if ({name}_huge)"):
            out.line("// products this large are not exact: subtract first")
            with out.unrolled("m", self.m_atoms), out.unrolled("r", 2):
                out.line(
                    f"float const high = {name}_max[m][r] == -INFINITY ? 0.f : {name}_max[m][r];"
                )
                out.line(f"{name}_shift[m][r] = 0.f;")
                with out.unrolled("n", fragment.n_atoms), out.unrolled("c", 2):
                    out.line(f"{name}[m][n][r * 2 + c] -= high;")

    def normalize(self, stmt: ast.Custom) -> None:
        """Divide an accumulator by the row sum; a row that saw nothing is 0."""
        (arg,) = stmt.args
        assert isinstance(arg, ast.Name)
        out, scores, name = self.out, arg.id, stmt.name
        fragment = self.plan.fragment(name)
        if fragment is None:
            raise PlanError(f"{name} is not a tile in registers")
        with out.unrolled("m", self.m_atoms), out.unrolled("r", 2):
            out.line(f"float const total = {self._row_total(scores)};")
            out.line("float const inverse = total == 0.f ? 0.f : 1.f / total;")
            with out.unrolled("n", fragment.n_atoms):
                out.line(f"{name}[m][n][r * 2] *= inverse;")
                out.line(f"{name}[m][n][r * 2 + 1] *= inverse;")

    def log_sum_exp(self, stmt: ast.Custom, target: str) -> None:
        """Natural logarithm of the row's sum of exponentials; minus infinity where it is empty."""
        out, scores = self.out, stmt.name
        with out.unrolled("m", self.m_atoms), out.unrolled("r", 2):
            out.line(f"float const total = {self._row_total(scores)};")
            out.line(
                f"{target}[m][r] = total == 0.f ? -INFINITY : "
                f"({scores}_max[m][r] * {scores}_log2 + log2f(total)) * {LN2};"
            )
