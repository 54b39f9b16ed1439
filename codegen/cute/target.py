"""What differs between the generations that share warp-level MMA: atoms and copies."""

from __future__ import annotations

from typing import Protocol

from codegen.cute.copies import Source
from codegen.cute.plan import Buffer
from codegen.cute.row_copies import Gathered
from codegen.cute.writer import Writer
from space.variant import DType

#: C++ element type and its conversion from two floats, low half first
ELEMENT = {DType.FP16: "half", DType.BF16: "bfloat16"}

BARRIER = "__syncthreads();"


class Target(Protocol):
    """One generation: prelude, and how a tile travels from global to shared memory."""

    arch: str
    asynchronous: bool

    def prelude(self, out: Writer, dtype: DType) -> None:
        """Write the includes and the device functions that the statements call."""

    def define_copy(
        self, out: Writer, buffer: Buffer, threads: int, source: Source | Gathered
    ) -> None:
        """Define how `buffer` is filled: the lambdas `issue` and `land` call."""

    def issue(self, buffer: Buffer, index: str) -> str:
        """Start copying tile `index` of `buffer`."""

    def land(
        self,
        out: Writer,
        buffers: tuple[Buffer, ...],
        index: str,
        pending: int,
        meet: str = BARRIER,
    ) -> None:
        """Make tile `index` of each buffer visible to all threads of the block, who `meet` last."""


COMMON_PRELUDE = """
using namespace cute;

#define INFINITY __int_as_float(0x7f800000)

extern __shared__ __align__(128) unsigned char smem[];

// shared memory by its 32-bit address
__device__ __forceinline__ uint128_t& chunk_at(uint32_t address) {
  return *static_cast<uint128_t*>(__cvta_shared_to_generic(address));
}
// an address the compiler must not split up again: offsets from it stay immediate operands
__device__ __forceinline__ uint32_t pin(uint32_t address) {
  asm("" : "+r"(address));
  return address;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// a row that has seen nothing stays at minus infinity, and anything over nothing is 0
__device__ __forceinline__ float minus(float a, float b) {
  return a == -INFINITY && b == -INFINITY ? -INFINITY : a - b;
}
__device__ __forceinline__ float over(float a, float b) { return b == 0.f ? 0.f : a / b; }

// a row's elements are spread over the four lanes of a quad
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
"""

LDMATRIX_PRELUDE = """
// 8x8 matrices of 16-bit elements: one row's chunk address from each lane
__device__ __forceinline__ void ldsm(uint32_t (&r)[4], uint32_t address) {
  SM75_U32x4_LDSM_N::copy(chunk_at(address), r[0], r[1], r[2], r[3]);
}
__device__ __forceinline__ void ldsm(uint32_t (&r)[2], uint32_t address) {
  SM75_U32x2_LDSM_N::copy(chunk_at(address), r[0], r[1]);
}
__device__ __forceinline__ void ldsm_t(uint32_t (&r)[4], uint32_t address) {
  SM75_U16x8_LDSM_T::copy(chunk_at(address), r[0], r[1], r[2], r[3]);
}
__device__ __forceinline__ void ldsm_t(uint32_t (&r)[2], uint32_t address) {
  SM75_U16x4_LDSM_T::copy(chunk_at(address), r[0], r[1]);
}
"""

PACK = {
    ("async", DType.BF16): """
// two floats to two bf16, the first in the low half
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
""",
    ("async", DType.FP16): """
// two floats to two fp16, the first in the low half
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
""",
    ("staged", DType.FP16): """
// two floats to two fp16, the first in the low half
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint16_t a, b;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(a) : "f"(low));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(b) : "f"(high));
  return uint32_t(a) | uint32_t(b) << 16;
}
""",
}

UNPACK = {
    DType.BF16: """
__device__ __forceinline__ float2 unpack(uint32_t x) {
  return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}
""",
    DType.FP16: """
__device__ __forceinline__ float2 unpack(uint32_t x) {
  float2 r;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(r.x), "=f"(r.y) : "r"(x));
  return r;
}
""",
}
