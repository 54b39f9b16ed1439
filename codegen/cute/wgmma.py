"""wgmma: descriptors of shared tiles and the asynchronous products, as device functions.

The CuTe headers have no atoms for every width, and the header that has more takes 40 s to parse, so
the functions for the widths a kernel uses are written out here in the form of those atoms.
"""

from __future__ import annotations

from codegen.cute.panel import Panel
from codegen.cute.writer import Writer
from space.variant import DType

TYPES = {DType.FP16: "f16", DType.BF16: "bf16"}

EXP2_FMA = """
// 2^x without the special function unit: a polynomial of the part in -1/2..1/2, and the whole part
// added to the exponent; exact to 2^-14, below what P keeps
__device__ __forceinline__ float exp2_fma(float x) {
  float const y = fmaxf(x, -126.f);
  float const whole = y + 12582912.f, part = y - (whole - 12582912.f);
  float p = fmaf(part, 9.61812911e-3f, 5.55041087e-2f);
  p = fmaf(part, p, 2.40226507e-1f);
  p = fmaf(part, p, 6.93147181e-1f);
  p = fmaf(part, p, 1.f);
  return x < -126.f ? 0.f : __int_as_float(__float_as_int(p) + (__float_as_int(whole) << 23));
}
"""

PRELUDE = """
__device__ __forceinline__ void warpgroup_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void warpgroup_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// keeps reads and writes of accumulators on their side of a wait
template <int N>
__device__ __forceinline__ void hold(float (&d)[1][N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    float (&x)[4] = d[0][n];
    asm volatile("" : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])::"memory");
  }
}
"""


def define_descriptor(out: Writer, panel: Panel) -> None:
    """Define the descriptor of a tile that lies in such panels."""
    first = f"uint64_t({panel.layout_type}) << 62 | uint64_t({panel.core_bytes} >> 4) << 32"
    out.line()
    out.line(
        f"// a tile with {panel.row_bytes}-byte swizzle: its address, and the bytes between its "
        "panels (where it is read"
    )
    out.line("// down its rows) in units of 16")
    with out.block(
        "__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address, uint32_t "
        "panel_bytes)"
    ):
        out.line(f"return {first} | uint64_t(panel_bytes >> 4) << 16 |")
        out.line("       uint64_t((address & 0x3ffff) >> 4);")


def define_product(
    out: Writer, dtype: DType, columns: int, a_in_registers: bool, b_rows: bool
) -> None:
    """Define one wgmma of 64 x columns x 16.

    `b_rows` says that B lies row by row (keys by head dim, as V does) instead of column by column.
    """
    count = columns // 2
    name = product_name(columns, a_in_registers, b_rows)
    a = "uint32_t const (&a)[4]" if a_in_registers else "uint64_t a"
    out.line()
    out.line(f"// d (+)= a.b, 64 x {columns} x 16; keep = 0 starts from zero")
    out.line(f"template <int N>  // d may be wider: its first {columns} columns are used")
    with out.block(
        f"__device__ __forceinline__ void {name}(float (&d)[1][N][4], {a}, uint64_t b, int keep)"
    ):
        registers = ", ".join(f"%{k}" for k in range(count))
        first = (
            f"{{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}"
            if a_in_registers
            else f"%{count}"
        )
        after = count + (4 if a_in_registers else 1)
        kind = TYPES[dtype]
        out.line("asm volatile(")
        out.line(f'    "{{.reg .pred p; setp.ne.b32 p, %{after + 1}, 0;"')
        out.line(f'    "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "')
        out.line(f'    "{{{registers}}}, "')
        transpose = f", {int(b_rows)}" if a_in_registers else f", 0, {int(b_rows)}"
        out.line(f'    "{first}, %{after}, p, 1, 1{transpose};}}"')
        operands = [f'"+f"(d[0][{k // 4}][{k % 4}])' for k in range(count)]
        for k in range(0, count, 8):
            out.line(f"    {':' if k == 0 else ' '} {', '.join(operands[k : k + 8])}"
                     + ("," if k + 8 < count else ""))  # fmt: skip
        inputs = ", ".join(f'"r"(a[{k}])' for k in range(4)) if a_in_registers else '"l"(a)'
        out.line(f'    : {inputs}, "l"(b), "r"(keep));')


def product_name(columns: int, a_in_registers: bool, b_rows: bool) -> str:
    """Name of the device function for one wgmma."""
    return f"wgmma_64x{columns}x16_{'rs' if a_in_registers else 'ss'}{'_rows' if b_rows else ''}"
