"""Copies between registers and global memory, in the accumulators' layout."""

from __future__ import annotations

from codegen.cute.expressions import cxx
from codegen.cute.layout import Fragment, SharedLayout
from codegen.cute.packing import row_head
from codegen.cute.plan import KernelPlan, LoopPlan, swizzle_for
from codegen.cute.structure import number
from codegen.cute.target import Target
from codegen.cute.writer import Writer
from codegen.errors import PlanError
from codegen.tl import ast


def fragment_of(plan: KernelPlan, name: str) -> Fragment:
    """Return the register tile of `name`. Raises PlanError when it has none."""
    fragment = plan.fragment(name)
    if fragment is None:
        raise PlanError(f"{name} is not a tile in registers")
    return fragment


def tensor_of(plan: KernelPlan, stmt: ast.Copy) -> ast.Tensor:
    """Return the global tensor a copy reads or writes. Raises PlanError when there is none."""
    tensor = plan.kernel.tensor(stmt.target or stmt.name)
    if tensor is None:
        raise PlanError(f"{stmt.target or stmt.name} is not a tensor in global memory")
    return tensor


def element_row(rows_per_warp: int, first: str = "", pack: int = 1) -> str:
    """C++ for the query of a lane's element (m, r) in a tile that starts at query `first`.

    Each query is `pack` rows of the tile, of as many heads; without `first`, that row of the tile.
    """
    row = f"warp * {rows_per_warp} + m * 16 + r * 8 + lane / 4"
    if pack > 1:
        row = f"({row}) / {pack}"
    return f"{first} + {row}" if first else row


