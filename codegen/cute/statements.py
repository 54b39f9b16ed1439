"""How each TL statement becomes CuTe atoms and plain loops over a thread's elements."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from codegen.cute.bias import uses_distance
from codegen.cute.copies import Source
from codegen.cute.expressions import Environment, cxx, float_text
from codegen.cute.gemm import GemmLowering, load_a_fragments
from codegen.cute.masks import POSITIONAL_MASKS, MaskPlan, has_sinks, last_key, tile_of, visible
from codegen.cute.plan import Buffer, KernelPlan, LoopPlan
from codegen.cute.register_copies import (
    RegisterCopies,
    element_row,
    fragment_of,
    tensor_of,
)
from codegen.cute.score_bias import add_bias
from codegen.cute.softmax import SoftmaxLowering
from codegen.cute.structure import mask_kind, number
from codegen.cute.target import Target
from codegen.cute.writer import Writer
from codegen.errors import PlanError
from codegen.tl import ast
from codegen.tl.evaluate import evaluate
from codegen.tl.printer import to_text

LOG2E = "1.44269504089f"

#: elementwise operators: C++ of the result, `x` is the element
ELEMENTWISE = {
    "Relu": "fmaxf({x}, 0.f)",
    "Sigmoid": f"__fdividef(1.f, 1.f + exp2_approx({{x}} * -{LOG2E}))",
    # 1 - 2 / (e^2x + 1) keeps full precision where tanh.approx loses it
    "Tanh": f"1.f - __fdividef(2.f, exp2_approx({{x}} * {2 * 1.44269504089:.11g}f) + 1.f)",
    "Gelu": "0.5f * {x} * (1.f + erff({x} * 0.70710678119f))",
    "Exp": f"exp2_approx({{x}} * {LOG2E})",
    "Exp2": "exp2_approx({x})",
    "Log": "__logf({x})",
    "Neg": "-{x}",
    "Square": "{x} * {x}",
    "Abs": "fabsf({x})",
}
ARITHMETIC = {
    "Add": "{a} + {b}",
    "Subtract": "minus({a}, {b})",
    "Multiply": "{a} * {b}",
    "Divide": "over({a}, {b})",
    "Max": "fmaxf({a}, {b})",
    "Min": "fminf({a}, {b})",
}


def comment(out: Writer, stmt: ast.Stmt, note: str = "") -> None:
    """Write the TL statement that the next lines lower, with its line number when it has one."""
    text = to_text(stmt).strip().splitlines()[0]
    where = f" {stmt.span.line}" if stmt.span.line else ""
    out.line(f"// TL{where}: {text}" + (f"  ({note})" if note else ""))


class Statements:
    """Lowers the statements of one kernel; holds no state but the plan and the writer."""

    def __init__(self, plan: KernelPlan, target: Target, out: Writer) -> None:
        self.plan, self.target, self.out = plan, target, out
        self.gemms = GemmLowering(plan, out)
        self.softmaxes = SoftmaxLowering(plan, out)
        self.environment: Environment = {}
        self.copies = RegisterCopies(plan, target, out)

    # ---- declarations --------------------------------------------------------------------------

    def declare(self) -> None:
        """Declare register tiles, row vectors and per-lane addresses."""
        for name, f in self.plan.fragments:
            self.out.line(f"float {name}[{f.m_atoms}][{f.n_atoms}][4];")
        m_atoms = self.plan.rows // self.plan.warps // 16
        for name in self.plan.row_vectors:
            self.out.line(f"float {name}[{m_atoms}][2];")
        self.gemms.declare()
        self.softmaxes.declare()

    def define_copy(self, stmt: ast.Copy, buffer: Buffer, var: str | None) -> None:
        """Define the lambdas that copy a tile; `var` is the loop variable its index stands for."""
        tensor = tensor_of(self.plan, stmt)
        environment = dict(self.environment)
        if var:
            environment[var] = self._tile_of_step(var)
        rows = number(stmt.shape[0])
        first_column = columns = ""
        for coord in stmt.coords[1:]:
            if coord.axis == "D":
                first_column = f"({cxx(coord.index, environment)}) * {number(stmt.shape[1])}"
                columns = str(tensor.columns)
        source = Source(
            base=f"g{tensor.name}",
            first_row=f"({cxx(stmt.coords[0].index, environment)}) * {rows}",
            stride=f"{tensor.name}_stride_s",
            first_column=first_column,
            rows="M" if tensor.rows is ast.Rows.QUERY else "N",
            columns=columns,
        )
        self.target.define_copy(self.out, buffer, self.plan.threads, source)

    def _tile_of_step(self, var: str) -> str:
        """C++ for the key tile at step `index` of the loop over `var`."""
        loop = next(p for p in self.plan.loops if p.var == var)
        return tile_of(loop.masks, var, "index")

    def load_a_fragments(self, name: str) -> None:
        """Read a row tile from shared memory into A operands."""
        load_a_fragments(self.plan, self.out, name)

    # ---- loops and masks -----------------------------------------------------------------------

    def loop_bounds(
        self, loop: LoopPlan, row0: str = "row0", rows: int = 0, suffix: str = ""
    ) -> None:
        """Declare `i_lo`, `i_hi` and, with masks, `i_full`: tiles below it are fully visible.

        They hold for `rows` rows from `row0` on (the whole block unless said); `suffix` ends their
        names.
        """
        out, var, rows = self.out, loop.var, rows or self.plan.queries
        if not loop.key_tiles:
            out.line(f"int const {var}_lo{suffix} = {cxx(loop.lo, self.environment, bound=True)};")
            out.line(f"int const {var}_hi{suffix} = {cxx(loop.hi, self.environment, bound=True)};")
            return
        low, keys, whole = visible(loop.masks, row0, rows, loop.columns)
        if has_sinks(loop.masks):
            self._bounds_with_sinks(loop, low, keys, whole, suffix)
            return
        if loop.hi == ast.Name("split_end"):
            out.line(f"int const tiles = ceil_div({keys}, {loop.columns});")
            out.line("int const tiles_per_split = ceil_div(tiles, splits);")
            out.line(f"int const {var}_lo = split * tiles_per_split;")
            out.line(f"int const {var}_hi = min(tiles, {var}_lo + tiles_per_split);")
        else:
            out.line(f"int const {var}_lo{suffix} = {low};")
            out.line(f"int const {var}_hi{suffix} = ceil_div({keys}, {loop.columns});")
        if loop.masks:
            out.line(
                f"int const {var}_full{suffix} = min({var}_hi{suffix}, {whole} / {loop.columns});"
            )

    def _bounds_with_sinks(
        self, loop: LoopPlan, low: str, keys: str, whole: str, suffix: str
    ) -> None:
        """Bounds of a loop over the tiles of the first keys and then those of the window.

        Step t stands at tile t, or at t + `i_jump` behind the `i_sinks` tiles of the first keys;
        `i_full` counts tiles, not steps. Fewer rows keep the block's jump: its tiles are shared.
        """
        out, var, columns = self.out, loop.var, loop.columns
        if loop.hi == ast.Name("split_end"):
            raise PlanError("a window with sinks cannot be split over the keys; drop the splits")
        end = f"ceil_div({keys}, {columns})"
        if not suffix:
            sinks = next(m.window.sinks for m in loop.masks if m.window and m.window.sinks)
            out.line(f"int const {var}_sinks = min(ceil_div({sinks}, {columns}), {end});")
            out.line(f"int const {var}_jump = max(0, {low} - {var}_sinks);")
            out.line(f"int const {var}_lo = 0;")
        out.line(f"int const {var}_hi{suffix} = max({var}_sinks, {end} - {var}_jump);")
        out.line(f"int const {var}_full{suffix} = {whole} / {columns};")

    def declare_diagonal(self) -> None:
        """Declare how far row r sees: keys up to r + diagonal."""
        masked = any(m.causal or m.window for p in self.plan.loops for m in p.masks)
        if masked or uses_distance(self.plan.kernel):
            self.out.line(
                "int const diagonal = N - M;  // bottom-right: row r sees keys up to r + this"
            )

    def is_mask(self, stmt: ast.Stmt, mask: MaskPlan) -> bool:
        """Whether `stmt` is a position mask of the tile that `mask` covers."""
        return (
            isinstance(stmt, ast.Custom)
            and (stmt.op, stmt.name) == ("Mask", mask.scores)
            and mask_kind(stmt) in POSITIONAL_MASKS
        )

    def mask(
        self,
        loop: LoopPlan,
        mask: MaskPlan,
        stmt: ast.Stmt | None,
        always: bool,
        own: tuple[str, int, str] | None = None,
    ) -> None:
        """Mask the scores of tile `i`: keys past N, after the diagonal or outside the window.

        `own` gives (first row, rows, suffix) when the loop's bounds are those of fewer rows.
        """
        out, var = self.out, loop.var
        fragment = fragment_of(self.plan, mask.scores)
        if stmt is not None:
            comment(out, stmt)
        out.line(f"// keys of tile {var} that a row must not see")
        row0, rows, suffix = own or ("row0", self.plan.queries, "")
        tile = tile_of(loop.masks, var, var)
        touched = f"{tile} >= {var}_full{suffix}"
        if mask.window:
            touched += (
                f" || {tile} * {loop.columns} < {row0} + {rows} - 1 + diagonal - {mask.window.left}"
            )
        with (
            out.block("" if always else f"if ({touched})"),
            out.unrolled("m", fragment.m_atoms),
            out.unrolled("r", 2),
        ):
            row = element_row(fragment.rows_per_warp, "row0", self.plan.pack_heads)
            out.line(f"int const row = {row};")
            first = f"{tile} * {loop.columns} + (lane & 3) * 2"
            out.line(f"int const last = {last_key(mask, 'row', 'N - 1')} - ({first});")
            test = "n * 8 + c > last"
            if mask.window:
                out.line(f"int const first = row + diagonal - {mask.window.left} - ({first});")
                test += " || n * 8 + c < first"
            if mask.window and mask.window.sinks:
                out.line(f"int const kept = {mask.window.sinks} - ({first});")
                test = "n * 8 + c > last || (n * 8 + c < first && n * 8 + c >= kept)"
            with out.unrolled("n", fragment.n_atoms), out.unrolled("c", 2):
                out.line(f"if ({test}) {mask.scores}[m][n][r * 2 + c] = {mask.fill};")

    # ---- statements ----------------------------------------------------------------------------

    def reads_shared(self, stmt: ast.Stmt) -> bool:
        """Whether a statement reads a shared tile."""
        if isinstance(stmt, ast.Gemm):
            return True
        return isinstance(stmt, ast.Copy) and stmt.src is ast.Memory.SHARED

    def emit(self, stmt: ast.Stmt, inside: LoopPlan | None) -> None:
        """Lower one statement. Raises PlanError when this back end has no lowering for it."""
        if (
            isinstance(stmt, ast.Custom)
            and stmt.op == "Mask"
            and mask_kind(stmt) in POSITIONAL_MASKS
        ):
            return  # planned: `mask` places it
        comment(self.out, stmt)
        if isinstance(stmt, ast.Gemm):
            self.gemms.gemm(stmt, inside)
        elif isinstance(stmt, ast.Reshape):
            self.gemms.reshape(stmt)
        elif isinstance(stmt, ast.Copy):
            self._copy(stmt, inside)
        elif isinstance(stmt, ast.Arith):
            b = stmt.b if isinstance(stmt.b, str) else float_text(stmt.b)
            self._arithmetic(stmt.op, stmt.a, b, stmt.out)
        elif isinstance(stmt, ast.Custom):
            self._custom(stmt, inside)
        elif isinstance(stmt, ast.If):
            self._branch(stmt, inside)
        else:
            raise PlanError(f"no lowering for {to_text(stmt).strip()}")

    def _branch(self, stmt: ast.If, inside: LoopPlan | None) -> None:
        with self.out.block(f"if ({cxx(stmt.condition, self.environment)})"):
            for s in stmt.body:
                self.emit(s, inside)
        if stmt.orelse:
            with self.out.block("else"):
                for s in stmt.orelse:
                    self.emit(s, inside)

    def _custom(self, stmt: ast.Custom, inside: LoopPlan | None) -> None:
        target = stmt.out or stmt.name
        if stmt.op == "Mask":
            loop = next(p for p in self.plan.loops if stmt in p.body)
            add_bias(self.plan, self.out, stmt, loop)
        elif stmt.op == "Softmax":
            self.softmaxes.step(self.plan.softmax(stmt.name))
        elif stmt.op == "Normalize":
            self.softmaxes.normalize(stmt)
        elif stmt.op == "LogSumExp":
            self.softmaxes.log_sum_exp(stmt, target)
        elif stmt.op == "Scale":
            self._scale(stmt)
        elif stmt.op == "Fill":
            value = stmt.args[0]
            assert isinstance(value, ast.Num)
            text = "-INFINITY" if value.value == float("-inf") else f"{value.value:.9g}f"
            text = text if "." in text or "I" in text or "e" in text else text.replace("f", ".f")
            self._each(stmt.name, lambda _: text, target)
        elif stmt.op == "Softcap":
            cap = stmt.args[0]
            number = evaluate(cap, {})  # by the rules of TL: C++ divides whole numbers down
            c = cxx(cap, self.environment) if number is None else float_text(number)
            tanh = ELEMENTWISE["Tanh"]
            self._each(stmt.name, lambda x: f"{c} * ({tanh.format(x=f'({x} / {c})')})", target)
        elif stmt.op in ("RowMax", "RowSum"):
            self._reduce(stmt.op, stmt.name, target)
        elif stmt.op in ARITHMETIC:
            b = stmt.args[0]
            self._arithmetic(stmt.op, stmt.name, cxx(b, self.environment), target)
        elif stmt.op in ELEMENTWISE:
            self._each(stmt.name, lambda x: ELEMENTWISE[stmt.op].format(x=x), target)
        else:
            raise PlanError(f"no lowering for {to_text(stmt).strip()}")

    def _scale(self, stmt: ast.Custom) -> None:
        factor = cxx(stmt.args[0], self.environment)
        folded = [s for s in self.plan.softmaxes if s.scores == stmt.name and s.scale_folded]
        if not folded:
            self._each(stmt.name, lambda x: f"{x} * {factor}", stmt.name)
            return
        self.out.line(
            "// the factor is part of the softmax's exponent; only its sign is applied here"
        )
        with self.out.block(f"if ({factor} < 0.f)"):
            self._each(stmt.name, lambda x: f"-{x}", stmt.name)

    # ---- elements ------------------------------------------------------------------------------

    def _is_vector(self, name: str) -> bool:
        return name in self.plan.row_vectors

    def _element(self, name: str, vector: bool) -> str:
        """C++ for the element of `name` that belongs to the loop's (m, n, e) or (m, r)."""
        if self._is_vector(name):
            return f"{name}[m][r]" if vector else f"{name}[m][e >> 1]"
        if self.plan.fragment(name) is not None:
            return f"{name}[m][n][e]"
        return name

    def _each(self, name: str, value: Callable[[str], str], target: str) -> None:
        """Assign `value(element)` to every element of `target`."""
        vector = self._is_vector(target)
        with self._elements(target, vector):
            self.out.line(
                f"{self._element(target, vector)} = {value(self._element(name, vector))};"
            )

    def _arithmetic(self, op: str, a: str, b: str, target: str) -> None:
        vector = self._is_vector(target)
        if vector and (self.plan.fragment(a) or self.plan.fragment(b)):
            raise PlanError(f"{op} {a}, {b} gives a tile, and {target} is a row vector")
        with self._elements(target, vector):
            left, right = self._element(a, vector), self._element(b, vector)
            text = ARITHMETIC[op].format(a=left, b=right)
            self.out.line(f"{self._element(target, vector)} = {text};")

    def _elements(self, name: str, vector: bool) -> ExitStack:
        """Loops over the elements of a tile, or of a row vector."""
        stack = ExitStack()
        if vector:
            stack.enter_context(self.out.unrolled("m", self.plan.rows // self.plan.warps // 16))
            stack.enter_context(self.out.unrolled("r", 2))
        else:
            fragment = fragment_of(self.plan, name)
            stack.enter_context(self.out.unrolled("m", fragment.m_atoms))
            stack.enter_context(self.out.unrolled("n", fragment.n_atoms))
            stack.enter_context(self.out.unrolled("e", 4))
        return stack

    def _reduce(self, op: str, name: str, target: str) -> None:
        fragment = fragment_of(self.plan, name)
        out = self.out
        join = "fmaxf(x, {y})" if op == "RowMax" else "x + {y}"
        quad = "quad_max" if op == "RowMax" else "quad_sum"
        with out.unrolled("m", fragment.m_atoms), out.unrolled("r", 2):
            out.line(f"float x = {'-INFINITY' if op == 'RowMax' else '0.f'};")
            with out.unrolled("n", fragment.n_atoms), out.unrolled("c", 2):
                out.line(f"x = {join.format(y=f'{name}[m][n][r * 2 + c]')};")
            out.line(f"{target}[m][r] = {quad}(x);")

    # ---- copies to and from registers ----------------------------------------------------------

    def _copy(self, stmt: ast.Copy, inside: LoopPlan | None) -> None:
        if stmt.src is None:
            self._each(stmt.name, lambda x: x, stmt.target or stmt.name)
        elif (stmt.src, stmt.dst) == (ast.Memory.SHARED, ast.Memory.REGISTER):
            self.load_a_fragments(stmt.name)
        elif (stmt.src, stmt.dst) == (ast.Memory.REGISTER, ast.Memory.GLOBAL):
            self.copies.store(stmt, inside)
        elif (stmt.src, stmt.dst) == (ast.Memory.GLOBAL, ast.Memory.REGISTER):
            self.copies.load(stmt)
        else:
            raise PlanError(f"no lowering for {to_text(stmt).strip()}")
