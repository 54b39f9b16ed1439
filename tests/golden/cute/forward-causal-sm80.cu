// mha-fp16-d64-causal for sm_80
// BM=128 BN=64 blocks_per_sm=1 causal_longest_first=1 epilogue_smem=1 head_group=1 p_in_registers=1 peel=1 q_in_registers=0 rescale_threshold=0 stages=1 swizzle=128 warps=4
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
    uint16_t const* __restrict__ gQ,
    uint16_t const* __restrict__ gK,
    uint16_t const* __restrict__ gV,
    uint16_t* __restrict__ gO,
    int64_t Q_stride_b,
    int64_t Q_stride_s,
    int64_t Q_stride_h,
    int64_t K_stride_b,
    int64_t K_stride_s,
    int64_t K_stride_h,
    int64_t V_stride_b,
    int64_t V_stride_s,
    int64_t V_stride_h,
    int64_t O_stride_b,
    int64_t O_stride_s,
    int64_t O_stride_h,
    int M,
    int N,
    int heads,
    int group,
    float scale
) {
  int const tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  uint32_t const smem_at = cast_smem_ptr_to_uint(smem);
  int const row_blocks = ceil_div(M, 128);
  int const planes = gridDim.x / (row_blocks);  // heads x batch
  int rest = blockIdx.x;
  int const row = rest % row_blocks, plane = rest / row_blocks;
  int const block_idx = row_blocks - 1 - row;
  int const head = plane % heads, batch = plane / heads;
  int const row0 = block_idx * 128;
  gQ += batch * Q_stride_b + (head) * Q_stride_h;
  gK += batch * K_stride_b + (head / group) * K_stride_h;
  gV += batch * V_stride_b + (head / group) * V_stride_h;
  float O[2][8][4];
  float S[2][8][4];
  uint32_t Q_lanes_a[4];
  #pragma unroll
  for (int j = 0; j < 4; ++j) {
    Q_lanes_a[j] = pin(smem_at + 0 + ((lane & 15) + warp * 32) * 128 + (((lane >> 4) ^ ((lane & 15) & 7)) * 16 ^ j * 32));
  }
  uint32_t K_lanes_bt[4];
  #pragma unroll
  for (int j = 0; j < 4; ++j) {
    K_lanes_bt[j] = pin(smem_at + 16384 + (((lane & 7) + (lane >> 4) * 8)) * 128 + ((((lane >> 3) & 1) ^ (((lane & 7) + (lane >> 4) * 8) & 7)) * 16 ^ j * 32));
  }
  uint32_t V_lanes_b[4];
  #pragma unroll
  for (int j = 0; j < 4; ++j) {
    V_lanes_b[j] = pin(smem_at + 24576 + ((lane & 15)) * 128 + (((lane >> 4) ^ ((lane & 15) & 7)) * 16 ^ j * 32));
  }
  // 2^(S * log2): a scale of 0 must not turn masked scores into NaN
  float const S_log2 = fmaxf(fabsf(scale), 1e-37f) * 1.44269504089f;
  float S_max[2][2], S_shift[2][2], S_sum[2][2];
  bool S_huge = false;
  #pragma unroll
  for (int m = 0; m < 2; ++m) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      S_max[m][r] = -INFINITY;
      S_shift[m][r] = 0.f;
      S_sum[m][r] = 0.f;
    }
  }
  int const diagonal = N - M;  // bottom-right: row r sees keys up to r + this
  // TL 1: Copy Q (128, 64) in coordinate [L = block_idx] from global to shared
  uint32_t const Q_to = pin(smem_at + 0 + (tid / 8) * 128 + ((tid % 8) ^ ((tid / 8) & 7)) * 16);
  auto copy_Q = [&](int index) {
    uint32_t const stage = 0;
    int const row0 = tid / 8, chunk = tid % 8;
    int const left = M - ((block_idx) * 128) - row0;
    auto from = gQ + int64_t((block_idx) * 128 + row0) * Q_stride_s + chunk * 8;
    #pragma unroll
    for (int pass = 0; pass < 8; ++pass) {
      uint32_t const at = Q_to + pass * 2048;
      bool const valid = pass * 16 < left;
      SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(
          *reinterpret_cast<uint128_t const*>(from), chunk_at(at + stage), valid);
      from += 16 * Q_stride_s;
    }
  };
  copy_Q(0);
  cp_async_fence();
  // TL 2: Compute Fill O, 0.0
  #pragma unroll
  for (int m = 0; m < 2; ++m) {
    #pragma unroll
    for (int n = 0; n < 8; ++n) {
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        O[m][n][e] = 0.f;
      }
    }
  }
   {
    int const i_lo = 0;
    int const i_hi = ceil_div(min(N, max(0, min(row0 + 128, M) + diagonal)), 64);
    int const i_full = min(i_hi, min(N, max(0, row0 + diagonal + 1)) / 64);
    uint32_t const K_to = pin(smem_at + 16384 + (tid / 8) * 128 + ((tid % 8) ^ ((tid / 8) & 7)) * 16);
    auto copy_K = [&](int index) {
      uint32_t const stage = 0;
      int const row0 = tid / 8, chunk = tid % 8;
      int const left = N - ((index) * 64) - row0;
      auto from = gK + int64_t((index) * 64 + row0) * K_stride_s + chunk * 8;
      #pragma unroll
      for (int pass = 0; pass < 4; ++pass) {
        uint32_t const at = K_to + pass * 2048;
        bool const valid = pass * 16 < left;
        SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(
            *reinterpret_cast<uint128_t const*>(from), chunk_at(at + stage), valid);
        from += 16 * K_stride_s;
      }
    };
    uint32_t const V_to = pin(smem_at + 24576 + (tid / 8) * 128 + ((tid % 8) ^ ((tid / 8) & 7)) * 16);
    auto copy_V = [&](int index) {
      uint32_t const stage = 0;
      int const row0 = tid / 8, chunk = tid % 8;
      int const left = N - ((index) * 64) - row0;
      auto from = gV + int64_t((index) * 64 + row0) * V_stride_s + chunk * 8;
      #pragma unroll
      for (int pass = 0; pass < 4; ++pass) {
        uint32_t const at = V_to + pass * 2048;
        bool const valid = pass * 16 < left;
        SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(
            *reinterpret_cast<uint128_t const*>(from), chunk_at(at + stage), valid);
        from += 16 * V_stride_s;
      }
    };
    if (i_lo < i_hi) copy_K(i_lo);
    cp_async_fence();
    int i = i_lo;
    // TL 2: for i = 0:N / 64  (tiles that no mask touches)
    for (; i < i_full; ++i) {
      // TL 3: Copy K (64, 64) in coordinate [L = i] from global to shared
      cp_async_wait<0>();
      __syncthreads();
      if (i < i_hi) copy_V(i);
      cp_async_fence();
      // TL 4: Compute GEMM Q, K.T and get S
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            S[m][n][e] = 0.f;
          }
        }
      }
       {
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          uint32_t a[2][4];
          #pragma unroll
          for (int m = 0; m < 2; ++m) {
            ldsm(a[m], Q_lanes_a[k % 4] + k / 4 * 128 + m * 2048);
          }
          #pragma unroll
          for (int n = 0; n < 4; ++n) {
            uint32_t b[4];
            ldsm(b, K_lanes_bt[k % 4] + k / 4 * 128 + n * 2048);
            #pragma unroll
            for (int m = 0; m < 2; ++m) {
              mma(S[m][n * 2], a[m], b[0], b[1]);
              mma(S[m][n * 2 + 1], a[m], b[2], b[3]);
            }
          }
        }
      }
      // TL 5: Compute Scale S, scale
      // the factor is part of the softmax's exponent; only its sign is applied here
      if (scale < 0.f) {
        #pragma unroll
        for (int m = 0; m < 2; ++m) {
          #pragma unroll
          for (int n = 0; n < 8; ++n) {
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
              S[m][n][e] = -S[m][n][e];
            }
          }
        }
      }
      // TL 7: Compute Softmax S
      float S_top[2][2];
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          float x = fmaxf(S[m][0][r * 2], S[m][0][r * 2 + 1]);
          #pragma unroll
          for (int n = 1; n < 8; ++n) {
            x = fmaxf(x, fmaxf(S[m][n][r * 2], S[m][n][r * 2 + 1]));
          }
          S_top[m][r] = x;
        }
      }
       {
        bool huge = false;
        #pragma unroll
        for (int m = 0; m < 2; ++m) {
          #pragma unroll
          for (int r = 0; r < 2; ++r) {
            float const high = fmaxf(S_max[m][r], quad_max(S_top[m][r]));
            float const decay = high == -INFINITY ? 1.f : exp2_approx((S_max[m][r] - high) * S_log2);
            S_max[m][r] = high;
            S_shift[m][r] = high == -INFINITY ? 0.f : high * S_log2;
            huge |= fabsf(S_shift[m][r]) > 1048576.f;
            S_sum[m][r] *= decay;
            #pragma unroll
            for (int n = 0; n < 8; ++n) {
              O[m][n][r * 2] *= decay;
              O[m][n][r * 2 + 1] *= decay;
            }
          }
        }
        S_huge = __any_sync(~0u, huge);
        if (S_huge) {
          // products this large are not exact: subtract first
          #pragma unroll
          for (int m = 0; m < 2; ++m) {
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
              float const high = S_max[m][r] == -INFINITY ? 0.f : S_max[m][r];
              S_shift[m][r] = 0.f;
              #pragma unroll
              for (int n = 0; n < 8; ++n) {
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                  S[m][n][r * 2 + c] -= high;
                }
              }
            }
          }
        }
      }
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          float part[2] = {0.f, 0.f};  // two chains of additions
          #pragma unroll
          for (int n = 0; n < 8; ++n) {
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
              float& x = S[m][n][r * 2 + c];
              x = exp2_approx(fmaf(x, S_log2, -S_shift[m][r]));
              part[c] += x;
            }
          }
          S_sum[m][r] += part[0] + part[1];
        }
      }
      // TL 8: Copy V (64, 64) in coordinate [L = i] from global to shared
      cp_async_wait<0>();
      __syncthreads();
      if (i + 1 < i_hi) copy_K(i + 1);
      cp_async_fence();
      // TL 9: Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
      uint32_t S_a[2][4][4];
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          S_a[m][k][0] = pack(S[m][k * 2 + 0][0], S[m][k * 2 + 0][1]);
          S_a[m][k][1] = pack(S[m][k * 2 + 0][2], S[m][k * 2 + 0][3]);
          S_a[m][k][2] = pack(S[m][k * 2 + 1][0], S[m][k * 2 + 1][1]);
          S_a[m][k][3] = pack(S[m][k * 2 + 1][2], S[m][k * 2 + 1][3]);
        }
      }
      // TL 10: Compute GEMM S, V and accumulate O
       {
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          #pragma unroll
          for (int n = 0; n < 4; ++n) {
            uint32_t b[4];
            ldsm_t(b, V_lanes_b[n % 4] + n / 4 * 128 + k * 2048);
            #pragma unroll
            for (int m = 0; m < 2; ++m) {
              mma(O[m][n * 2], S_a[m][k], b[0], b[1]);
              mma(O[m][n * 2 + 1], S_a[m][k], b[2], b[3]);
            }
          }
        }
      }
    }
    // TL 2: for i = 0:N / 64  (tiles on the mask's edge)
    for (; i < i_hi; ++i) {
      // TL 3: Copy K (64, 64) in coordinate [L = i] from global to shared
      cp_async_wait<0>();
      __syncthreads();
      if (i < i_hi) copy_V(i);
      cp_async_fence();
      // TL 4: Compute GEMM Q, K.T and get S
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            S[m][n][e] = 0.f;
          }
        }
      }
       {
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          uint32_t a[2][4];
          #pragma unroll
          for (int m = 0; m < 2; ++m) {
            ldsm(a[m], Q_lanes_a[k % 4] + k / 4 * 128 + m * 2048);
          }
          #pragma unroll
          for (int n = 0; n < 4; ++n) {
            uint32_t b[4];
            ldsm(b, K_lanes_bt[k % 4] + k / 4 * 128 + n * 2048);
            #pragma unroll
            for (int m = 0; m < 2; ++m) {
              mma(S[m][n * 2], a[m], b[0], b[1]);
              mma(S[m][n * 2 + 1], a[m], b[2], b[3]);
            }
          }
        }
      }
      // TL 5: Compute Scale S, scale
      // the factor is part of the softmax's exponent; only its sign is applied here
      if (scale < 0.f) {
        #pragma unroll
        for (int m = 0; m < 2; ++m) {
          #pragma unroll
          for (int n = 0; n < 8; ++n) {
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
              S[m][n][e] = -S[m][n][e];
            }
          }
        }
      }
      // TL 6: Compute Mask S, causal
      // keys of tile i that a row must not see
       {
        #pragma unroll
        for (int m = 0; m < 2; ++m) {
          #pragma unroll
          for (int r = 0; r < 2; ++r) {
            int const row = row0 + warp * 32 + m * 16 + r * 8 + lane / 4;
            int const last = min(N - 1, row + diagonal) - (i * 64 + (lane & 3) * 2);
            #pragma unroll
            for (int n = 0; n < 8; ++n) {
              #pragma unroll
              for (int c = 0; c < 2; ++c) {
                if (n * 8 + c > last) S[m][n][r * 2 + c] = -INFINITY;
              }
            }
          }
        }
      }
      // TL 7: Compute Softmax S
      float S_top[2][2];
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          float x = fmaxf(S[m][0][r * 2], S[m][0][r * 2 + 1]);
          #pragma unroll
          for (int n = 1; n < 8; ++n) {
            x = fmaxf(x, fmaxf(S[m][n][r * 2], S[m][n][r * 2 + 1]));
          }
          S_top[m][r] = x;
        }
      }
       {
        bool huge = false;
        #pragma unroll
        for (int m = 0; m < 2; ++m) {
          #pragma unroll
          for (int r = 0; r < 2; ++r) {
            float const high = fmaxf(S_max[m][r], quad_max(S_top[m][r]));
            float const decay = high == -INFINITY ? 1.f : exp2_approx((S_max[m][r] - high) * S_log2);
            S_max[m][r] = high;
            S_shift[m][r] = high == -INFINITY ? 0.f : high * S_log2;
            huge |= fabsf(S_shift[m][r]) > 1048576.f;
            S_sum[m][r] *= decay;
            #pragma unroll
            for (int n = 0; n < 8; ++n) {
              O[m][n][r * 2] *= decay;
              O[m][n][r * 2 + 1] *= decay;
            }
          }
        }
        S_huge = __any_sync(~0u, huge);
        if (S_huge) {
          // products this large are not exact: subtract first
          #pragma unroll
          for (int m = 0; m < 2; ++m) {
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
              float const high = S_max[m][r] == -INFINITY ? 0.f : S_max[m][r];
              S_shift[m][r] = 0.f;
              #pragma unroll
              for (int n = 0; n < 8; ++n) {
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                  S[m][n][r * 2 + c] -= high;
                }
              }
            }
          }
        }
      }
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          float part[2] = {0.f, 0.f};  // two chains of additions
          #pragma unroll
          for (int n = 0; n < 8; ++n) {
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
              float& x = S[m][n][r * 2 + c];
              x = exp2_approx(fmaf(x, S_log2, -S_shift[m][r]));
              part[c] += x;
            }
          }
          S_sum[m][r] += part[0] + part[1];
        }
      }
      // TL 8: Copy V (64, 64) in coordinate [L = i] from global to shared
      cp_async_wait<0>();
      __syncthreads();
      if (i + 1 < i_hi) copy_K(i + 1);
      cp_async_fence();
      // TL 9: Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
      uint32_t S_a[2][4][4];
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          S_a[m][k][0] = pack(S[m][k * 2 + 0][0], S[m][k * 2 + 0][1]);
          S_a[m][k][1] = pack(S[m][k * 2 + 0][2], S[m][k * 2 + 0][3]);
          S_a[m][k][2] = pack(S[m][k * 2 + 1][0], S[m][k * 2 + 1][1]);
          S_a[m][k][3] = pack(S[m][k * 2 + 1][2], S[m][k * 2 + 1][3]);
        }
      }
      // TL 10: Compute GEMM S, V and accumulate O
       {
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          #pragma unroll
          for (int n = 0; n < 4; ++n) {
            uint32_t b[4];
            ldsm_t(b, V_lanes_b[n % 4] + n / 4 * 128 + k * 2048);
            #pragma unroll
            for (int m = 0; m < 2; ++m) {
              mma(O[m][n * 2], S_a[m][k], b[0], b[1]);
              mma(O[m][n * 2 + 1], S_a[m][k], b[2], b[3]);
            }
          }
        }
      }
    }
  }
  // TL 2: Compute Normalize O, S
  #pragma unroll
  for (int m = 0; m < 2; ++m) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      float const total = quad_sum(S_sum[m][r]);
      float const inverse = total == 0.f ? 0.f : 1.f / total;
      #pragma unroll
      for (int n = 0; n < 8; ++n) {
        O[m][n][r * 2] *= inverse;
        O[m][n][r * 2 + 1] *= inverse;
      }
    }
  }
  // TL 12: Copy O (128, 64) in coordinate [L = block_idx] from register to global
  cp_async_wait<0>();
  __syncthreads();  // the tiles below are read no more
  #pragma unroll
  for (int m = 0; m < 2; ++m) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      int const row = warp * 32 + m * 16 + r * 8 + lane / 4;
      #pragma unroll
      for (int n = 0; n < 8; ++n) {
        *reinterpret_cast<uint32_t*>(smem + row * 128 + (n ^ (row & 7)) * 16 + (lane & 3) * 4) = pack(O[m][n][r * 2 + 0], O[m][n][r * 2 + 1]);
      }
    }
  }
  __syncwarp();
  #pragma unroll
  for (int pass = 0; pass < 8; ++pass) {
    int const at = pass * 32 + lane, own = at / 8, chunk = at % 8;
    int const row = warp * 32 + own;
    if ((block_idx) * 128 + row < M) {
      *reinterpret_cast<uint128_t*>(gO + batch * O_stride_b + head * O_stride_h + int64_t((block_idx) * 128 + row) * O_stride_s + chunk * 8) =
          chunk_at(smem_at + row * 128 + (chunk ^ (row & 7)) * 16);
    }
  }
}
