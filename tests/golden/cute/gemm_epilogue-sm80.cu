// mha-fp16-d64-full for sm_80
// BM=128 BN=64 blocks_per_sm=1 causal_longest_first=0 epilogue_smem=1 head_group=1 p_in_registers=1 peel=1 q_in_registers=0 rescale_threshold=0 stages=1 swizzle=128 warps=4
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>
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

// two floats to two fp16, the first in the low half
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float2 unpack(uint32_t x) {
  float2 r;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(r.x), "=f"(r.y) : "r"(x));
  return r;
}

// c += a.b, 16x8x16; a holds rows (0-7, 8-15) x columns (0-7, 8-15)
__device__ __forceinline__ void mma(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  SM80_16x8x16_F32F16F16F32_TN::fma(c[0], c[1], c[2], c[3],
      a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]);
}
// the same for a last step of 8 columns
__device__ __forceinline__ void mma(float (&c)[4], uint32_t const (&a)[2], uint32_t b) {
  SM80_16x8x8_F32F16F16F32_TN::fma(c[0], c[1], c[2], c[3],
      a[0], a[1], b, c[0], c[1], c[2], c[3]);
}

extern "C" __global__ void __launch_bounds__(128, 1)
forward(
    uint16_t const* __restrict__ gA,
    uint16_t const* __restrict__ gB,
    uint16_t* __restrict__ gC,
    int64_t A_stride_b,
    int64_t A_stride_s,
    int64_t A_stride_h,
    int64_t B_stride_b,
    int64_t B_stride_s,
    int64_t B_stride_h,
    int64_t C_stride_b,
    int64_t C_stride_s,
    int64_t C_stride_h,
    int M,
    int N,
    int heads,
    int group
) {
  int const tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  uint32_t const smem_at = cast_smem_ptr_to_uint(smem);
  int const row_blocks = ceil_div(M, 128);
  int const column_blocks = ceil_div(N, 64);
  int const planes = gridDim.x / (row_blocks * column_blocks);  // heads x batch
  int rest = blockIdx.x;
  int const block_n = rest % column_blocks;
  rest /= column_blocks;
  int const row = rest % row_blocks, plane = rest / row_blocks;
  int const block_idx = row;
  int const head = plane % heads, batch = plane / heads;
  int const row0 = block_idx * 128;
  gA += batch * A_stride_b + (head) * A_stride_h;
  gB += batch * B_stride_b + (head / group) * B_stride_h;
  float C[2][8][4];
  uint32_t A_lanes_a[1];
  #pragma unroll
  for (int j = 0; j < 1; ++j) {
    A_lanes_a[j] = pin(smem_at + 0 + ((lane & 15) + warp * 32) * 80 + ((lane >> 4) * 16 ^ j * 32));
  }
  uint32_t B_lanes_bt[1];
  #pragma unroll
  for (int j = 0; j < 1; ++j) {
    B_lanes_bt[j] = pin(smem_at + 10240 + (((lane & 7) + (lane >> 4) * 8)) * 80 + (((lane >> 3) & 1) * 16 ^ j * 32));
  }
  // TL 2: Compute Fill C, 0.0
  #pragma unroll
  for (int m = 0; m < 2; ++m) {
    #pragma unroll
    for (int n = 0; n < 8; ++n) {
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        C[m][n][e] = 0.f;
      }
    }
  }
   {
    int const k__lo = 0;
    int const k__hi = ceil_div(64, 32);
    uint32_t const A_to = pin(smem_at + 0 + (tid / 4) * 80 + (tid % 4) * 16);
    auto copy_A = [&](int index) {
      uint32_t const stage = 0;
      int const row0 = tid / 4, chunk = tid % 4;
      int const left = M - ((block_idx) * 128) - row0;
      auto from = gA + int64_t((block_idx) * 128 + row0) * A_stride_s + (index) * 32 + chunk * 8;
      #pragma unroll
      for (int pass = 0; pass < 4; ++pass) {
        uint32_t const at = A_to + pass * 2560;
        bool const valid = pass * 32 < left && (index) * 32 + chunk * 8 < 64;
        SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(
            *reinterpret_cast<uint128_t const*>(from), chunk_at(at + stage), valid);
        from += 32 * A_stride_s;
      }
    };
    uint32_t const B_to = pin(smem_at + 10240 + (tid / 4) * 80 + (tid % 4) * 16);
    auto copy_B = [&](int index) {
      uint32_t const stage = 0;
      int const row0 = tid / 4, chunk = tid % 4;
      int const left = N - ((block_n) * 64) - row0;
      auto from = gB + int64_t((block_n) * 64 + row0) * B_stride_s + (index) * 32 + chunk * 8;
      #pragma unroll
      for (int pass = 0; pass < 2; ++pass) {
        uint32_t const at = B_to + pass * 2560;
        bool const valid = pass * 32 < left && (index) * 32 + chunk * 8 < 64;
        SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(
            *reinterpret_cast<uint128_t const*>(from), chunk_at(at + stage), valid);
        from += 32 * B_stride_s;
      }
    };
    if (k__lo < k__hi) copy_A(k__lo);
    if (k__lo < k__hi) copy_B(k__lo);
    cp_async_fence();
    int k_ = k__lo;
    // TL 2: for k_ = 0:64 / 32
    for (; k_ < k__hi; ++k_) {
      // TL 3: Copy A (128, 32) in coordinate [L = block_idx, D = k_] from global to shared
      // TL 4: Copy B (64, 32) in coordinate [L = block_n, D = k_] from global to shared
      cp_async_wait<0>();
      __syncthreads();
      // TL 5: Compute GEMM A, B.T and accumulate C
       {
        #pragma unroll
        for (int k = 0; k < 2; ++k) {
          uint32_t a[2][4];
          #pragma unroll
          for (int m = 0; m < 2; ++m) {
            ldsm(a[m], A_lanes_a[0] + k * 32 + m * 1280);
          }
          #pragma unroll
          for (int n = 0; n < 4; ++n) {
            uint32_t b[4];
            ldsm(b, B_lanes_bt[0] + k * 32 + n * 1280);
            #pragma unroll
            for (int m = 0; m < 2; ++m) {
              mma(C[m][n * 2], a[m], b[0], b[1]);
              mma(C[m][n * 2 + 1], a[m], b[2], b[3]);
            }
          }
        }
      }
      cp_async_wait<0>();
      __syncthreads();
      if (k_ + 1 < k__hi) copy_A(k_ + 1);
      if (k_ + 1 < k__hi) copy_B(k_ + 1);
      cp_async_fence();
    }
  }
  // TL 7: Compute Relu C
  #pragma unroll
  for (int m = 0; m < 2; ++m) {
    #pragma unroll
    for (int n = 0; n < 8; ++n) {
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        C[m][n][e] = fmaxf(C[m][n][e], 0.f);
      }
    }
  }
  // TL 8: Copy C (128, 64) in coordinate [L = block_idx, D = block_n] from register to global
  cp_async_wait<0>();
  __syncthreads();  // the tiles below are read no more
  #pragma unroll
  for (int m = 0; m < 2; ++m) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      int const row = warp * 32 + m * 16 + r * 8 + lane / 4;
      #pragma unroll
      for (int n = 0; n < 8; ++n) {
        *reinterpret_cast<uint32_t*>(smem + row * 128 + (n ^ (row & 7)) * 16 + (lane & 3) * 4) = pack(C[m][n][r * 2 + 0], C[m][n][r * 2 + 1]);
      }
    }
  }
  __syncwarp();
  #pragma unroll
  for (int pass = 0; pass < 8; ++pass) {
    int const at = pass * 32 + lane, own = at / 8, chunk = at % 8;
    int const row = warp * 32 + own;
    if ((block_idx) * 128 + row < M && (block_n) * 64 + chunk * 8 < N) {
      *reinterpret_cast<uint128_t*>(gC + batch * C_stride_b + head * C_stride_h + int64_t((block_idx) * 128 + row) * C_stride_s + (block_n) * 64 + chunk * 8) =
          chunk_at(smem_at + row * 128 + (chunk ^ (row & 7)) * 16);
    }
  }
}
