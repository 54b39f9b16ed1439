// mha-fp16-d64-full for sm_80
// BM=128 BN=64 blocks_per_sm=1 causal_longest_first=0 epilogue_smem=1 head_group=1 num_splits=2 p_in_registers=1 peel=1 q_in_registers=0 rescale_threshold=0 stages=1 swizzle=128 warps=4
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
partial(
    uint16_t const* __restrict__ gQ,
    uint16_t const* __restrict__ gK,
    uint16_t const* __restrict__ gV,
    float* __restrict__ gO_s,
    float* __restrict__ glse_s,
    int64_t Q_stride_b,
    int64_t Q_stride_s,
    int64_t Q_stride_h,
    int64_t K_stride_b,
    int64_t K_stride_s,
    int64_t K_stride_h,
    int64_t V_stride_b,
    int64_t V_stride_s,
    int64_t V_stride_h,
    int M,
    int N,
    int heads,
    int group,
    float scale
) {
  int const tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  uint32_t const smem_at = cast_smem_ptr_to_uint(smem);
  int const row_blocks = ceil_div(M, 128);
  int const splits = 2;
  int const planes = gridDim.x / (row_blocks * splits);  // heads x batch
  int rest = blockIdx.x;
  int const split = rest % splits;
  rest /= splits;
  int const row = rest % row_blocks, plane = rest / row_blocks;
  int const block_idx = row;
  int const head = plane % heads, batch = plane / heads;
  int const row0 = block_idx * 128;
  gQ += batch * Q_stride_b + (head) * Q_stride_h;
  gK += batch * K_stride_b + (head / group) * K_stride_h;
  gV += batch * V_stride_b + (head / group) * V_stride_h;
  float O_s[2][8][4];
  float S[2][8][4];
  float l_[2][2];
  float m_[2][2];
  float m_cur[2][2];
  float m_new[2][2];
  float alpha[2][2];
  float l_cur[2][2];
  float lse_s[2][2];
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
  // TL 4: Copy Q (128, 64) in coordinate [L = block_idx] from global to shared
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
  // TL 5: Compute Fill O_s, 0.0
  #pragma unroll
  for (int m = 0; m < 2; ++m) {
    #pragma unroll
    for (int n = 0; n < 8; ++n) {
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        O_s[m][n][e] = 0.f;
      }
    }
  }
  // TL 5: Compute Fill l_, 0.0
  #pragma unroll
  for (int m = 0; m < 2; ++m) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      l_[m][r] = 0.f;
    }
  }
  // TL 5: Compute Fill m_, -inf
  #pragma unroll
  for (int m = 0; m < 2; ++m) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      m_[m][r] = -INFINITY;
    }
  }
   {
    int const tiles = ceil_div(N, 64);
    int const tiles_per_split = ceil_div(tiles, splits);
    int const i_lo = split * tiles_per_split;
    int const i_hi = min(tiles, i_lo + tiles_per_split);
    int const i_full = min(i_hi, N / 64);
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
    // TL 5: for i = split_start:split_end  (tiles that no mask touches)
    for (; i < i_full; ++i) {
      // TL 6: Copy K (64, 64) in coordinate [L = i] from global to shared
      cp_async_wait<0>();
      __syncthreads();
      if (i < i_hi) copy_V(i);
      cp_async_fence();
      // TL 7: Compute GEMM Q, K.T and get S
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
      // TL 8: Compute Scale S, scale
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            S[m][n][e] = S[m][n][e] * scale;
          }
        }
      }
      // TL 9: Compute RowMax S and get m_cur
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          float x = -INFINITY;
          #pragma unroll
          for (int n = 0; n < 8; ++n) {
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
              x = fmaxf(x, S[m][n][r * 2 + c]);
            }
          }
          m_cur[m][r] = quad_max(x);
        }
      }
      // TL 10: Compute Max m_, m_cur and get m_new
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          m_new[m][r] = fmaxf(m_[m][r], m_cur[m][r]);
        }
      }
      // TL 11: Compute Subtract m_, m_new and get alpha
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          alpha[m][r] = minus(m_[m][r], m_new[m][r]);
        }
      }
      // TL 12: Compute Exp alpha
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          alpha[m][r] = exp2_approx(alpha[m][r] * 1.44269504089f);
        }
      }
      // TL 13: Compute Subtract S, m_new and get new S
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            S[m][n][e] = minus(S[m][n][e], m_new[m][e >> 1]);
          }
        }
      }
      // TL 14: Compute Exp S
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            S[m][n][e] = exp2_approx(S[m][n][e] * 1.44269504089f);
          }
        }
      }
      // TL 15: Compute RowSum S and get l_cur
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          float x = 0.f;
          #pragma unroll
          for (int n = 0; n < 8; ++n) {
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
              x = x + S[m][n][r * 2 + c];
            }
          }
          l_cur[m][r] = quad_sum(x);
        }
      }
      // TL 16: Compute Multiply l_, alpha and get new l_
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          l_[m][r] = l_[m][r] * alpha[m][r];
        }
      }
      // TL 17: Compute Add l_, l_cur and get new l_
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          l_[m][r] = l_[m][r] + l_cur[m][r];
        }
      }
      // TL 18: Compute Multiply O_s, alpha and get new O_s
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            O_s[m][n][e] = O_s[m][n][e] * alpha[m][e >> 1];
          }
        }
      }
      // TL 19: Copy V (64, 64) in coordinate [L = i] from global to shared
      cp_async_wait<0>();
      __syncthreads();
      if (i + 1 < i_hi) copy_K(i + 1);
      cp_async_fence();
      // TL 20: Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
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
      // TL 21: Compute GEMM S, V and accumulate O_s
       {
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          #pragma unroll
          for (int n = 0; n < 4; ++n) {
            uint32_t b[4];
            ldsm_t(b, V_lanes_b[n % 4] + n / 4 * 128 + k * 2048);
            #pragma unroll
            for (int m = 0; m < 2; ++m) {
              mma(O_s[m][n * 2], S_a[m][k], b[0], b[1]);
              mma(O_s[m][n * 2 + 1], S_a[m][k], b[2], b[3]);
            }
          }
        }
      }
      // TL 22: Copy m_new to m_
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          m_[m][r] = m_new[m][r];
        }
      }
    }
    // TL 5: for i = split_start:split_end  (tiles on the mask's edge)
    for (; i < i_hi; ++i) {
      // TL 6: Copy K (64, 64) in coordinate [L = i] from global to shared
      cp_async_wait<0>();
      __syncthreads();
      if (i < i_hi) copy_V(i);
      cp_async_fence();
      // TL 7: Compute GEMM Q, K.T and get S
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
      // TL 8: Compute Scale S, scale
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            S[m][n][e] = S[m][n][e] * scale;
          }
        }
      }
      // keys of tile i that a row must not see
       {
        #pragma unroll
        for (int m = 0; m < 2; ++m) {
          #pragma unroll
          for (int r = 0; r < 2; ++r) {
            int const row = row0 + warp * 32 + m * 16 + r * 8 + lane / 4;
            int const last = N - 1 - (i * 64 + (lane & 3) * 2);
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
      // TL 9: Compute RowMax S and get m_cur
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          float x = -INFINITY;
          #pragma unroll
          for (int n = 0; n < 8; ++n) {
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
              x = fmaxf(x, S[m][n][r * 2 + c]);
            }
          }
          m_cur[m][r] = quad_max(x);
        }
      }
      // TL 10: Compute Max m_, m_cur and get m_new
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          m_new[m][r] = fmaxf(m_[m][r], m_cur[m][r]);
        }
      }
      // TL 11: Compute Subtract m_, m_new and get alpha
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          alpha[m][r] = minus(m_[m][r], m_new[m][r]);
        }
      }
      // TL 12: Compute Exp alpha
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          alpha[m][r] = exp2_approx(alpha[m][r] * 1.44269504089f);
        }
      }
      // TL 13: Compute Subtract S, m_new and get new S
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            S[m][n][e] = minus(S[m][n][e], m_new[m][e >> 1]);
          }
        }
      }
      // TL 14: Compute Exp S
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            S[m][n][e] = exp2_approx(S[m][n][e] * 1.44269504089f);
          }
        }
      }
      // TL 15: Compute RowSum S and get l_cur
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          float x = 0.f;
          #pragma unroll
          for (int n = 0; n < 8; ++n) {
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
              x = x + S[m][n][r * 2 + c];
            }
          }
          l_cur[m][r] = quad_sum(x);
        }
      }
      // TL 16: Compute Multiply l_, alpha and get new l_
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          l_[m][r] = l_[m][r] * alpha[m][r];
        }
      }
      // TL 17: Compute Add l_, l_cur and get new l_
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          l_[m][r] = l_[m][r] + l_cur[m][r];
        }
      }
      // TL 18: Compute Multiply O_s, alpha and get new O_s
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            O_s[m][n][e] = O_s[m][n][e] * alpha[m][e >> 1];
          }
        }
      }
      // TL 19: Copy V (64, 64) in coordinate [L = i] from global to shared
      cp_async_wait<0>();
      __syncthreads();
      if (i + 1 < i_hi) copy_K(i + 1);
      cp_async_fence();
      // TL 20: Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
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
      // TL 21: Compute GEMM S, V and accumulate O_s
       {
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          #pragma unroll
          for (int n = 0; n < 4; ++n) {
            uint32_t b[4];
            ldsm_t(b, V_lanes_b[n % 4] + n / 4 * 128 + k * 2048);
            #pragma unroll
            for (int m = 0; m < 2; ++m) {
              mma(O_s[m][n * 2], S_a[m][k], b[0], b[1]);
              mma(O_s[m][n * 2 + 1], S_a[m][k], b[2], b[3]);
            }
          }
        }
      }
      // TL 22: Copy m_new to m_
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          m_[m][r] = m_new[m][r];
        }
      }
    }
  }
  // TL 24: Compute Divide O_s, l_ and get new O_s
  #pragma unroll
  for (int m = 0; m < 2; ++m) {
    #pragma unroll
    for (int n = 0; n < 8; ++n) {
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        O_s[m][n][e] = over(O_s[m][n][e], l_[m][e >> 1]);
      }
    }
  }
  // TL 25: Compute Log l_ and get lse_s
  #pragma unroll
  for (int m = 0; m < 2; ++m) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      lse_s[m][r] = __logf(l_[m][r]);
    }
  }
  // TL 26: Compute Add lse_s, m_ and get new lse_s
  #pragma unroll
  for (int m = 0; m < 2; ++m) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      lse_s[m][r] = lse_s[m][r] + m_[m][r];
    }
  }
  // TL 27: Copy O_s (128, 64) in coordinate [L = block_idx, splits = split] from register to global
  #pragma unroll
  for (int m = 0; m < 2; ++m) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      int const row = (block_idx) * 128 + warp * 32 + m * 16 + r * 8 + lane / 4;
      #pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (row < M) {
          *reinterpret_cast<float2*>(gO_s + ((int64_t(split) * planes + plane) * M + (row)) * 64 + n * 8 + (lane & 3) * 2) = {O_s[m][n][r * 2 + 0], O_s[m][n][r * 2 + 1]};
        }
      }
    }
  }
  // TL 28: Copy lse_s (128, 1) in coordinate [L = block_idx, splits = split] from register to global
  #pragma unroll
  for (int m = 0; m < 2; ++m) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      int const row = (block_idx) * 128 + warp * 32 + m * 16 + r * 8 + lane / 4;
      if (lane % 4 == 0 && row < M) *(glse_s + ((int64_t(split) * planes + plane) * M + (row)) * 1 + 0) = lse_s[m][r];
    }
  }
}

