"""Statements of a decode kernel: packed rows, a sequence's own keys, pages, one split's results."""

from __future__ import annotations

from codegen.cute.decode_gemm import DecodeGemm
from codegen.cute.decode_plan import DecodePlan
from codegen.cute.decode_softmax import SharedSoftmax
from codegen.cute.expressions import cxx
from codegen.cute.masks import MaskPlan, last_key
from codegen.cute.plan import Buffer, LoopPlan
from codegen.cute.pointwise import packed_row
from codegen.cute.register_copies import element_row, fragment_of, tensor_of
from codegen.cute.row_copies import Gathered
from codegen.cute.statements import Statements, comment
from codegen.cute.structure import number
from codegen.cute.target import Target
from codegen.cute.writer import Writer
from codegen.errors import PlanError
from codegen.tl import ast


class DecodeStatements(Statements):
    """Lowers the statements of one `partial` kernel."""

    def __init__(self, plan: DecodePlan, target: Target, out: Writer) -> None:
        super().__init__(plan.base, target, out)
        self.decode = plan
        self.gemms = DecodeGemm(plan, out)
        self.shared = SharedSoftmax(plan, out) if plan.shared else None
        if self.shared is not None:
            self.softmaxes = self.shared

    # ---- copies to shared memory -----------------------------------------------------------------

    def define_copy(self, stmt: ast.Copy, buffer: Buffer, var: str | None) -> None:
        """Define the lambdas that copy a tile; `var` is the loop variable its index stands for."""
        if any(c.axis == "D" for c in stmt.coords):
            raise PlanError(f"{stmt.name} is tiled along its columns; decode loads whole rows")
        tensor = tensor_of(self.plan, stmt)
        if tensor.rows is ast.Rows.QUERY:
            source = self._packed(tensor.name)
        else:
            environment = {**self.environment, **({var: "index"} if var else {})}
            rows = number(stmt.shape[0])
            first = f"({cxx(stmt.coords[0].index, environment)}) * {rows}"
            source = self._keys(tensor.name, first, rows)
        self.target.define_copy(self.out, buffer, self.decode.threads, source)

    def _packed(self, name: str) -> Gathered:
        """Row r is query r / group of the KV head's query head r % group."""
        return Gathered(
            (),
            (
                "int const packed = row0 + row;",
                "bool const valid = packed < rows;",
                f"auto const start = g{name} + {packed_row(name, 'packed', 'batch')} + chunk * 8;",
            ),
        )

    def _keys(self, name: str, first: str, rows: int) -> Gathered:
        """Key j is row j of its sequence, or row j % page of page table[j / page].

        A tile that lies in one page looks it up once. Rows past the sequence's end are zero,
        whatever memory holds there.
        """
        page = self.plan.problem.page
        key = f"uint32_t const key = {first} + row;"
        valid = "bool const valid = key < uint32_t(keys);"
        if not page:
            at = f"int64_t(key) * {name}_stride_s"
            return Gathered((), (key, valid, f"auto const start = g{name} + {at} + chunk * 8;"))
        at = f"page * {name}_stride_b + key % {page} * {name}_stride_s"
        start = f"auto const start = g{name} + {at} + chunk * 8;"
        lookup = "int64_t const page = {guard} ? __ldg(table + {key}) : 0;"
        if page % rows == 0:
            one = lookup.format(guard=f"{first} < keys", key=f"uint32_t({first}) / {page}")
            return Gathered((one,), (key, valid, start))
        return Gathered((), (key, valid, lookup.format(guard="valid", key=f"key / {page}"), start))

    # ---- loop and masks --------------------------------------------------------------------------

    def bounds(self) -> None:
        """Declare the split's tiles: `i_lo`, `i_hi`, and `i_full`, below which all are seen."""
        out, loop = self.out, self.decode.loop
        var, columns = loop.var, loop.columns
        whole = "keys"
        if any(m.causal for m in loop.masks):
            whole = "min(keys, max(0, row0 / group + diagonal + 1))"
        out.line(f"int const tiles = ceil_div(keys, {columns});")
        out.line("int const tiles_per_split = ceil_div(tiles, splits);")
        out.line(f"int const {var}_lo = split * tiles_per_split;")
        out.line(f"int const {var}_hi = min(tiles, {var}_lo + tiles_per_split);")
        out.line(f"int const {var}_full = min({var}_hi, {whole} / {columns});")

    def declare_diagonal(self) -> None:
        """Declare how far query i of this sequence sees: keys up to i + diagonal."""
        if any(m.causal for m in self.decode.loop.masks):
            self.out.line(
                "int const diagonal = keys - M;  // bottom-right: query i sees keys up to i + this"
            )

    def mask(
        self,
        loop: LoopPlan,
        mask: MaskPlan,
        stmt: ast.Stmt | None,
        always: bool,
        own: tuple[str, int, str] | None = None,
    ) -> None:
        """Mask the scores of tile `i`: keys past the sequence's end or after the diagonal."""
        out, var = self.out, loop.var
        fragment = fragment_of(self.plan, mask.scores)
        if stmt is not None:
            comment(out, stmt)
        out.line(f"// keys of tile {var} that a row must not see")
        first = f"{var} * {loop.columns} + (lane & 3) * 2"
        if self.decode.shared:
            first += f" + column_warp * {fragment.columns}"
        with (
            out.block("" if always else f"if ({var} >= {var}_full)"),
            out.unrolled("m", fragment.m_atoms),
            out.unrolled("r", 2),
        ):
            if mask.causal:
                row = element_row(fragment.rows_per_warp, "row0")
                out.line(f"int const row = {row};")
            last = last_key(mask, "row / group", "keys - 1")
            out.line(f"int const last = {last} - ({first});")
            with out.unrolled("n", fragment.n_atoms), out.unrolled("c", 2):
                score = f"{mask.scores}[m][n][r * 2 + c]"
                out.line(f"if (n * 8 + c > last) {score} = {mask.fill};")

    # ---- results ---------------------------------------------------------------------------------

    def store(self, stmt: ast.Copy) -> None:
        """Write a result of this split; with one split the output itself, and no row vector."""
        tensor, out = tensor_of(self.plan, stmt), self.out
        comment(out, stmt)
        if not tensor.workspace:
            raise PlanError(
                f"{tensor.name} is no workspace; a decode kernel stores partial results"
            )
        if stmt.name in self.plan.row_vectors:
            self._store_vector(stmt.name, tensor)
            return
        fragment = fragment_of(self.plan, stmt.name)
        column = "(lane & 3) * 2"
        if self.decode.shared:
            column += f" + column_warp * {fragment.columns}"
        columns = tensor.columns
        with out.unrolled("m", fragment.m_atoms), out.unrolled("r", 2):
            out.line(f"int const row = {element_row(fragment.rows_per_warp, 'row0')};")
            low, high = (f"{stmt.name}[m][n][r * 2 + {c}]" for c in (0, 1))
            with out.block("if (row < rows && splits == 1)"):
                whole = self.decode.output
                out.line(f"auto const to = g{whole} + {packed_row(whole, 'row', 'batch')}")
                out.line(f"    + {column};")
                with out.unrolled("n", fragment.n_atoms):
                    value = f"pack({low}, {high})"
                    out.line(f"*reinterpret_cast<uint32_t*>(to + n * 8) = {value};")
            with out.block("else if (row < rows)"):
                out.line(
                    f"auto const to = g{tensor.name} + (own_row0 + row) * {columns} + {column};"
                )
                with out.unrolled("n", fragment.n_atoms):
                    out.line(f"*reinterpret_cast<float2*>(to + n * 8) = {{{low}, {high}}};")

    def _store_vector(self, name: str, tensor: ast.Tensor) -> None:
        out = self.out
        rows_per_warp = self.plan.rows // self.plan.warps
        one = "lane % 4 == 0" + (" && column_warp == 0" if self.decode.shared else "")
        with (
            out.block(f"if (splits > 1 && {one})"),
            out.unrolled("m", rows_per_warp // 16),
            out.unrolled("r", 2),
        ):
            out.line(f"int const row = {element_row(rows_per_warp, 'row0')};")
            out.line(f"if (row < rows) g{tensor.name}[own_row0 + row] = {name}[m][r];")
