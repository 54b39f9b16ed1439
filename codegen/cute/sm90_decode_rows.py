"""The packed rows of Q of a Hopper decode block: into shared memory, and into registers."""

from __future__ import annotations

from codegen.cute.panel import Panel
from codegen.cute.pointwise import packed_row
from codegen.cute.sm90_decode_plan import DecodePlan
from codegen.cute.sm90_decode_store import STEP
from codegen.cute.statements import comment
from codegen.cute.writer import Writer
from codegen.tl import ast
from space.decode import PANEL_COLUMNS, ROW_BYTES, panels
from space.hopper import WARPGROUP_ROWS
from space.tiles import CHUNK_BYTES

STEPS = PANEL_COLUMNS // STEP  #: of a product in one panel
#: named barriers by which the loading warp and the others tell each other how far they are
BARRIERS_MADE, ROWS_ISSUED = 5, 6


def load_rows(plan: DecodePlan, out: Writer, name: str) -> None:
    """Packed rows of Q to shared memory; rows and columns past the end are zero."""
    copies = (s for s in plan.base.kernel.body if isinstance(s, ast.Copy))
    stmt = next(s for s in copies if s.name == name)
    comment(out, stmt)
    chunks, threads = panels(plan.head_dim) * 8, 128 * plan.consumers
    lanes = threads // WARPGROUP_ROWS
    with out.block(""):
        out.line(f"int const r = threadIdx.x / {lanes}, lane_at = threadIdx.x % {lanes};")
        out.line("int const row = row0 + r;")
        out.line(
            f"uint16_t const* const from = row < rows ? g{name} + "
            f"{packed_row(name, 'row', 'sequence')} + lane_at * 8 : g{name};"
        )
        out.line(f"uint32_t const to = smem_at + r * {ROW_BYTES};")
        with out.unrolled("j", chunks // lanes):
            own = f" && j * {lanes} + lane_at < {plan.head_dim // 8}"
            own = "" if plan.head_dim % PANEL_COLUMNS == 0 else own
            at = (
                f"to + j / {8 // lanes} * {WARPGROUP_ROWS * ROW_BYTES} + "
                f"((j % {8 // lanes} * {lanes} + lane_at) ^ (r & 7)) * {CHUNK_BYTES}"
            )
            column = f"j * {lanes * 8}"
            if plan.column_blocks > 1:
                panel, within = f"j / {8 // lanes}", f"j % {8 // lanes} * {lanes * 8}"
                out.line(f"int const panel = {panel};")
                column = f"{plan.panel_from('panel')} * {PANEL_COLUMNS} + {within}"
            out.line(f"copy_chunk({at}, from + {column}, row < rows{own});")
    out.line(f"named_arrive({ROWS_ISSUED}, {plan.threads});")
    out.line('asm volatile("cp.async.wait_all;" ::: "memory");')
    out.line("visible_to_async();")
    out.line("// all rows are there, and the barriers")
    out.line(f"named_sync({BARRIERS_MADE}, {plan.threads});")


def hold_rows(plan: DecodePlan, out: Writer, name: str) -> None:
    """Read the last panels of Q as A operands: the product reads less of shared memory."""
    steps = -(-plan.head_dim // STEP) - plan.first_held * STEPS
    out.line(f"uint32_t {name}_r[{steps}][4];")
    with out.block(""):
        out.line(f"int const row = warp * {STEP} + (lane & 15);")
        at = plan.first_held * WARPGROUP_ROWS * ROW_BYTES
        out.line(f"uint32_t const rows_at = smem_at + {at} + row * {ROW_BYTES};")
        with out.unrolled("k", steps):
            chunk = Panel().swizzled("k % 4 * 2 + (lane >> 4)", "row")
            panel = f"k / 4 * {WARPGROUP_ROWS * ROW_BYTES}"
            out.line(f"ldsm({name}_r[k], rows_at + {panel} + {chunk} * {CHUNK_BYTES});")