class RegisterCopies:
    """Lowers the copies of one kernel."""

    def __init__(self, plan: KernelPlan, target: Target, out: Writer) -> None:
        self.plan, self.target, self.out = plan, target, out

    def _address(self, stmt: ast.Copy, tensor: ast.Tensor, row: str, column: str) -> str:
        """C++ for the address of (row, column); a workspace is [axes, planes, M, columns]."""
        for coord in stmt.coords:
            if coord.axis == "D":
                size = number(stmt.shape[1])
                column = f"({cxx(coord.index, {})}) * {size} + {column}"
        if not tensor.workspace:
            base = f"g{tensor.name}"
            if tensor.output:
                base += f" + batch * {tensor.name}_stride_b + head * {tensor.name}_stride_h"
            return f"{base} + int64_t({row}) * {tensor.name}_stride_s + {column}"
        lead = next((cxx(c.index, {}) for c in stmt.coords if c.axis in tensor.axes), "0")
        at = f"((int64_t({lead}) * planes + plane) * M + ({row})) * {tensor.columns} + {column}"
        return f"g{tensor.name} + {at}"

    def store(self, stmt: ast.Copy, inside: LoopPlan | None) -> None:
        tensor, out = tensor_of(self.plan, stmt), self.out
        index = f"({cxx(stmt.coords[0].index, {})}) * {number(stmt.shape[0])}"
        limit = "M" if tensor.rows is ast.Rows.QUERY else "N"
        if stmt.name in self.plan.row_vectors:
            rows_per_warp = self.plan.rows // self.plan.warps
            with out.unrolled("m", rows_per_warp // 16), out.unrolled("r", 2):
                out.line(f"int const row = {element_row(rows_per_warp, index)};")
                at = self._address(stmt, tensor, "row", "0")
                out.line(f"if (lane % 4 == 0 && row < {limit}) *({at}) = {stmt.name}[m][r];")
            return
        fragment = fragment_of(self.plan, stmt.name)
        staged = self.plan.epilogue_smem and inside is None and tensor.elem is ast.Elem.OPERAND
        if staged:
            self._store_staged(stmt, tensor, fragment, index, limit)
            return
        bound = "" if isinstance(tensor.columns, int) else f" && column < {tensor.columns}"
        with out.unrolled("m", fragment.m_atoms), out.unrolled("r", 2):
            limit = self._declare_place(fragment, index, limit)
            with out.unrolled("n", fragment.n_atoms):
                column = "n * 8 + (lane & 3) * 2"
                at = self._address(stmt, tensor, "row", column)
                if bound:
                    bound = f" && {self._columns(stmt, column)} < {tensor.columns}"
                low, high = (f"{stmt.name}[m][n][r * 2 + {c}]" for c in (0, 1))
                with out.block(f"if (row < {limit}{bound})"):
                    if tensor.elem is ast.Elem.F32:
                        out.line(f"*reinterpret_cast<float2*>({at}) = {{{low}, {high}}};")
                    else:
                        out.line(f"*reinterpret_cast<uint32_t*>({at}) = pack({low}, {high});")

    def _declare_place(self, fragment: Fragment, index: str, limit: str) -> str:
        """Declare a row's query and, of packed heads, its head; return what bounds the query."""
        out, pack = self.out, self.plan.pack_heads
        if pack == 1:
            out.line(f"int const row = {element_row(fragment.rows_per_warp, index)};")
            return limit
        out.line(f"int const packed = {element_row(fragment.rows_per_warp)};")
        out.line(f"int const row = row0 + packed / {pack};")
        out.line(f"int const head = {row_head(pack, 'packed')};")
        return f"{limit} && first_head + packed % {pack} < group"

    def _columns(self, stmt: ast.Copy, column: str) -> str:
        for coord in stmt.coords:
            if coord.axis == "D":
                return f"({cxx(coord.index, {})}) * {number(stmt.shape[1])} + {column}"
        return column

    def _store_staged(
        self, stmt: ast.Copy, tensor: ast.Tensor, fragment: Fragment, index: str, limit: str
    ) -> None:
        """Through shared memory, so that a warp writes whole 16-byte chunks of its rows."""
        out = self.out
        swizzle = swizzle_for(fragment.columns, self.plan.program.param("swizzle", 0))
        layout = SharedLayout(fragment.rows, fragment.columns, swizzle)
        if self.target.asynchronous:
            out.line("cp_async_wait<0>();")
        out.line("__syncthreads();  // the tiles below are read no more")
        rows = fragment.rows_per_warp
        with out.unrolled("m", fragment.m_atoms), out.unrolled("r", 2):
            out.line(f"int const row = warp * {rows} + m * 16 + r * 8 + lane / 4;")
            with out.unrolled("n", fragment.n_atoms):
                at = layout.offset_text("row", "n")
                low, high = (f"{stmt.name}[m][n][r * 2 + {c}]" for c in (0, 1))
                out.line(
                    f"*reinterpret_cast<uint32_t*>(smem + {at} + (lane & 3) * 4) = "
                    f"pack({low}, {high});"
                )
        out.line("__syncwarp();")
        chunks = layout.chunks
        total = rows * chunks
        with out.unrolled("pass", -(-total // 32)):
            out.line(
                f"int const at = pass * 32 + lane, own = at / {chunks}, chunk = at % {chunks};"
            )
            out.line(f"int const row = warp * {rows} + own;")
            guard = [f"{index} + row < {limit}"]
            if total % 32:
                guard.insert(0, f"at < {total}")
            column = "chunk * 8"
            if isinstance(tensor.columns, str):
                guard.append(f"{self._columns(stmt, column)} < {tensor.columns}")
            with out.block(f"if ({' && '.join(guard)})"):
                at = self._address(stmt, tensor, f"{index} + row", column)
                out.line(f"*reinterpret_cast<uint128_t*>({at}) =")
                out.line(f"    chunk_at(smem_at + {layout.offset_text('row', 'chunk')});")

    def load(self, stmt: ast.Copy) -> None:
        """Global to registers, in accumulator layout; rows past the end become zero."""
        tensor, out = tensor_of(self.plan, stmt), self.out
        index = f"({cxx(stmt.coords[0].index, {})}) * {number(stmt.shape[0])}"
        limit = "M" if tensor.rows is ast.Rows.QUERY else "N"
        name = stmt.name
        if name in self.plan.row_vectors:
            rows_per_warp = self.plan.rows // self.plan.warps
            with out.unrolled("m", rows_per_warp // 16), out.unrolled("r", 2):
                out.line(f"int const row = {element_row(rows_per_warp, index)};")
                at = self._address(stmt, tensor, "row", "0")
                out.line(f"{name}[m][r] = row < {limit} ? *({at}) : 0.f;")
            return
        fragment = fragment_of(self.plan, name)
        with out.unrolled("m", fragment.m_atoms), out.unrolled("r", 2):
            out.line(f"int const row = {element_row(fragment.rows_per_warp, index)};")
            with out.unrolled("n", fragment.n_atoms):
                at = self._address(stmt, tensor, "row", "n * 8 + (lane & 3) * 2")
                if tensor.elem is ast.Elem.F32:
                    value = f"*reinterpret_cast<float2 const*>({at})"
                else:
                    value = f"unpack(*reinterpret_cast<uint32_t const*>({at}))"
                out.line(f"float2 const x = row < {limit} ? {value} : float2{{0.f, 0.f}};")
                out.line(f"{name}[m][n][r * 2] = x.x;")
                out.line(f"{name}[m][n][r * 2 + 1] = x.y;")
