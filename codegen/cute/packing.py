"""Query heads of one KV head packed into the rows of a Hopper block.

Row r of a block is query row0 + r / pack of head first_head + r % pack of the KV head's group. A
block spans the fewer queries the more heads it packs, so that a causal mask hides less of its key
tiles. Heads past the group, where `pack` does not divide it, are rows that TMA fills with zeros and
does not store.
"""

from __future__ import annotations

from codegen.cute.plan import KernelPlan
from codegen.cute.writer import Writer
from codegen.errors import PlanError
from codegen.kernel import GridAxis
from codegen.tl import ast
from codegen.tl.flow import names_in
from space.hopper import WARPGROUP_ROWS


def check_pack(kernel: ast.Kernel, pack: int) -> None:
    """Raise PlanError unless a kernel's rows can be `pack` heads of each query."""
    if pack < 1 or WARPGROUP_ROWS % pack:
        raise PlanError(
            f"pack_heads={pack}: the {WARPGROUP_ROWS} rows of a warpgroup are not whole queries of "
            f"so many heads; use 1, 2, 4 or 8"
        )
    if pack > 1 and any(_asks_where(s) for s in ast.walk(kernel.body)):
        raise PlanError("a statement asks for block_idx, which packed heads change; pack_heads = 1")


def _asks_where(stmt: ast.Stmt) -> bool:
    """Whether a statement computes with the number of its row block; copies only go there."""
    if isinstance(stmt, ast.Arith):
        return "block_idx" in (stmt.a, stmt.b)
    asked: tuple[ast.Expr, ...] = ()
    if isinstance(stmt, ast.If):
        asked = (stmt.condition,)
    elif isinstance(stmt, ast.For):
        asked = (stmt.lo, stmt.hi)
    elif isinstance(stmt, ast.Custom):
        asked = stmt.args
    return any("block_idx" in names_in(e) for e in asked)


def grid_of(queries: int, pack: int) -> tuple[GridAxis, ...]:
    """Return the grid of blocks that each span `queries` queries of `pack` heads."""
    heads: tuple[GridAxis, ...] = (GridAxis("heads", 1),)
    if pack > 1:
        heads = (GridAxis("kv_heads", 1), GridAxis("group", pack))
    return (GridAxis("M", queries), *heads, GridAxis("batch", 1))


def declare_planes(plan: KernelPlan, out: Writer) -> None:
    """Declare how many planes share the row blocks: heads, or packs of them, of all batches."""
    if plan.pack_heads == 1:
        out.line("int const planes = heads * batch, tiles = row_blocks * planes;")
        return
    out.line(f"int const packs = ceil_div(group, {plan.pack_heads});  // of a KV head's heads")
    out.line("int const kv_heads = heads / group;")
    out.line("int const planes = packs * kv_heads * batch, tiles = row_blocks * planes;")


def plane_position(plan: KernelPlan, out: Writer) -> None:
    """Decode `plane` into head and batch, the packs of one KV head behind one another."""
    if plan.pack_heads == 1:
        out.line("int const head = plane % heads, batch = plane / heads;")
        return
    out.line(f"int const first_head = plane % packs * {plan.pack_heads};  // in its group")
    out.line("int const kv_plane = plane / packs;")
    out.line("int const kv_head = kv_plane % kv_heads, batch = kv_plane / kv_heads;")


def row_head(pack: int, row: str) -> str:
    """C++ for the query head of a block's row."""
    return f"kv_head * group + first_head + ({row}) % {pack}"
