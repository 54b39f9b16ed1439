"""sm_80 and sm_89 (and the same source built for sm_90a): cp.async copies, m16n8k16 MMA."""

from __future__ import annotations

from codegen.cute.copies import Source, chunk_loop, declare_lanes, stage_offset
from codegen.cute.plan import Buffer
from codegen.cute.row_copies import Gathered
from codegen.cute.target import BARRIER, COMMON_PRELUDE, LDMATRIX_PRELUDE, PACK, UNPACK
from codegen.cute.writer import Writer
from space.variant import DType

ATOM = {DType.FP16: "F16F16", DType.BF16: "BF16BF16"}


class Sm80:
    """Copies are asynchronous and complete in groups; several tiles are in flight."""

    asynchronous = True

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def prelude(self, out: Writer, dtype: DType) -> None:
        """Write includes and device functions."""
        for header in ("copy_sm75", "copy_sm80", "mma_sm80"):
            out.line(f"#include <cute/arch/{header}.hpp>")
        out.lines(COMMON_PRELUDE)
        out.lines(LDMATRIX_PRELUDE)
        out.line()
        out.lines(PACK["async", dtype])
        out.lines(UNPACK[dtype])
        atom = ATOM[dtype]
        out.line()
        out.line("// c += a.b, 16x8x16; a holds rows (0-7, 8-15) x columns (0-7, 8-15)")
        with out.block(
            "__device__ __forceinline__ void mma(float (&c)[4], uint32_t const (&a)[4], "
            "uint32_t b0, uint32_t b1)"
        ):
            out.line(f"SM80_16x8x16_F32{atom}F32_TN::fma(c[0], c[1], c[2], c[3],")
            out.line("    a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]);")
        out.line("// the same for a last step of 8 columns")
        with out.block(
            "__device__ __forceinline__ void mma(float (&c)[4], uint32_t const (&a)[2], uint32_t b)"
        ):
            out.line(f"SM80_16x8x8_F32{atom}F32_TN::fma(c[0], c[1], c[2], c[3],")
            out.line("    a[0], a[1], b, c[0], c[1], c[2], c[3]);")

    def define_copy(
        self, out: Writer, buffer: Buffer, threads: int, source: Source | Gathered
    ) -> None:
        """Define `copy_X(index)`, which starts cp.async of a tile; rows past the end are zero."""
        declare_lanes(out, buffer, threads)
        with out.block(f"auto copy_{buffer.name} = [&](int index)", "};"):
            out.line(f"uint32_t const stage = {stage_offset(buffer, 'index')};")
            with chunk_loop(out, buffer, threads, source):
                out.line("SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(")
                out.line(
                    "    *reinterpret_cast<uint128_t const*>(from), chunk_at(at + stage), valid);"
                )

    def issue(self, buffer: Buffer, index: str) -> str:
        """Start the copy of tile `index`."""
        return f"copy_{buffer.name}({index});"

    def land(
        self,
        out: Writer,
        buffers: tuple[Buffer, ...],
        index: str,
        pending: int,
        meet: str = BARRIER,
    ) -> None:
        """Wait until at most `pending` groups are in flight, then meet."""
        out.line(f"cp_async_wait<{pending}>();")
        out.line(meet)
