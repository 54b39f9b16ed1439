"""What is added to scores by position: ALiBi from a formula, a bias tensor from global memory."""

from __future__ import annotations

from codegen.cute.expressions import cxx
from codegen.cute.layout import Fragment
from codegen.cute.masks import tile_of
from codegen.cute.packing import row_head
from codegen.cute.plan import KernelPlan, LoopPlan
from codegen.cute.register_copies import element_row, fragment_of
from codegen.cute.structure import mask_kind
from codegen.cute.writer import Writer
from codegen.errors import PlanError
from codegen.tl import ast


def add_bias(plan: KernelPlan, out: Writer, stmt: ast.Custom, loop: LoopPlan) -> None:
    """Lower `Mask S, alibi(c)` or `Mask S, bias(B)` for the key tile that the loop stands at."""
    assert isinstance(stmt.args[0], ast.Call)
    fragment = fragment_of(plan, stmt.name)
    tile = tile_of(loop.masks, loop.var, loop.var)
    first = f"{tile} * {loop.columns} + (lane & 3) * 2"
    argument = stmt.args[0].args[0]
    if mask_kind(stmt) == "alibi":
        _add_alibi(out, stmt.name, fragment, first, cxx(argument, {}), plan.pack_heads)
    elif isinstance(argument, ast.Name) and (tensor := plan.kernel.tensor(argument.id)) is not None:
        _add_tensor(out, stmt.name, fragment, first, tensor)
    else:
        raise PlanError(f"the bias {argument!r} is not a tensor in global memory")


def _add_alibi(
    out: Writer, scores: str, fragment: Fragment, first: str, exponent: str, pack: int
) -> None:
    slope = (
        f"float const alibi_slope = exp2_approx(-float({exponent}) * float(head + 1) / "
        f"float(heads));"
    )
    with out.block(""):
        if pack == 1:
            out.line(slope)
        with out.unrolled("m", fragment.m_atoms), out.unrolled("r", 2):
            out.line(f"int const row = {element_row(fragment.rows_per_warp, 'row0', pack)};")
            if pack > 1:
                head = row_head(pack, element_row(fragment.rows_per_warp))
                out.line(f"int const head = {head};")
                out.line(slope)
            out.line(f"int const at = row + diagonal - ({first});")
            with out.unrolled("n", fragment.n_atoms), out.unrolled("c", 2):
                out.line(
                    f"{scores}[m][n][r * 2 + c] -= alibi_slope * fabsf(float(at - (n * 8 + c)));"
                )


def _add_tensor(
    out: Writer, scores: str, fragment: Fragment, first: str, tensor: ast.Tensor
) -> None:
    name = tensor.name
    value = f"g{name}[at + n * 8 + c]"
    if tensor.elem is not ast.Elem.F32:
        value = f"unpack({value}).x"
    with out.unrolled("m", fragment.m_atoms), out.unrolled("r", 2):
        out.line(f"int const row = {element_row(fragment.rows_per_warp, 'row0')};")
        out.line(f"int const column = {first};")
        out.line(f"int64_t const at = int64_t(row) * {name}_stride_s + column;")
        with out.unrolled("n", fragment.n_atoms), out.unrolled("c", 2):
            out.line(
                f"if (row < M && column + n * 8 + c < N) {scores}[m][n][r * 2 + c] += {value};"
            )
