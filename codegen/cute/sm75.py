"""sm_75: copies staged through registers, m16n8k8 MMA, fp16 only."""

from __future__ import annotations

from codegen.cute.copies import (
    Source,
    chunk_count,
    chunk_loop,
    declare_lanes,
    stage_offset,
)
from codegen.cute.plan import Buffer
from codegen.cute.row_copies import Gathered
from codegen.cute.target import BARRIER, COMMON_PRELUDE, LDMATRIX_PRELUDE, PACK, UNPACK
from codegen.cute.writer import Writer
from space.variant import DType


class Sm75:
    """A tile is loaded into registers when it is issued and stored to shared when it lands."""

    asynchronous = False
    arch = "sm_75"

    def prelude(self, out: Writer, dtype: DType) -> None:
        """Write includes and device functions."""
        for header in ("copy_sm75", "mma_sm75"):
            out.line(f"#include <cute/arch/{header}.hpp>")
        out.lines(COMMON_PRELUDE)
        out.lines(LDMATRIX_PRELUDE)
        out.line()
        out.lines(PACK["staged", dtype])
        out.lines(UNPACK[dtype])
        out.line()
        out.line("// c += a.b, 16x8x8; a holds rows (0-7, 8-15)")
        with out.block(
            "__device__ __forceinline__ void mma(float (&c)[4], uint32_t const (&a)[2], uint32_t b)"
        ):
            out.line("SM75_16x8x8_F32F16F16F32_TN::fma(c[0], c[1], c[2], c[3],")
            out.line("    a[0], a[1], b, c[0], c[1], c[2], c[3]);")
        out.line("// 16x8x16 as two steps; a holds rows (0-7, 8-15) x columns (0-7, 8-15)")
        with out.block(
            "__device__ __forceinline__ void mma(float (&c)[4], uint32_t const (&a)[4], "
            "uint32_t b0, uint32_t b1)"
        ):
            for low, b in ((0, "b0"), (2, "b1")):
                out.line("SM75_16x8x8_F32F16F16F32_TN::fma(c[0], c[1], c[2], c[3],")
                out.line(f"    a[{low}], a[{low + 1}], {b}, c[0], c[1], c[2], c[3]);")

    def define_copy(
        self, out: Writer, buffer: Buffer, threads: int, source: Source | Gathered
    ) -> None:
        """Define `load_X(index)`, global to registers, and `store_X(index)`, from there on."""
        name = buffer.name
        declare_lanes(out, buffer, threads)
        out.line(f"uint128_t {name}_staged[{chunk_count(buffer, threads)}];")
        with (
            out.block(f"auto load_{name} = [&](int index)", "};"),
            chunk_loop(out, buffer, threads, source),
        ):
            out.line(
                f"{name}_staged[pass] = valid ? *reinterpret_cast<uint128_t const*>(from) : "
                "uint128_t{};"
            )
        with out.block(f"auto store_{name} = [&](int index)", "};"):
            out.line(f"uint32_t const stage = {stage_offset(buffer, 'index')};")
            with chunk_loop(out, buffer, threads, None):
                out.line(f"chunk_at(at + stage) = {name}_staged[pass];")

    def issue(self, buffer: Buffer, index: str) -> str:
        """Load tile `index` into registers."""
        return f"load_{buffer.name}({index});"

    def land(
        self,
        out: Writer,
        buffers: tuple[Buffer, ...],
        index: str,
        pending: int,
        meet: str = BARRIER,
    ) -> None:
        """Meet (readers of the buffer are done), store what is staged, and meet again."""
        if buffers:
            out.line(BARRIER)
        for buffer in buffers:
            out.line(f"store_{buffer.name}({index});")
        out.line(meet)
