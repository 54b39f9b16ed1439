"""Lowering of GEMM and Reshape: ldmatrix addresses, fragments and MMA atoms.

A warp owns rows_per_warp rows of the result. Operands come from shared memory through ldmatrix
(16 rows x 16 columns at once), from A fragments that were loaded once, or from an accumulator that
a Reshape turned into an A operand.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.cute.copies import stage_offset
from codegen.cute.layout import SharedLayout
from codegen.cute.plan import Buffer, KernelPlan, LoopPlan
from codegen.cute.structure import number
from codegen.cute.writer import Writer
from codegen.errors import PlanError
from codegen.tl import ast

STEP = 16  #: columns (of A) and rows (of B) of one MMA step


@dataclass(frozen=True, slots=True)
class Role:
    """How the lanes of an ldmatrix address a tile: row and chunk parity, transposed or not."""

    suffix: str
    row: str
    half: str
    load: str
    warp_rows: bool = False
    warp_columns: bool = False


A = Role("a", "(lane & 15)", "(lane >> 4)", "ldsm", warp_rows=True)
A_T = Role("at", "((lane & 7) + (lane >> 4) * 8)", "((lane >> 3) & 1)", "ldsm_t", warp_columns=True)
B = Role("b", "(lane & 15)", "(lane >> 4)", "ldsm_t")
B_T = Role("bt", "((lane & 7) + (lane >> 4) * 8)", "((lane >> 3) & 1)", "ldsm")
#: last 8 columns of a B.T operand: 16 rows by one chunk
B_T_TAIL = Role("bt8", "(lane & 15)", "0", "ldsm")


def _lanes(name: str, role: Role) -> str:
    return f"{name}_lanes_{role.suffix}"


def _declare_lanes(
    out: Writer, name: str, layout: SharedLayout, offset: int, role: Role, rows: int, share: int
) -> None:
    """Declare the lane's addresses in stage 0 of a tile, one for each step of a swizzle period.

    `share` is what a column warp has of the result's columns; 0 when every warp has them all.
    """
    row = role.row + (f" + warp * {rows}" if role.warp_rows else "")
    half = f"({role.half} + warp * {rows // 8})" if role.warp_columns else role.half
    if share and role in (B_T, B_T_TAIL):  # the result's columns are rows of the tile
        row += f" + column_warp * {share}"
    elif share and role is B:
        half = f"({half} + column_warp * {share // 8})"
    xor = layout.xor_text(role.row)
    chunk = half if xor == "0" else f"({half} ^ {xor})"
    lanes = _lanes(name, role)
    out.line(f"uint32_t {lanes}[{layout.period}];")
    with out.unrolled("j", layout.period):
        out.line(
            f"{lanes}[j] = pin(smem_at + {offset} + ({row}) * {layout.pitch} "
            f"+ ({chunk} * 16 ^ j * 32));"
        )


class GemmLowering:
    """Lowers GEMM and Reshape statements of one kernel."""

    def __init__(self, plan: KernelPlan, out: Writer) -> None:
        self.plan, self.out = plan, out
        self.rows = plan.rows // plan.warps
        self.m_atoms = self.rows // 16

    def declare(self) -> None:
        """Declare lane addresses of every operand in shared memory, and A fragments."""
        seen: set[tuple[str, str]] = set()
        for stmt in ast.walk(self.plan.kernel.body):
            if not isinstance(stmt, ast.Gemm):
                continue
            for name, role in self._shared_operands(stmt):
                if (name, role.suffix) in seen:
                    continue
                seen.add((name, role.suffix))
                buffer = self._buffer(name)
                share = self._share(stmt.out)
                _declare_lanes(self.out, name, buffer.layout, buffer.offset, role, self.rows, share)
        for stmt in ast.walk(self.plan.kernel.body):
            if isinstance(stmt, ast.Reshape) and not self.plan.p_in_registers:
                layout = SharedLayout(self.plan.rows, self._columns(stmt.name), 0)
                if (stmt.name, A.suffix) not in seen:
                    seen.add((stmt.name, A.suffix))
                    offset = self.plan.p_offset
                    _declare_lanes(self.out, stmt.name, layout, offset, A, self.rows, 0)
        for name in self.plan.a_fragments:
            columns = self._buffer(name).layout.columns
            if columns // STEP:
                self.out.line(f"uint32_t {name}_r[{self.m_atoms}][{columns // STEP}][4];")
            if columns % STEP:
                self.out.line(f"uint32_t {name}_r8[{self.m_atoms}][2];")

    def _buffer(self, name: str) -> Buffer:
        buffer = self.plan.buffer(name)
        if buffer is None:
            raise PlanError(f"{name} is an operand of a GEMM and not in shared memory")
        return buffer

    def _columns(self, name: str) -> int:
        fragment = self.plan.fragment(name)
        if fragment is None:
            raise PlanError(f"{name} is not a tile in registers")
        return fragment.columns

    def _share(self, result: str) -> int:
        """Columns of a GEMM's result that a warp has, where warps of the same rows share them."""
        return 0

    def _shared_operands(self, stmt: ast.Gemm) -> list[tuple[str, Role]]:
        found = []
        if self.plan.buffer(stmt.a.name) is not None:
            found.append((stmt.a.name, A_T if stmt.a.transposed else A))
        found.append((stmt.b.name, B_T if stmt.b.transposed else B))
        if stmt.b.transposed and self._buffer(stmt.b.name).layout.columns % STEP:
            found.append((stmt.b.name, B_T_TAIL))
        return found

    def _extent(self, stmt: ast.Gemm) -> int:
        """Length of the contracted axis."""
        in_registers = self.plan.fragment(stmt.a.name) is not None
        if in_registers and self.plan.buffer(stmt.a.name) is None:
            return self._columns(stmt.a.name)
        layout = self._buffer(stmt.a.name).layout
        return layout.rows if stmt.a.transposed else layout.columns

    def gemm(self, stmt: ast.Gemm, inside: LoopPlan | None) -> None:
        """Emit C (+)= A.B over steps of 16, and one of 8 where the extent leaves it."""
        out, c = self.out, stmt.out
        fragment = self.plan.fragment(c)
        if fragment is None:
            raise PlanError(f"the result {c} of a GEMM is not a tile in registers")
        extent, b_layout = self._extent(stmt), self._buffer(stmt.b.name).layout
        met = b_layout.columns if stmt.b.transposed else b_layout.rows
        if extent != met:
            raise PlanError(f"GEMM {stmt.a.name}, {stmt.b.name}: {extent} columns meet {met} rows")
        if not stmt.accumulate:
            with (
                out.unrolled("m", fragment.m_atoms),
                out.unrolled("n", fragment.n_atoms),
                out.unrolled("e", 4),
            ):
                out.line(f"{c}[m][n][e] = 0.f;")
        with out.block(""):
            if extent // STEP:
                with out.unrolled("k", extent // STEP):
                    self._step(stmt, fragment.n_atoms, inside)
            if extent % STEP:
                self._tail(stmt, extent // STEP, fragment.n_atoms, inside)

    def _index(self, name: str, inside: LoopPlan | None) -> str:
        tiles = inside.pipeline.tiles if inside is not None and inside.pipeline is not None else ()
        return inside.var if inside is not None and any(t.name == name for t in tiles) else "0"

    def _stage(self, name: str, inside: LoopPlan | None) -> str:
        """C++ that adds the offset of the stage a loop's tile is in; empty with one stage."""
        buffer = self._buffer(name)
        index = self._index(name, inside)
        return "" if buffer.stages == 1 or index == "0" else f" + {stage_offset(buffer, index)}"

    def _load_a(self, stmt: ast.Gemm, inside: LoopPlan | None) -> str:
        """Emit the loads of an A step; return how atom m of it is spelled."""
        name, out = stmt.a.name, self.out
        if name in self.plan.a_fragments:
            return f"{name}_r[m][k]"
        buffer = self.plan.buffer(name)
        if buffer is None and self.plan.p_in_registers:
            return f"{name}_a[m][k]"
        out.line(f"uint32_t a[{self.m_atoms}][4];")
        with out.unrolled("m", self.m_atoms):
            if buffer is None:
                layout = SharedLayout(self.plan.rows, self._columns(name), 0)
                step = layout.step_text(_lanes(name, A), "k")
                out.line(f"ldsm(a[m], {step} + m * {16 * layout.pitch});")
            elif stmt.a.transposed:
                step = buffer.layout.step_text(_lanes(name, A_T), "m") + self._stage(name, inside)
                out.line(f"ldsm_t(a[m], {step} + k * {16 * buffer.layout.pitch});")
            else:
                step = buffer.layout.step_text(_lanes(name, A), "k") + self._stage(name, inside)
                out.line(f"ldsm(a[m], {step} + m * {16 * buffer.layout.pitch});")
        return "a[m]"

    def _b_column(self, stmt: ast.Gemm) -> int:
        """First column of a sliced B operand, in steps of 16."""
        if not stmt.b.slices:
            return 0
        first = stmt.b.slices[-1].lo
        start = 0 if first is None else number(first)
        if start % 16:
            raise PlanError(
                f"slice of {stmt.b.name} starts at column {start}, not a multiple of 16"
            )
        return start // 16

    def _step(self, stmt: ast.Gemm, n_atoms: int, inside: LoopPlan | None) -> None:
        out, c, b = self.out, stmt.out, stmt.b
        a = self._load_a(stmt, inside)
        role = B_T if b.transposed else B
        lanes, layout = _lanes(b.name, role), self._buffer(b.name).layout
        first, stage = self._b_column(stmt), self._stage(b.name, inside)

        def at(pair: str) -> str:
            if b.transposed:
                return f"{layout.step_text(lanes, 'k')}{stage} + {pair} * {16 * layout.pitch}"
            return f"{layout.step_text(lanes, pair, first)}{stage} + k * {16 * layout.pitch}"

        if n_atoms // 2:
            with out.unrolled("n", n_atoms // 2):
                out.line("uint32_t b[4];")
                out.line(f"{role.load}(b, {at('n')});")
                with out.unrolled("m", self.m_atoms):
                    out.line(f"mma({c}[m][n * 2], {a}, b[0], b[1]);")
                    out.line(f"mma({c}[m][n * 2 + 1], {a}, b[2], b[3]);")
        if n_atoms % 2:
            out.line("uint32_t b[2];")
            out.line(f"{role.load}(b, {at(str(n_atoms // 2))});")
            with out.unrolled("m", self.m_atoms):
                out.line(f"mma({c}[m][{n_atoms - 1}], {a}, b[0], b[1]);")

    def _tail(self, stmt: ast.Gemm, k: int, n_atoms: int, inside: LoopPlan | None) -> None:
        """A last step of 8: the contracted axis is an odd number of chunks."""
        out, c, b = self.out, stmt.out, stmt.b
        if not b.transposed or stmt.a.transposed or n_atoms % 2:
            raise PlanError(
                f"GEMM {stmt.a.name}, {b.name}: an extent of 8 more than a multiple of 16 is only "
                "lowered for A.B.T with a multiple of 16 columns"
            )
        name = stmt.a.name
        if name in self.plan.a_fragments:
            a = f"{name}_r8[m]"
        else:
            buffer = self._buffer(name)
            out.line(f"uint32_t a[{self.m_atoms}][2];")
            with out.unrolled("m", self.m_atoms):
                step = buffer.layout.step_text(_lanes(name, A), str(k)) + self._stage(name, inside)
                out.line(f"ldsm(a[m], {step} + m * {16 * buffer.layout.pitch});")
            a = "a[m]"
        layout = self._buffer(b.name).layout
        with out.unrolled("n", n_atoms // 2):
            out.line("uint32_t b[2];")
            step = layout.step_text(_lanes(b.name, B_T_TAIL), str(k)) + self._stage(b.name, inside)
            out.line(f"ldsm(b, {step} + n * {16 * layout.pitch});")
            with out.unrolled("m", self.m_atoms):
                out.line(f"mma({c}[m][n * 2], {a}, b[0]);")
                out.line(f"mma({c}[m][n * 2 + 1], {a}, b[1]);")

    def reshape(self, stmt: ast.Reshape) -> None:
        """Round an accumulator to 16 bits as an A operand, in registers or through shared."""
        out, name = self.out, stmt.name
        columns = self._columns(name)
        if self.plan.p_in_registers:
            self.pack(name)
            return
        layout = SharedLayout(self.plan.rows, columns, 0)
        out.line("__syncwarp();")
        with out.unrolled("m", self.m_atoms), out.unrolled("r", 2):
            out.line(f"int const row = warp * {self.rows} + m * 16 + r * 8 + lane / 4;")
            with out.unrolled("n", columns // 8):
                at = f"{self.plan.p_offset} + {layout.offset_text('row', 'n')} + (lane & 3) * 4"
                low, high = (f"{name}[m][n][r * 2 + {c}]" for c in (0, 1))
                out.line(f"*reinterpret_cast<uint32_t*>(smem + {at}) = pack({low}, {high});")
        out.line("__syncwarp();")

    def pack(self, name: str, declare: bool = True) -> None:
        """Round an accumulator to 16 bits as an A operand in registers."""
        out, steps = self.out, self._columns(name) // STEP
        if declare:
            out.line(f"uint32_t {name}_a[{self.m_atoms}][{steps}][4];")
        with out.unrolled("m", self.m_atoms), out.unrolled("k", steps):
            for reg in range(4):
                atom = f"{name}[m][k * 2 + {reg >> 1}]"
                low = 2 * (reg & 1)
                out.line(f"{name}_a[m][k][{reg}] = pack({atom}[{low}], {atom}[{low + 1}]);")


def load_a_fragments(plan: KernelPlan, out: Writer, name: str) -> None:
    """Read a row tile from shared memory once, as A operands of all steps."""
    buffer = plan.buffer(name)
    if buffer is None:
        raise PlanError(f"{name} is not in shared memory")
    lanes = _lanes(name, A)
    m_atoms = plan.rows // plan.warps // 16
    layout = buffer.layout
    columns, down = layout.columns, f"m * {16 * layout.pitch}"
    with out.unrolled("m", m_atoms):
        if columns // STEP:
            with out.unrolled("k", columns // STEP):
                out.line(f"ldsm({name}_r[m][k], {layout.step_text(lanes, 'k')} + {down});")
        if columns % STEP:
            out.line(
                f"ldsm({name}_r8[m], {layout.step_text(lanes, str(columns // STEP))} + {down});"
            )
