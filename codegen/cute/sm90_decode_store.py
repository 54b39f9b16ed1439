"""Where the results of a Hopper decode block go: the output itself, or its part of a split.

One warpgroup with few rows stores from registers. Two, whose rows are wide, stage them in shared
memory, where all tiles have been read by then, and each row leaves in one piece.
"""

from __future__ import annotations

from codegen.cute.pointwise import packed_row
from codegen.cute.sm90_decode_plan import DecodePlan
from codegen.cute.statements import comment
from codegen.cute.writer import Writer
from codegen.errors import PlanError
from codegen.tl import ast
from space.hopper import WARPGROUP_ROWS

STEP = 16
#: named barrier of the first warpgroup; the next one's follows
OWN_BARRIER = 1
#: bytes between staged rows beyond their own, so that the rows of a store fall in different banks
PART_PAD, OUTPUT_PAD = 32, 16


def lead(split: str, row: str) -> str:
    """C++ for a row's number in a workspace [splits, sequences x KV heads, rows]."""
    return f"(int64_t({split}) * kv_heads * batch + plane) * rows + {row}"


class ResultStore:
    """Writes the copies from registers to global memory."""

    def __init__(self, plan: DecodePlan, out: Writer) -> None:
        self.plan, self.out = plan, out

    def store(self, stmt: ast.Copy, consumer: int) -> None:
        """Store a result of warpgroup `consumer`. Raises PlanError when it is not a split's."""
        out, plan = self.out, self.plan
        tensor = plan.base.kernel.tensor(stmt.name)
        if tensor is None or not tensor.workspace:
            raise PlanError(f"{stmt.name} is no part of a split's result")
        if stmt.name in plan.base.row_vectors:
            if consumer == 0:
                comment(out, stmt)
                self._vector(stmt.name)
            return
        comment(out, stmt)
        if plan.consumers > 1:
            self._staged(stmt.name, consumer)
        else:
            self._direct(stmt.name)

    def _vector(self, name: str) -> None:
        out = self.out
        with out.unrolled("r", 2):
            out.line(f"int const row = row0 + warp * {STEP} + r * 8 + lane / 4;")
            once = "column_block == 0 && " if self.plan.column_blocks > 1 else ""
            test = f"if ({once}splits > 1 && lane % 4 == 0 && row < rows)"
            out.line(f"{test} g{name}[{lead('split', 'row')}] = {name}[0][r];")

    def _direct(self, name: str) -> None:
        out, plan = self.out, self.plan
        low, high = (f"{name}[0][n][r * 2 + {c}]" for c in (0, 1))
        atoms = plan.own_columns // 8
        with out.unrolled("r", 2):
            out.line(f"int const row = row0 + warp * {STEP} + r * 8 + lane / 4;")
            with out.block("if (row < rows && splits > 1)"):
                at = f"g{name} + ({lead('split', 'row')}) * {plan.columns} + (lane & 3) * 2"
                out.line(f"float* const to = {at};")
                with out.unrolled("n", atoms):
                    out.line(f"*reinterpret_cast<float2*>(to + n * 8) = {{{low}, {high}}};")
            with out.block("else if (row < rows)"):
                out.line("// the keys are in one piece: this is the output")
                at = packed_row(plan.output, "row", "sequence")
                out.line(f"uint16_t* const to = g{plan.output} + {at} + (lane & 3) * 2;")
                with out.unrolled("n", atoms):
                    out.line(f"*reinterpret_cast<uint32_t*>(to + n * 8) = pack({low}, {high});")

    def _staged(self, name: str, consumer: int) -> None:
        out, plan = self.out, self.plan
        own = plan.own_columns
        part, output = own * 4 + PART_PAD, own * 2 + OUTPUT_PAD
        base = consumer * WARPGROUP_ROWS * part
        low, high = (f"{name}[0][n][r * 2 + {c}]" for c in (0, 1))
        with out.block(""):
            out.line(f"unsigned char* const staged = smem + {base};")
            out.line(f"int const pitch = splits > 1 ? {part} : {output};")
            with out.unrolled("r", 2):
                out.line(f"int const own_row = warp * {STEP} + r * 8 + lane / 4;")
                out.line("unsigned char* const to = staged + own_row * pitch;")
                with out.block("if (splits > 1)"), out.unrolled("n", own // 8):
                    out.line(
                        f"*reinterpret_cast<float2*>(to + n * 32 + (lane & 3) * 8) = "
                        f"{{{low}, {high}}};"
                    )
                with out.block("else"), out.unrolled("n", own // 8):
                    out.line(
                        f"*reinterpret_cast<uint32_t*>(to + n * 16 + (lane & 3) * 4) = "
                        f"pack({low}, {high});"
                    )
            out.line("visible_to_async();")
            out.line(f"named_sync({OWN_BARRIER} + {consumer}, 128);")
            out.line("int const row = row0 + tid;")
            first = f" + {consumer * own}" if consumer else ""
            if plan.column_blocks > 1:
                first += f" + column_block * {plan.columns}"
            with out.block(f"if (tid < {WARPGROUP_ROWS} && row < rows)"):
                out.line("uint32_t const from = cast_smem_ptr_to_uint(staged + tid * pitch);")
                at = f"g{name} + ({lead('split', 'row')}) * {plan.output_columns}{first}"
                out.line(f"if (splits > 1) store_bulk({at}, from, {own * 4});")
                out.line("// the keys are in one piece: this is the output")
                at = f"g{plan.output} + {packed_row(plan.output, 'row', 'sequence')}{first}"
                out.line(f"else store_bulk({at}, from, {own * 2});")
                out.line('asm volatile("cp.async.bulk.commit_group;" ::: "memory");')
                out.line('asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");')