extern "C" __global__ void __launch_bounds__(128, 1)
combine(
    float* __restrict__ glse_s,
    float* __restrict__ gO_s,
    uint16_t* __restrict__ gO,
    int64_t O_stride_b,
    int64_t O_stride_s,
    int64_t O_stride_h,
    int M,
    int N,
    int heads,
    int group
) {
  int const tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  uint32_t const smem_at = cast_smem_ptr_to_uint(smem);
  int const row_blocks = ceil_div(M, 128);
  int const planes = gridDim.x / (row_blocks);  // heads x batch
  int rest = blockIdx.x;
  int const row = rest % row_blocks, plane = rest / row_blocks;
  int const block_idx = row;
  int const head = plane % heads, batch = plane / heads;
  int const row0 = block_idx * 128;
  float O[2][8][4];
  float O_s[2][8][4];
  float lse_max[2][2];
  float lse_s[2][2];
  float w_sum_[2][2];
  float w[2][2];
  // TL 31: Compute Fill lse_max, -inf
  #pragma unroll
  for (int m = 0; m < 2; ++m) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      lse_max[m][r] = -INFINITY;
    }
  }
   {
    int const s_lo = 0;
    int const s_hi = 2;
    int s = s_lo;
    // TL 31: for s = 0:2
    for (; s < s_hi; ++s) {
      // TL 32: Copy lse_s (128, 1) in coordinate [L = block_idx, splits = s] from global to register
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          int const row = (block_idx) * 128 + warp * 32 + m * 16 + r * 8 + lane / 4;
          lse_s[m][r] = row < M ? *(glse_s + ((int64_t(s) * planes + plane) * M + (row)) * 1 + 0) : 0.f;
        }
      }
      // TL 33: Compute Max lse_max, lse_s
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          lse_max[m][r] = fmaxf(lse_max[m][r], lse_s[m][r]);
        }
      }
    }
  }
  // TL 35: Compute Fill O, 0.0
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
  // TL 35: Compute Fill w_sum_, 0.0
  #pragma unroll
  for (int m = 0; m < 2; ++m) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      w_sum_[m][r] = 0.f;
    }
  }
   {
    int const s_lo = 0;
    int const s_hi = 2;
    int s = s_lo;
    // TL 35: for s = 0:2
    for (; s < s_hi; ++s) {
      // TL 36: Copy O_s (128, 64) in coordinate [L = block_idx, splits = s] from global to register
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          int const row = (block_idx) * 128 + warp * 32 + m * 16 + r * 8 + lane / 4;
          #pragma unroll
          for (int n = 0; n < 8; ++n) {
            float2 const x = row < M ? *reinterpret_cast<float2 const*>(gO_s + ((int64_t(s) * planes + plane) * M + (row)) * 64 + n * 8 + (lane & 3) * 2) : float2{0.f, 0.f};
            O_s[m][n][r * 2] = x.x;
            O_s[m][n][r * 2 + 1] = x.y;
          }
        }
      }
      // TL 37: Copy lse_s (128, 1) in coordinate [L = block_idx, splits = s] from global to register
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          int const row = (block_idx) * 128 + warp * 32 + m * 16 + r * 8 + lane / 4;
          lse_s[m][r] = row < M ? *(glse_s + ((int64_t(s) * planes + plane) * M + (row)) * 1 + 0) : 0.f;
        }
      }
      // TL 38: Compute Subtract lse_s, lse_max and get w
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          w[m][r] = minus(lse_s[m][r], lse_max[m][r]);
        }
      }
      // TL 39: Compute Exp w
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          w[m][r] = exp2_approx(w[m][r] * 1.44269504089f);
        }
      }
      // TL 40: Compute Multiply O_s, w and get new O_s
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            O_s[m][n][e] = O_s[m][n][e] * w[m][e >> 1];
          }
        }
      }
      // TL 41: Compute Add O, O_s and get new O
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            O[m][n][e] = O[m][n][e] + O_s[m][n][e];
          }
        }
      }
      // TL 42: Compute Add w_sum_, w and get new w_sum_
      #pragma unroll
      for (int m = 0; m < 2; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          w_sum_[m][r] = w_sum_[m][r] + w[m][r];
        }
      }
    }
  }
  // TL 44: Compute Divide O, w_sum_ and get new O
  #pragma unroll
  for (int m = 0; m < 2; ++m) {
    #pragma unroll
    for (int n = 0; n < 8; ++n) {
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        O[m][n][e] = over(O[m][n][e], w_sum_[m][e >> 1]);
      }
    }
  }
  // TL 45: Copy O (128, 64) in coordinate [L = block_idx] from register to global
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
