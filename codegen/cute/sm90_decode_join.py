"""Blocks of one cluster that combine their splits in shared memory before anything leaves it.

The blocks have neighbouring splits of the same rows. Each leaves its normalised output and the
log-sum-exp of its scores, float32, where its tiles were. When all have, each block reads its share
of the rows from all of them and weighs them as the combining kernel would: what is stored is one
split of their keys together, or the output itself where there is no other.
"""

from __future__ import annotations

import math

from codegen.cute.pointwise import packed_row
from codegen.cute.pointwise_plan import WIDTH
from codegen.cute.sm90_decode_plan import DecodePlan
from codegen.cute.sm90_decode_store import OWN_BARRIER, PART_PAD, STEP, lead
from codegen.cute.statements import comment
from codegen.cute.writer import Writer
from codegen.tl import ast
from space.hopper import WARPGROUP_ROWS

LANES = 8  #: threads that read one row's columns in one piece

PRELUDE = """
// all threads of the cluster that have not ended; what they stored before is there behind it
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
// an address of this block's shared memory in another block of the cluster
__device__ __forceinline__ uint32_t address_in(int block, uint32_t address) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}
__device__ __forceinline__ float number_there(uint32_t there) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(there) : "memory");
  return x;
}
__device__ __forceinline__ float4 numbers_there(uint32_t there) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(there) : "memory");
  return x;
}
"""


class ClusterJoin:
    """Writes how a block leaves its results, and how the cluster's blocks join them."""

    def __init__(self, plan: DecodePlan, out: Writer) -> None:
        self.plan, self.out = plan, out
        vectors = plan.base.row_vectors
        copies = [s for s in plan.after if isinstance(s, ast.Copy)]
        self.output = next(s for s in copies if s.name not in vectors)
        self.sums = next(s for s in copies if s.name in vectors)

    @property
    def _pitch(self) -> int:
        """Bytes from one row to the next; behind its columns a row has its log-sum-exp."""
        return self.plan.own_columns * 4 + PART_PAD

    def leave(self, consumer: int) -> None:
        """Stage the columns of warpgroup `consumer`, which has read its tiles."""
        out, plan, name = self.out, self.plan, self.output.name
        comment(out, self.output)
        if plan.consumers == 1:  # two have met when they shared what they normalise by
            out.line("// other warps may still read tiles where the results go")
            out.line(f"named_sync({OWN_BARRIER}, 128);")
        with out.block(""), out.unrolled("r", 2):
            out.line(f"int const own_row = warp * {STEP} + r * 8 + lane / 4;")
            first = consumer * WARPGROUP_ROWS * self._pitch
            out.line(f"unsigned char* const to = smem + {first} + own_row * {self._pitch};")
            with out.unrolled("n", plan.own_columns // 8):
                low, high = (f"{name}[0][n][r * 2 + {c}]" for c in (0, 1))
                at = "to + n * 32 + (lane & 3) * 8"
                out.line(f"*reinterpret_cast<float2*>({at}) = {{{low}, {high}}};")
            if consumer == 0:
                at = f"to + {plan.own_columns * 4}"
                out.line(
                    f"if (lane % 4 == 0) *reinterpret_cast<float*>({at}) = {self.sums.name}[0][r];"
                )

    def write(self) -> None:
        """Join the rows: all consumer threads, behind what `leave` wrote."""
        out, plan, blocks = self.out, self.plan, self.plan.split_cluster
        lanes = math.gcd(plan.columns // WIDTH, LANES)
        pieces, step = plan.columns // (lanes * WIDTH), 128 * plan.consumers // lanes * blocks
        out.line("// all splits of the cluster are there; a block joins every piece of its number")
        out.line("meet_cluster();")
        out.line("#pragma unroll 1")
        head = (
            f"for (int piece = threadIdx.x / {lanes} * {blocks} + cluster_rank; "
            f"piece < min({WARPGROUP_ROWS}, rows - row0) * {pieces}; piece += {step})"
        )
        with out.block(head):
            out.line(
                f"int const own_row = piece / {pieces}, "
                f"column = piece % {pieces} * {lanes * WIDTH} + threadIdx.x % {lanes} * {WIDTH};"
            )
            self._read()
            self._weigh()
            self._store()
        out.line("meet_cluster();  // no block ends while others read its memory")

    def _read(self) -> None:
        out, plan, pitch = self.out, self.plan, self._pitch
        out.line(f"uint32_t const left_at = smem_at + own_row * {pitch};")
        own = plan.own_columns
        part = f" + column / {own} * {WARPGROUP_ROWS * pitch}" if plan.consumers > 1 else ""
        within = f"column % {own}" if plan.consumers > 1 else "column"
        out.line(f"float sums[{plan.split_cluster}];")
        out.line(f"float4 parts[{plan.split_cluster}];")
        with out.unrolled("k", plan.split_cluster):
            out.line(f"sums[k] = number_there(address_in(k, left_at + {own * 4}));")
            out.line(f"parts[k] = numbers_there(address_in(k, left_at{part} + {within} * 4));")

    def _weigh(self) -> None:
        out, blocks = self.out, self.plan.split_cluster
        out.line("float highest = -INFINITY, whole = 0.f;")
        with out.unrolled("k", blocks):
            out.line("highest = fmaxf(highest, sums[k]);")
        out.line("float4 x = {0.f, 0.f, 0.f, 0.f};")
        with out.unrolled("k", blocks):
            out.line("float const w = exp2_approx(minus(sums[k], highest) * 1.44269504089f);")
            out.line("whole += w;")
            for c in "xyzw":
                out.line(f"x.{c} += w * parts[k].{c};")
        divided = ", ".join(f"over(x.{c}, whole)" for c in "xyzw")
        out.line(f"x = {{{divided}}};")

    def _store(self) -> None:
        out, plan = self.out, self.plan
        out.line("int const row = row0 + own_row;")
        with out.block("if (splits > 1)"):
            out.line(f"int64_t const at = {lead('part', 'row')};")
            to = f"g{self.output.name} + at * {plan.columns} + column"
            out.line(f"*reinterpret_cast<float4*>({to}) = x;")
            together = "whole == 0.f ? -INFINITY : highest + log2f(whole) * 0.69314718056f"
            out.line(f"if (column == 0) g{self.sums.name}[at] = {together};")
        with out.block("else"):
            out.line("// the keys are in one piece: this is the output")
            at = f"g{plan.output} + {packed_row(plan.output, 'row', 'sequence')} + column"
            out.line(f"*reinterpret_cast<uint2*>({at}) = {{pack(x.x, x.y), pack(x.z, x.w)}};")
