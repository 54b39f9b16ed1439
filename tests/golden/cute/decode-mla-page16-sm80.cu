// mla-bf16-d576x512-full-decode-page16 for sm_80
// BM=32 BN=32 blocks_per_sm=1 column_warps=4 combine_groups=4 min_split_tiles=1 q_in_registers=0 rescale_threshold=8 split_blocks=1 stages=2 swizzle=128 warps=8
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

// two floats to two bf16, the first in the low half
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float2 unpack(uint32_t x) {
  return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}

// c += a.b, 16x8x16; a holds rows (0-7, 8-15) x columns (0-7, 8-15)
__device__ __forceinline__ void mma(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  SM80_16x8x16_F32BF16BF16F32_TN::fma(c[0], c[1], c[2], c[3],
      a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]);
}
// the same for a last step of 8 columns
__device__ __forceinline__ void mma(float (&c)[4], uint32_t const (&a)[2], uint32_t b) {
  SM80_16x8x8_F32BF16BF16F32_TN::fma(c[0], c[1], c[2], c[3],
      a[0], a[1], b, c[0], c[1], c[2], c[3]);
}

extern "C" __global__ void __launch_bounds__(256, 1)
partial(
    uint16_t const* __restrict__ gQ,
    uint16_t const* __restrict__ gK,
    float* __restrict__ gO_s,
    float* __restrict__ glse_s,
    uint16_t* __restrict__ gO,
    int64_t Q_stride_b,
    int64_t Q_stride_s,
    int64_t Q_stride_h,
    int64_t K_stride_b,
    int64_t K_stride_s,
    int64_t K_stride_h,
    int64_t O_stride_b,
    int64_t O_stride_s,
    int64_t O_stride_h,
    int M,
    int N,
    int group,
    int kv_heads,
    int rows,
    int splits,
    int batches,
    int const* __restrict__ key_counts,
    int const* __restrict__ pages,
    int64_t pages_stride,
    float scale
) {
  int const tid = threadIdx.x, lane = tid & 31;
  // a warp's rows, and its share of the keys in Q.K^T and of the columns in P.V
  int const warp = (tid >> 5) / 4, column_warp = (tid >> 5) % 4;
  uint32_t const smem_at = cast_smem_ptr_to_uint(smem);
  int const row_blocks = ceil_div(rows, 32);
  int rest = blockIdx.x;
  int const block_idx = rest % row_blocks;
  rest /= row_blocks;
  int const kv_head = rest % kv_heads;
  rest /= kv_heads;
  int const split = rest % splits;
  rest /= splits;
  int const batch = rest;
  int const row0 = block_idx * 32;  // row r is query r / group
  int const keys = key_counts == nullptr ? N : min(key_counts[batch], N);
  auto const table = pages + batch * pages_stride;
  // this split's rows in the workspaces
  int64_t const own_row0 = ((int64_t(split) * batches + batch) * kv_heads + kv_head) * rows;
  gK += kv_head * K_stride_h;
  float O_s[1][16][4];
  float S[1][1][4];
  float lse_s[1][2];
  uint32_t Q_lanes_a[4];
  #pragma unroll
  for (int j = 0; j < 4; ++j) {
    Q_lanes_a[j] = pin(smem_at + 0 + ((lane & 15) + warp * 16) * 1152 + (((lane >> 4) ^ ((lane & 15) & 7)) * 16 ^ j * 32));
  }
  uint32_t K_lanes_bt[4];
  #pragma unroll
  for (int j = 0; j < 4; ++j) {
    K_lanes_bt[j] = pin(smem_at + 36864 + (((lane & 7) + (lane >> 4) * 8) + column_warp * 8) * 1152 + ((((lane >> 3) & 1) ^ (((lane & 7) + (lane >> 4) * 8) & 7)) * 16 ^ j * 32));
  }
  uint32_t K_lanes_b[4];
  #pragma unroll
  for (int j = 0; j < 4; ++j) {
    K_lanes_b[j] = pin(smem_at + 36864 + ((lane & 15)) * 1152 + ((((lane >> 4) + column_warp * 16) ^ ((lane & 15) & 7)) * 16 ^ j * 32));
  }
  uint32_t S_lanes_a[1];
  #pragma unroll
  for (int j = 0; j < 1; ++j) {
    S_lanes_a[j] = pin(smem_at + 110592 + ((lane & 15) + warp * 16) * 80 + ((lane >> 4) * 16 ^ j * 32));
  }
  // 2^(S * log2): a scale of 0 must not turn masked scores into NaN
  float const S_log2 = fmaxf(fabsf(scale), 1e-37f) * 1.44269504089f;
  float const S_slack = 8.f / S_log2;
  float S_max[1][2], S_shift[1][2], S_sum[1][2];
  bool S_huge = false;
  #pragma unroll
  for (int m = 0; m < 1; ++m) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      S_max[m][r] = -INFINITY;
      S_shift[m][r] = 0.f;
      S_sum[m][r] = 0.f;
    }
  }
  float* const of_row = reinterpret_cast<float*>(smem + 113152) + (warp * 16 + lane / 4) * 4;
  auto share = [&](float x, int m, int r) {
    if (lane % 4 == 0) of_row[(m * 16 + r * 8) * 4 + column_warp] = x;
  };
  int const tiles = ceil_div(keys, 32);
  int const tiles_per_split = ceil_div(tiles, splits);
  int const i_lo = split * tiles_per_split;
  int const i_hi = min(tiles, i_lo + tiles_per_split);
  int const i_full = min(i_hi, keys / 32);
  // TL 2: Copy Q (32, 576) in coordinate [L = block_idx] from global to shared
  uint32_t const Q_to = pin(smem_at + 0 + (tid / 8) * 1152 + ((tid % 8) ^ ((tid / 8) & 7)) * 16);
  auto copy_Q = [&](int index) {
    uint32_t const stage = 0;
    int const chunk = tid % 8;
    #pragma unroll
    for (int step = 0; step < 1; ++step) {
      int const row = tid / 8 + step * 32;
      int const packed = row0 + row;
      bool const valid = packed < rows;
      auto const start = gQ + batch * Q_stride_b + int64_t(packed / group) * Q_stride_s + int64_t(kv_head * group + packed % group) * Q_stride_h + chunk * 8;
      #pragma unroll
      for (int segment = 0; segment < 9; ++segment) {
        int const pass = step * 9 + segment;
        uint32_t const at = Q_to + step * 36864 + segment * 128;
        auto const from = start + segment * 64;
        SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(
            *reinterpret_cast<uint128_t const*>(from), chunk_at(at + stage), valid);
      }
    }
  };
  copy_Q(0);
  cp_async_fence();
  // TL 3: Compute Fill O_s, 0.0
  #pragma unroll
  for (int m = 0; m < 1; ++m) {
    #pragma unroll
    for (int n = 0; n < 16; ++n) {
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        O_s[m][n][e] = 0.f;
      }
    }
  }
  uint32_t const K_to = pin(smem_at + 36864 + (tid / 8) * 1152 + ((tid % 8) ^ ((tid / 8) & 7)) * 16);
  auto copy_K = [&](int index) {
    uint32_t const stage = index % 2 * 36864;
    int const chunk = tid % 8;
    #pragma unroll
    for (int step = 0; step < 1; ++step) {
      int const row = tid / 8 + step * 32;
      uint32_t const key = (index) * 32 + row;
      bool const valid = key < uint32_t(keys);
      int64_t const page = valid ? __ldg(table + key / 16) : 0;
      auto const start = gK + page * K_stride_b + key % 16 * K_stride_s + chunk * 8;
      #pragma unroll
      for (int segment = 0; segment < 9; ++segment) {
        int const pass = step * 9 + segment;
        uint32_t const at = K_to + step * 36864 + segment * 128;
        auto const from = start + segment * 64;
        SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(
            *reinterpret_cast<uint128_t const*>(from), chunk_at(at + stage), valid);
      }
    }
  };
  if (i_lo < i_hi) copy_K(i_lo);
  cp_async_fence();
  // TL: for i = split_start:split_end
  for (int i = i_lo; i < i_hi; ++i) {
    // TL 4: Copy K (32, 576) in coordinate [L = i] from global to shared
    cp_async_wait<0>();
    __syncthreads();
    if (i + 1 < i_hi) copy_K(i + 1);
    cp_async_fence();
    // TL 5: Compute GEMM Q, K.T and get S
    float S_chain[4][1][1][4] = {};  // a product does not wait for the one before
    #pragma unroll
    for (int m = 0; m < 1; ++m) {
      #pragma unroll
      for (int n = 0; n < 1; ++n) {
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
          S[m][n][e] = 0.f;
        }
      }
    }
     {
      #pragma unroll
      for (int k = 0; k < 36; ++k) {
        uint32_t a[1][4];
        #pragma unroll
        for (int m = 0; m < 1; ++m) {
          ldsm(a[m], Q_lanes_a[k % 4] + k / 4 * 128 + m * 18432);
        }
        uint32_t b[2];
        ldsm(b, K_lanes_bt[k % 4] + k / 4 * 128 + i % 2 * 36864 + 0 * 18432);
        #pragma unroll
        for (int m = 0; m < 1; ++m) {
          mma(S_chain[k % 4][m][0], a[m], b[0], b[1]);
        }
      }
    }
    #pragma unroll
    for (int m = 0; m < 1; ++m) {
      #pragma unroll
      for (int n = 0; n < 1; ++n) {
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
          #pragma unroll
          for (int j = 0; j < 4; ++j) {
            S[m][n][e] += S_chain[j][m][n][e];
          }
        }
      }
    }
    // TL 6: Compute Scale S, scale
    // the factor is part of the softmax's exponent; only its sign is applied here
    if (scale < 0.f) {
      #pragma unroll
      for (int m = 0; m < 1; ++m) {
        #pragma unroll
        for (int n = 0; n < 1; ++n) {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            S[m][n][e] = -S[m][n][e];
          }
        }
      }
    }
    // keys of tile i that a row must not see
    if (i >= i_full) {
      #pragma unroll
      for (int m = 0; m < 1; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          int const last = keys - 1 - (i * 32 + (lane & 3) * 2 + column_warp * 8);
          #pragma unroll
          for (int n = 0; n < 1; ++n) {
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
              if (n * 8 + c > last) S[m][n][r * 2 + c] = -INFINITY;
            }
          }
        }
      }
    }
    // TL 7: Compute Softmax S
    float S_top[1][2], S_part[1][2];
    bool grown = S_huge;
    #pragma unroll
    for (int m = 0; m < 1; ++m) {
      #pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x = fmaxf(S[m][0][r * 2], S[m][0][r * 2 + 1]);
        #pragma unroll
        for (int n = 1; n < 1; ++n) {
          x = fmaxf(x, fmaxf(S[m][n][r * 2], S[m][n][r * 2 + 1]));
        }
        S_top[m][r] = x;
        grown |= x > S_max[m][r] + S_slack;
      }
    }
    // weights by the maximum so far, rounded to 16 bits for the warps of these rows
    auto weigh_S = [&]() {
      #pragma unroll
      for (int m = 0; m < 1; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          int const row = 0 + warp * 16 + m * 16 + r * 8 + lane / 4;
          float part[2] = {0.f, 0.f};  // two chains of additions
          #pragma unroll
          for (int n = 0; n < 1; ++n) {
            float const low = exp2_approx(fmaf(S[m][n][r * 2 + 0], S_log2, -S_shift[m][r]));
            float const high = exp2_approx(fmaf(S[m][n][r * 2 + 1], S_log2, -S_shift[m][r]));
            part[0] += low, part[1] += high;
            *reinterpret_cast<uint32_t*>(smem + 110592 + row * 80 + (column_warp * 1 + n) * 16 + (lane & 3) * 4) = pack(low, high);
          }
          S_part[m][r] = part[0] + part[1];
        }
      }
    };
    weigh_S();
    // TL 8: Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
    bool const moved = __syncthreads_or(grown);
    // a maximum may lag by 2^8: the division at the end cancels it
    if (moved) {
      #pragma unroll
      for (int m = 0; m < 1; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          share(quad_max(S_top[m][r]), m, r);
        }
      }
      __syncthreads();
      #pragma unroll
      for (int m = 0; m < 1; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          S_top[m][r] = -INFINITY;
          #pragma unroll
          for (int w = 0; w < 4; ++w) {
            S_top[m][r] = fmaxf(S_top[m][r], of_row[(m * 16 + r * 8) * 4 + w]);
          }
        }
      }
      bool huge = false;
      #pragma unroll
      for (int m = 0; m < 1; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          float const high = fmaxf(S_max[m][r], S_top[m][r]);
          float const decay = high == -INFINITY ? 1.f : exp2_approx((S_max[m][r] - high) * S_log2);
          S_max[m][r] = high;
          S_shift[m][r] = high == -INFINITY ? 0.f : high * S_log2;
          huge |= fabsf(S_shift[m][r]) > 1048576.f;
          S_sum[m][r] *= decay;
          #pragma unroll
          for (int n = 0; n < 16; ++n) {
            O_s[m][n][r * 2] *= decay;
            O_s[m][n][r * 2 + 1] *= decay;
          }
        }
      }
      S_huge = __any_sync(~0u, huge);
      if (S_huge) {
        // products this large are not exact: subtract first
        #pragma unroll
        for (int m = 0; m < 1; ++m) {
          #pragma unroll
          for (int r = 0; r < 2; ++r) {
            float const high = S_max[m][r] == -INFINITY ? 0.f : S_max[m][r];
            S_shift[m][r] = 0.f;
            #pragma unroll
            for (int n = 0; n < 1; ++n) {
              #pragma unroll
              for (int c = 0; c < 2; ++c) {
                S[m][n][r * 2 + c] -= high;
              }
            }
          }
        }
      }
      weigh_S();
      __syncthreads();
    }
    #pragma unroll
    for (int m = 0; m < 1; ++m) {
      #pragma unroll
      for (int r = 0; r < 2; ++r) {
        S_sum[m][r] += S_part[m][r];
      }
    }
    // TL 9: Compute GEMM S, K[:, 0:512] and accumulate O_s
     {
      #pragma unroll
      for (int k = 0; k < 2; ++k) {
        uint32_t a[1][4];
        #pragma unroll
        for (int m = 0; m < 1; ++m) {
          ldsm(a[m], S_lanes_a[0] + k * 32 + m * 1280);
        }
        #pragma unroll
        for (int n = 0; n < 8; ++n) {
          uint32_t b[4];
          ldsm_t(b, K_lanes_b[n % 4] + n / 4 * 128 + i % 2 * 36864 + k * 18432);
          #pragma unroll
          for (int m = 0; m < 1; ++m) {
            mma(O_s[m][n * 2], a[m], b[0], b[1]);
            mma(O_s[m][n * 2 + 1], a[m], b[2], b[3]);
          }
        }
      }
    }
  }
  // TL 3: Compute Normalize O_s, S
  float S_total[1][2];
  #pragma unroll
  for (int m = 0; m < 1; ++m) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      share(quad_sum(S_sum[m][r]), m, r);
    }
  }
  __syncthreads();
  #pragma unroll
  for (int m = 0; m < 1; ++m) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      S_total[m][r] = 0.f;
      #pragma unroll
      for (int w = 0; w < 4; ++w) {
        S_total[m][r] += of_row[(m * 16 + r * 8) * 4 + w];
      }
    }
  }
  #pragma unroll
  for (int m = 0; m < 1; ++m) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      float const total = S_total[m][r];
      float const inverse = total == 0.f ? 0.f : 1.f / total;
      #pragma unroll
      for (int n = 0; n < 16; ++n) {
        O_s[m][n][r * 2] *= inverse;
        O_s[m][n][r * 2 + 1] *= inverse;
      }
    }
  }
  // TL 11: Compute LogSumExp S and get lse_s
  #pragma unroll
  for (int m = 0; m < 1; ++m) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      float const total = S_total[m][r];
      lse_s[m][r] = total == 0.f ? -INFINITY : (S_max[m][r] * S_log2 + log2f(total)) * 0.69314718056f;
    }
  }
  // TL 12: Copy O_s (32, 512) in coordinate [L = block_idx, splits = split] from register to global
  #pragma unroll
  for (int m = 0; m < 1; ++m) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      int const row = row0 + warp * 16 + m * 16 + r * 8 + lane / 4;
      if (row < rows && splits == 1) {
        auto const to = gO + batch * O_stride_b + int64_t(row / group) * O_stride_s + int64_t(kv_head * group + row % group) * O_stride_h
            + (lane & 3) * 2 + column_warp * 128;
        #pragma unroll
        for (int n = 0; n < 16; ++n) {
          *reinterpret_cast<uint32_t*>(to + n * 8) = pack(O_s[m][n][r * 2 + 0], O_s[m][n][r * 2 + 1]);
        }
      }
      else if (row < rows) {
        auto const to = gO_s + (own_row0 + row) * 512 + (lane & 3) * 2 + column_warp * 128;
        #pragma unroll
        for (int n = 0; n < 16; ++n) {
          *reinterpret_cast<float2*>(to + n * 8) = {O_s[m][n][r * 2 + 0], O_s[m][n][r * 2 + 1]};
        }
      }
    }
  }
  // TL 13: Copy lse_s (32, 1) in coordinate [L = block_idx, splits = split] from register to global
  if (splits > 1 && lane % 4 == 0 && column_warp == 0) {
    #pragma unroll
    for (int m = 0; m < 1; ++m) {
      #pragma unroll
      for (int r = 0; r < 2; ++r) {
        int const row = row0 + warp * 16 + m * 16 + r * 8 + lane / 4;
        if (row < rows) glse_s[own_row0 + row] = lse_s[m][r];
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(512)
combine(
    float* glse_s,
    float* gO_s,
    uint16_t* gO,
    int64_t O_stride_b,
    int64_t O_stride_s,
    int64_t O_stride_h,
    int rows,
    int group,
    int kv_heads,
    int batch,
    int splits
) {
  int const planes = kv_heads * batch;
  int const plane = blockIdx.x / rows, row = blockIdx.x % rows;
  int const group_at = threadIdx.x / 128;
  int const lane_at = threadIdx.x % 128, column = lane_at * 4;
  float* const lse_s_at = glse_s + (int64_t(plane) * rows + row);
  int64_t const lse_s_step = int64_t(planes) * rows;
  float* const O_s_at = gO_s + (int64_t(plane) * rows + row) * 512 + column;
  int64_t const O_s_step = int64_t(planes) * rows * 512;
  float top;
  float lse_s;
  float O[4];
  float total_;
  float O_s[4];
  float w;
  // TL 16: Compute Fill top, -inf
  top = -INFINITY;
  // TL 17: Copy lse_s (32, 1) in coordinate [L = block_idx, splits = s] from global to register
  float lse_s_next1[8];
  int s_first1 = 0 + group_at;
   {
    float const* lse_s_from = lse_s_at + s_first1 * lse_s_step;
    #pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (s_first1 + k * 4 < splits) {
        lse_s_next1[k] = *(lse_s_from);
      }
      lse_s_from += 4 * lse_s_step;
    }
  }
  // TL 21: Copy O_s (32, 512) in coordinate [L = block_idx, splits = s] from global to register
  float O_s_next4[4][4];
  // TL 22: Copy lse_s (32, 1) in coordinate [L = block_idx, splits = s] from global to register
  float lse_s_next4[4];
  int s_first4 = 0 + group_at;
   {
    float const* O_s_from = O_s_at + s_first4 * O_s_step;
    float const* lse_s_from = lse_s_at + s_first4 * lse_s_step;
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (s_first4 + k * 4 < splits) {
         {
          float4 const x = *reinterpret_cast<float4 const*>(O_s_from);
          O_s_next4[k][0] = x.x; O_s_next4[k][1] = x.y; O_s_next4[k][2] = x.z; O_s_next4[k][3] = x.w;
        }
      }
      O_s_from += 4 * O_s_step;
      if (s_first4 + k * 4 < splits) {
        lse_s_next4[k] = *(lse_s_from);
      }
      lse_s_from += 4 * lse_s_step;
    }
  }
  // TL 16: for s = 0:num_splits
  #pragma unroll 1
  while (s_first1 < splits) {
    #pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (s_first1 + k * 4 < splits) {
        lse_s = lse_s_next1[k];
        // TL 18: Compute Max top, lse_s
        top = fmaxf(top, lse_s);
      }
    }
    s_first1 += 32;
    if (s_first1 < splits) {
       {
        float const* lse_s_from = lse_s_at + s_first1 * lse_s_step;
        #pragma unroll
        for (int k = 0; k < 8; ++k) {
          if (s_first1 + k * 4 < splits) {
            lse_s_next1[k] = *(lse_s_from);
          }
          lse_s_from += 4 * lse_s_step;
        }
      }
    }
  }
  // what the groups gathered of top
   {
    float* const parts = reinterpret_cast<float*>(smem);
    __syncthreads();  // what was joined before is read no more
    #pragma unroll
    for (int c = 0; c < 1; ++c) {
      parts[(c * 4 + group_at) * 128 + lane_at] = top;
    }
    __syncthreads();
    #pragma unroll
    for (int c = 0; c < 1; ++c) {
      top = parts[(c * 4 + 0) * 128 + lane_at];
    }
    #pragma unroll 4
    for (int g = 1; g < 4; ++g) {
      #pragma unroll
      for (int c = 0; c < 1; ++c) {
        top = fmaxf(top, parts[(c * 4 + g) * 128 + lane_at]);
      }
    }
  }
  // TL 20: Compute Fill O, 0.0
  #pragma unroll
  for (int c = 0; c < 4; ++c) {
    O[c] = 0.0f;
  }
  // TL 20: Compute Fill total_, 0.0
  total_ = 0.0f;
  // TL 20: for s = 0:num_splits
  #pragma unroll 1
  while (s_first4 < splits) {
    #pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (s_first4 + k * 4 < splits) {
        #pragma unroll
        for (int c = 0; c < 4; ++c) {
          O_s[c] = O_s_next4[k][c];
        }
        lse_s = lse_s_next4[k];
        // TL 23: Compute Subtract lse_s, top and get w
        w = minus(lse_s, top);
        // TL 24: Compute Exp w
        w = exp2_approx(w * 1.44269504089f);
        // TL 25: Compute Multiply O_s, w and get new O_s
        #pragma unroll
        for (int c = 0; c < 4; ++c) {
          O_s[c] = O_s[c] * w;
        }
        // TL 26: Compute Add O, O_s and get new O
        #pragma unroll
        for (int c = 0; c < 4; ++c) {
          O[c] = O[c] + O_s[c];
        }
        // TL 27: Compute Add total_, w and get new total_
        total_ = total_ + w;
      }
    }
    s_first4 += 16;
    if (s_first4 < splits) {
       {
        float const* O_s_from = O_s_at + s_first4 * O_s_step;
        float const* lse_s_from = lse_s_at + s_first4 * lse_s_step;
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (s_first4 + k * 4 < splits) {
             {
              float4 const x = *reinterpret_cast<float4 const*>(O_s_from);
              O_s_next4[k][0] = x.x; O_s_next4[k][1] = x.y; O_s_next4[k][2] = x.z; O_s_next4[k][3] = x.w;
            }
          }
          O_s_from += 4 * O_s_step;
          if (s_first4 + k * 4 < splits) {
            lse_s_next4[k] = *(lse_s_from);
          }
          lse_s_from += 4 * lse_s_step;
        }
      }
    }
  }
  // what the groups gathered of O, total_
   {
    float* const parts = reinterpret_cast<float*>(smem);
    __syncthreads();  // what was joined before is read no more
    #pragma unroll
    for (int c = 0; c < 4; ++c) {
      parts[(c * 4 + group_at) * 128 + lane_at] = O[c];
    }
    #pragma unroll
    for (int c = 0; c < 1; ++c) {
      parts[((4 + c) * 4 + group_at) * 128 + lane_at] = total_;
    }
    __syncthreads();
    #pragma unroll
    for (int c = 0; c < 4; ++c) {
      O[c] = parts[(c * 4 + 0) * 128 + lane_at];
    }
    #pragma unroll
    for (int c = 0; c < 1; ++c) {
      total_ = parts[((4 + c) * 4 + 0) * 128 + lane_at];
    }
    #pragma unroll 4
    for (int g = 1; g < 4; ++g) {
      #pragma unroll
      for (int c = 0; c < 4; ++c) {
        O[c] = O[c] + parts[(c * 4 + g) * 128 + lane_at];
      }
      #pragma unroll
      for (int c = 0; c < 1; ++c) {
        total_ = total_ + parts[((4 + c) * 4 + g) * 128 + lane_at];
      }
    }
  }
  // TL 29: Compute Divide O, total_ and get new O
  #pragma unroll
  for (int c = 0; c < 4; ++c) {
    O[c] = over(O[c], total_);
  }
  // TL 30: Copy O (32, 512) in coordinate [L = block_idx] from register to global
  if (group_at == 0) {
    int const batch_at = plane / kv_heads, kv_head = plane % kv_heads;
    *reinterpret_cast<uint2*>(gO + batch_at * O_stride_b + int64_t(row / group) * O_stride_s + int64_t(kv_head * group + row % group) * O_stride_h + column) = {pack(O[0], O[1]), pack(O[2], O[3])};
  }
}
