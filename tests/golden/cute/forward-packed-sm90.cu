// gqa-bf16-d128-causal for sm_90a
// BM=128 BN=128 causal_longest_first=1 consumer_warpgroups=2 exp2_fma=0 head_group=16 integer_max=1 late_wait=1 out_buffer=1 overlap=1 pack_heads=4 persistent=2 pingpong=1 q_in_registers=0 q_stages=2 rescale_threshold=8 skip=0 stages=2
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
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
constexpr int kBarriers = 229376;
constexpr int kTileSlots = 229504;
// two floats to two bf16, the first in the low half
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float2 unpack(uint32_t x) {
  return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}
struct alignas(64) TensorMap { char bytes[128]; };

__device__ __forceinline__ uint64_t* barrier_at(int number) {
  return reinterpret_cast<uint64_t*>(smem + kBarriers) + number;
}
__device__ __forceinline__ int volatile* tile_slots() {
  return reinterpret_cast<int volatile*>(smem + kTileSlots);
}
// waits until the barrier's phase of this parity has ended
__device__ __forceinline__ void wait(int number, uint32_t parity) {
  asm volatile(
      "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again;}"
      ::"r"(cast_smem_ptr_to_uint(barrier_at(number))), "r"(parity) : "memory");
}
__device__ __forceinline__ void arrive(int number) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               ::"r"(cast_smem_ptr_to_uint(barrier_at(number))) : "memory");
}
// the bytes that TMA will bring before the phase ends
__device__ __forceinline__ void expect(int number, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(cast_smem_ptr_to_uint(barrier_at(number))), "r"(bytes) : "memory");
}
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
template <int N> __device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
constexpr uint64_t kEvictNormal = 0x1000000000000000, kEvictFirst = 0x12f0000000000000,
                   kEvictLast = 0x14f0000000000000;
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

// a tile with 128-byte swizzle: its address, and the bytes between its panels (where it is read
// down its rows) in units of 16
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address, uint32_t panel_bytes) {
  return uint64_t(1) << 62 | uint64_t(1024 >> 4) << 32 | uint64_t(panel_bytes >> 4) << 16 |
         uint64_t((address & 0x3ffff) >> 4);
}

// d (+)= a.b, 64 x 128 x 16; keep = 0 starts from zero
template <int N>  // d may be wider: its first 128 columns are used
__device__ __forceinline__ void wgmma_64x128x16_ss(float (&d)[1][N][4], uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %66, 0;"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, 0, 0;}"
      : "+f"(d[0][0][0]), "+f"(d[0][0][1]), "+f"(d[0][0][2]), "+f"(d[0][0][3]), "+f"(d[0][1][0]), "+f"(d[0][1][1]), "+f"(d[0][1][2]), "+f"(d[0][1][3]),
        "+f"(d[0][2][0]), "+f"(d[0][2][1]), "+f"(d[0][2][2]), "+f"(d[0][2][3]), "+f"(d[0][3][0]), "+f"(d[0][3][1]), "+f"(d[0][3][2]), "+f"(d[0][3][3]),
        "+f"(d[0][4][0]), "+f"(d[0][4][1]), "+f"(d[0][4][2]), "+f"(d[0][4][3]), "+f"(d[0][5][0]), "+f"(d[0][5][1]), "+f"(d[0][5][2]), "+f"(d[0][5][3]),
        "+f"(d[0][6][0]), "+f"(d[0][6][1]), "+f"(d[0][6][2]), "+f"(d[0][6][3]), "+f"(d[0][7][0]), "+f"(d[0][7][1]), "+f"(d[0][7][2]), "+f"(d[0][7][3]),
        "+f"(d[0][8][0]), "+f"(d[0][8][1]), "+f"(d[0][8][2]), "+f"(d[0][8][3]), "+f"(d[0][9][0]), "+f"(d[0][9][1]), "+f"(d[0][9][2]), "+f"(d[0][9][3]),
        "+f"(d[0][10][0]), "+f"(d[0][10][1]), "+f"(d[0][10][2]), "+f"(d[0][10][3]), "+f"(d[0][11][0]), "+f"(d[0][11][1]), "+f"(d[0][11][2]), "+f"(d[0][11][3]),
        "+f"(d[0][12][0]), "+f"(d[0][12][1]), "+f"(d[0][12][2]), "+f"(d[0][12][3]), "+f"(d[0][13][0]), "+f"(d[0][13][1]), "+f"(d[0][13][2]), "+f"(d[0][13][3]),
        "+f"(d[0][14][0]), "+f"(d[0][14][1]), "+f"(d[0][14][2]), "+f"(d[0][14][3]), "+f"(d[0][15][0]), "+f"(d[0][15][1]), "+f"(d[0][15][2]), "+f"(d[0][15][3])
      : "l"(a), "l"(b), "r"(keep));
}

// d (+)= a.b, 64 x 128 x 16; keep = 0 starts from zero
template <int N>  // d may be wider: its first 128 columns are used
__device__ __forceinline__ void wgmma_64x128x16_rs_rows(float (&d)[1][N][4], uint32_t const (&a)[4], uint64_t b, int keep) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %69, 0;"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 1;}"
      : "+f"(d[0][0][0]), "+f"(d[0][0][1]), "+f"(d[0][0][2]), "+f"(d[0][0][3]), "+f"(d[0][1][0]), "+f"(d[0][1][1]), "+f"(d[0][1][2]), "+f"(d[0][1][3]),
        "+f"(d[0][2][0]), "+f"(d[0][2][1]), "+f"(d[0][2][2]), "+f"(d[0][2][3]), "+f"(d[0][3][0]), "+f"(d[0][3][1]), "+f"(d[0][3][2]), "+f"(d[0][3][3]),
        "+f"(d[0][4][0]), "+f"(d[0][4][1]), "+f"(d[0][4][2]), "+f"(d[0][4][3]), "+f"(d[0][5][0]), "+f"(d[0][5][1]), "+f"(d[0][5][2]), "+f"(d[0][5][3]),
        "+f"(d[0][6][0]), "+f"(d[0][6][1]), "+f"(d[0][6][2]), "+f"(d[0][6][3]), "+f"(d[0][7][0]), "+f"(d[0][7][1]), "+f"(d[0][7][2]), "+f"(d[0][7][3]),
        "+f"(d[0][8][0]), "+f"(d[0][8][1]), "+f"(d[0][8][2]), "+f"(d[0][8][3]), "+f"(d[0][9][0]), "+f"(d[0][9][1]), "+f"(d[0][9][2]), "+f"(d[0][9][3]),
        "+f"(d[0][10][0]), "+f"(d[0][10][1]), "+f"(d[0][10][2]), "+f"(d[0][10][3]), "+f"(d[0][11][0]), "+f"(d[0][11][1]), "+f"(d[0][11][2]), "+f"(d[0][11][3]),
        "+f"(d[0][12][0]), "+f"(d[0][12][1]), "+f"(d[0][12][2]), "+f"(d[0][12][3]), "+f"(d[0][13][0]), "+f"(d[0][13][1]), "+f"(d[0][13][2]), "+f"(d[0][13][3]),
        "+f"(d[0][14][0]), "+f"(d[0][14][1]), "+f"(d[0][14][2]), "+f"(d[0][14][3]), "+f"(d[0][15][0]), "+f"(d[0][15][1]), "+f"(d[0][15][2]), "+f"(d[0][15][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

extern "C" __global__ void __launch_bounds__(384, 1)
forward(
    __grid_constant__ TensorMap const mapQ,
    __grid_constant__ TensorMap const mapK,
    __grid_constant__ TensorMap const mapV,
    __grid_constant__ TensorMap const mapO,
    int M,
    int N,
    int heads,
    int group,
    int batch,
    int* tickets,
    float scale
) {
  int const warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  uint32_t const smem_at = cast_smem_ptr_to_uint(smem);
  if (threadIdx.x == 0) {
    initialize_barrier(*barrier_at(0), 1);
    initialize_barrier(*barrier_at(2), 2);
    initialize_barrier(*barrier_at(1), 1);
    initialize_barrier(*barrier_at(3), 2);
    initialize_barrier(*barrier_at(4), 1);
    initialize_barrier(*barrier_at(6), 2);
    initialize_barrier(*barrier_at(5), 1);
    initialize_barrier(*barrier_at(7), 2);
    initialize_barrier(*barrier_at(8), 1);
    initialize_barrier(*barrier_at(10), 2);
    initialize_barrier(*barrier_at(9), 1);
    initialize_barrier(*barrier_at(11), 2);
    initialize_barrier(*barrier_at(12), 1);
    initialize_barrier(*barrier_at(14), 8);
    initialize_barrier(*barrier_at(13), 1);
    initialize_barrier(*barrier_at(15), 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  int const row_blocks = ceil_div(M, 32);
  int const packs = ceil_div(group, 4);  // of a KV head's heads
  int const kv_heads = heads / group;
  int const planes = packs * kv_heads * batch, tiles = row_blocks * planes;
  int const diagonal = N - M;  // bottom-right: row r sees keys up to r + this
  if (warpgroup == 0) {
    registers_down<40>();
    if (threadIdx.x == 0) {
      uint32_t Q_count = 0;
      uint32_t K_count = 0;
      uint32_t V_count = 0;
      uint32_t drawn = 0;
      int tile = blockIdx.x;
      #pragma unroll 1
      while (tile < tiles) {
        int const first = tile / (16 * row_blocks) * 16;
        int const width = min(16, planes - first);
        int const within = tile - first * row_blocks;
        int const row = within / width, plane = first + within % width;
        int const block_idx = row_blocks - 1 - row;
        int const first_head = plane % packs * 4;  // in its group
        int const kv_plane = plane / packs;
        int const kv_head = kv_plane % kv_heads, batch = kv_plane / kv_heads;
        int const row0 = block_idx * 32;
        int const i_lo = 0;
        int const i_hi = ceil_div(min(N, max(0, min(row0 + 32, M) + diagonal)), 128);
        int const i_full = min(i_hi, min(N, max(0, row0 + diagonal + 1)) / 128);
        // TL 1: Copy Q (128, 128) in coordinate [L = block_idx] from global to shared
         {
          uint32_t const slot = Q_count % 2;
          wait(2 + slot, (Q_count / 2 & 1) ^ 1);
          expect(0 + slot, 32768);
          #pragma unroll
          for (int panel = 0; panel < 2; ++panel) {
            SM90_TMA_LOAD_5D::copy(&mapQ, barrier_at(0 + slot), kEvictFirst,
                smem + 0 + slot * 32768 + panel * 16384,
                panel * 64, first_head, row0, kv_head, batch);
          }
          ++Q_count;
        }
        // in the order of use: the next tile's scores come before this tile's product
        #pragma unroll 1
        for (int i = i_lo; i <= i_hi; ++i) {
          if (i < i_hi) {
            // TL 3: Copy K (128, 128) in coordinate [L = i] from global to shared
             {
              uint32_t const slot = K_count % 2;
              wait(6 + slot, (K_count / 2 & 1) ^ 1);
              expect(4 + slot, 32768);
              #pragma unroll
              for (int panel = 0; panel < 2; ++panel) {
                SM90_TMA_LOAD_4D::copy(&mapK, barrier_at(4 + slot), kEvictLast,
                    smem + 65536 + slot * 32768 + panel * 16384,
                    panel * 64, i * 128, kv_head, batch);
              }
              ++K_count;
            }
          }
          if (i > i_lo) {
            // TL 8: Copy V (128, 128) in coordinate [L = i] from global to shared
             {
              uint32_t const slot = V_count % 2;
              wait(10 + slot, (V_count / 2 & 1) ^ 1);
              expect(8 + slot, 32768);
              #pragma unroll
              for (int panel = 0; panel < 2; ++panel) {
                SM90_TMA_LOAD_4D::copy(&mapV, barrier_at(8 + slot), kEvictLast,
                    smem + 131072 + slot * 32768 + panel * 16384,
                    panel * 64, (i - 1) * 128, kv_head, batch);
              }
              ++V_count;
            }
          }
        }
        // each tile past the grid is drawn once, each block draws once in vain
         {
          int const ticket = atomicAdd(tickets, 1);
          if (ticket == tiles - 1) *tickets = 0;  // the last: ready for the next launch
          tile = gridDim.x + ticket;
          uint32_t const slot = drawn % 2;
          wait(14 + slot, (drawn / 2 & 1) ^ 1);
          tile_slots()[slot] = tile;
          arrive(12 + slot);
          ++drawn;
        }
      }
    }
  }
  else {
    registers_up<232>();
    int const tid = threadIdx.x - 128, lane = tid & 31, warp = tid >> 5;
    int const consumer = warpgroup - 1;
    bool const leader = tid % 128 == 0;  // arrives and stores for its warpgroup
    uint32_t Q_count = 0;
    uint32_t K_count = 0;
    uint32_t V_count = 0;
    // the first warpgroup has the first turn
    if (consumer == 1) named_arrive(8, 256);
    uint32_t drawn = 0;
    int tile = blockIdx.x;
    #pragma unroll 1
    while (tile < tiles) {
      int const first = tile / (16 * row_blocks) * 16;
      int const width = min(16, planes - first);
      int const within = tile - first * row_blocks;
      int const row = within / width, plane = first + within % width;
      int const block_idx = row_blocks - 1 - row;
      int const first_head = plane % packs * 4;  // in its group
      int const kv_plane = plane / packs;
      int const kv_head = kv_plane % kv_heads, batch = kv_plane / kv_heads;
      int const row0 = block_idx * 32;
      int const i_lo = 0;
      int const i_hi = ceil_div(min(N, max(0, min(row0 + 32, M) + diagonal)), 128);
      int const i_full = min(i_hi, min(N, max(0, row0 + diagonal + 1)) / 128);
      int const own_row0 = row0 + consumer * 16;
      int const i_lo_own = 0;
      int const i_hi_own = ceil_div(min(N, max(0, min(own_row0 + 16, M) + diagonal)), 128);
      int const i_full_own = min(i_hi_own, min(N, max(0, own_row0 + diagonal + 1)) / 128);
      float O[1][16][4];
      float S[1][16][4];
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
      // TL 2: Compute Fill O, 0.0
      #pragma unroll
      for (int m = 0; m < 1; ++m) {
        #pragma unroll
        for (int n = 0; n < 16; ++n) {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            O[m][n][e] = 0.f;
          }
        }
      }
      wait(0 + Q_count % 2, Q_count / 2 & 1);
      int i = i_lo;
      uint32_t S_a[1][8][4];
      if (i < i_hi) {
        // TL 4: Compute GEMM Q, K.T and get S
        wait(4 + K_count % 2, K_count / 2 & 1);
        named_sync(8 + consumer, 256);
         {
          uint64_t const a = tile_descriptor(smem_at + 0 + Q_count % 2 * 32768 + consumer * 8192, 16);
          uint64_t const b = tile_descriptor(smem_at + 65536 + K_count % 2 * 32768, 16);
          warpgroup_fence();
          #pragma unroll
          for (int k = 0; k < 8; ++k) {
            int const panel = k / 4, within = k % 4 * 32;
            wgmma_64x128x16_ss(S, a + (panel * 16384 + within) / 16, b + (panel * 16384 + within) / 16, k > 0);
          }
          warpgroup_commit();
        }
        named_arrive(8 + (consumer + 1) % 2, 256);
        warpgroup_wait<0>();
        hold(S);
        if (leader) arrive(6 + K_count % 2);
        ++K_count;
        if (i >= i_full_own || scale < 0.f) {
          // TL 5: Compute Scale S, scale
          // the factor is part of the softmax's exponent; only its sign is applied here
          if (scale < 0.f) {
            #pragma unroll
            for (int m = 0; m < 1; ++m) {
              #pragma unroll
              for (int n = 0; n < 16; ++n) {
                #pragma unroll
                for (int e = 0; e < 4; ++e) {
                  S[m][n][e] = -S[m][n][e];
                }
              }
            }
          }
          // TL 6: Compute Mask S, causal
          // keys of tile i that a row must not see
          if (i >= i_full_own) {
            #pragma unroll
            for (int m = 0; m < 1; ++m) {
              #pragma unroll
              for (int r = 0; r < 2; ++r) {
                int const row = row0 + (warp * 16 + m * 16 + r * 8 + lane / 4) / 4;
                int const last = min(N - 1, row + diagonal) - (i * 128 + (lane & 3) * 2);
                #pragma unroll
                for (int n = 0; n < 16; ++n) {
                  #pragma unroll
                  for (int c = 0; c < 2; ++c) {
                    if (n * 8 + c > last) S[m][n][r * 2 + c] = -INFINITY;
                  }
                }
              }
            }
          }
        }
        // TL 7: Compute Softmax S
        float S_top[1][2];
        bool grown = S_huge;
        #pragma unroll
        for (int m = 0; m < 1; ++m) {
          #pragma unroll
          for (int r = 0; r < 2; ++r) {
            int x = __float_as_int(S[m][0][r * 2]);
            int y = __float_as_int(S[m][0][r * 2 + 1]);
            #pragma unroll
            for (int n = 1; n < 16; ++n) {
              int& z = n & 1 ? x : y;  // two chains
              z = max(max(z, __float_as_int(S[m][n][r * 2 + 0])), __float_as_int(S[m][n][r * 2 + 1]));
            }
            float const limit = S_max[m][r] + S_slack;
            grown |= !(__int_as_float(max(x, y)) <= limit && limit > 0.f);
          }
        }
        // a maximum may lag by 2^8: the division at the end cancels it
        bool const moved = __any_sync(~0u, grown);
        if (moved) {
          bool huge = false;
          #pragma unroll
          for (int m = 0; m < 1; ++m) {
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
              float x = fmaxf(S[m][0][r * 2], S[m][0][r * 2 + 1]);
              #pragma unroll
              for (int n = 1; n < 16; ++n) {
                x = fmaxf(x, fmaxf(S[m][n][r * 2], S[m][n][r * 2 + 1]));
              }
              S_top[m][r] = x;
              float const high = fmaxf(S_max[m][r], quad_max(S_top[m][r]));
              float const decay = high == -INFINITY ? 1.f : exp2_approx((S_max[m][r] - high) * S_log2);
              S_max[m][r] = high;
              S_shift[m][r] = high == -INFINITY ? 0.f : high * S_log2;
              huge |= fabsf(S_shift[m][r]) > 1048576.f;
              S_sum[m][r] *= decay;
              #pragma unroll
              for (int n = 0; n < 16; ++n) {
                O[m][n][r * 2] *= decay;
                O[m][n][r * 2 + 1] *= decay;
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
                for (int n = 0; n < 16; ++n) {
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
        for (int m = 0; m < 1; ++m) {
          #pragma unroll
          for (int r = 0; r < 2; ++r) {
            float part[2] = {0.f, 0.f};  // two chains of additions
            #pragma unroll
            for (int n = 0; n < 16; ++n) {
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
        // TL 9: Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
        #pragma unroll
        for (int m = 0; m < 1; ++m) {
          #pragma unroll
          for (int k = 0; k < 8; ++k) {
            S_a[m][k][0] = pack(S[m][k * 2 + 0][0], S[m][k * 2 + 0][1]);
            S_a[m][k][1] = pack(S[m][k * 2 + 0][2], S[m][k * 2 + 0][3]);
            S_a[m][k][2] = pack(S[m][k * 2 + 1][0], S[m][k * 2 + 1][1]);
            S_a[m][k][3] = pack(S[m][k * 2 + 1][2], S[m][k * 2 + 1][3]);
          }
        }
        #pragma unroll 1
        for (++i; i < i_hi; ++i) {
          // TL 4: Compute GEMM Q, K.T and get S
          wait(4 + K_count % 2, K_count / 2 & 1);
          named_sync(8 + consumer, 256);
           {
            uint64_t const a = tile_descriptor(smem_at + 0 + Q_count % 2 * 32768 + consumer * 8192, 16);
            uint64_t const b = tile_descriptor(smem_at + 65536 + K_count % 2 * 32768, 16);
            warpgroup_fence();
            #pragma unroll
            for (int k = 0; k < 8; ++k) {
              int const panel = k / 4, within = k % 4 * 32;
              wgmma_64x128x16_ss(S, a + (panel * 16384 + within) / 16, b + (panel * 16384 + within) / 16, k > 0);
            }
            warpgroup_commit();
          }
          // TL 10: Compute GEMM S, V and accumulate O
          wait(8 + V_count % 2, V_count / 2 & 1);
           {
            uint64_t const b = tile_descriptor(smem_at + 131072 + V_count % 2 * 32768, 16384);
            warpgroup_fence();
            #pragma unroll
            for (int k = 0; k < 8; ++k) {
              wgmma_64x128x16_rs_rows(O, S_a[0][k], b + k * 128, 1);
            }
            warpgroup_commit();
          }
          named_arrive(8 + (consumer + 1) % 2, 256);
          warpgroup_wait<1>();
          hold(S);
          if (leader) arrive(6 + K_count % 2);
          ++K_count;
          if (i >= i_full_own || scale < 0.f) {
            // TL 5: Compute Scale S, scale
            // the factor is part of the softmax's exponent; only its sign is applied here
            if (scale < 0.f) {
              #pragma unroll
              for (int m = 0; m < 1; ++m) {
                #pragma unroll
                for (int n = 0; n < 16; ++n) {
                  #pragma unroll
                  for (int e = 0; e < 4; ++e) {
                    S[m][n][e] = -S[m][n][e];
                  }
                }
              }
            }
            // TL 6: Compute Mask S, causal
            // keys of tile i that a row must not see
            if (i >= i_full_own) {
              #pragma unroll
              for (int m = 0; m < 1; ++m) {
                #pragma unroll
                for (int r = 0; r < 2; ++r) {
                  int const row = row0 + (warp * 16 + m * 16 + r * 8 + lane / 4) / 4;
                  int const last = min(N - 1, row + diagonal) - (i * 128 + (lane & 3) * 2);
                  #pragma unroll
                  for (int n = 0; n < 16; ++n) {
                    #pragma unroll
                    for (int c = 0; c < 2; ++c) {
                      if (n * 8 + c > last) S[m][n][r * 2 + c] = -INFINITY;
                    }
                  }
                }
              }
            }
          }
          // TL 7: Compute Softmax S
          float S_top[1][2];
          bool grown = S_huge;
          #pragma unroll
          for (int m = 0; m < 1; ++m) {
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
              int x = __float_as_int(S[m][0][r * 2]);
              int y = __float_as_int(S[m][0][r * 2 + 1]);
              #pragma unroll
              for (int n = 1; n < 16; ++n) {
                int& z = n & 1 ? x : y;  // two chains
                z = max(max(z, __float_as_int(S[m][n][r * 2 + 0])), __float_as_int(S[m][n][r * 2 + 1]));
              }
              float const limit = S_max[m][r] + S_slack;
              grown |= !(__int_as_float(max(x, y)) <= limit && limit > 0.f);
            }
          }
          // a maximum may lag by 2^8: the division at the end cancels it
          bool const moved = __any_sync(~0u, grown);
          if (moved) {
            warpgroup_wait<0>();
            hold(O);
            bool huge = false;
            #pragma unroll
            for (int m = 0; m < 1; ++m) {
              #pragma unroll
              for (int r = 0; r < 2; ++r) {
                float x = fmaxf(S[m][0][r * 2], S[m][0][r * 2 + 1]);
                #pragma unroll
                for (int n = 1; n < 16; ++n) {
                  x = fmaxf(x, fmaxf(S[m][n][r * 2], S[m][n][r * 2 + 1]));
                }
                S_top[m][r] = x;
                float const high = fmaxf(S_max[m][r], quad_max(S_top[m][r]));
                float const decay = high == -INFINITY ? 1.f : exp2_approx((S_max[m][r] - high) * S_log2);
                S_max[m][r] = high;
                S_shift[m][r] = high == -INFINITY ? 0.f : high * S_log2;
                huge |= fabsf(S_shift[m][r]) > 1048576.f;
                S_sum[m][r] *= decay;
                #pragma unroll
                for (int n = 0; n < 16; ++n) {
                  O[m][n][r * 2] *= decay;
                  O[m][n][r * 2 + 1] *= decay;
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
                  for (int n = 0; n < 16; ++n) {
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
          for (int m = 0; m < 1; ++m) {
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
              float part[2] = {0.f, 0.f};  // two chains of additions
              #pragma unroll
              for (int n = 0; n < 16; ++n) {
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
          warpgroup_wait<0>();
          hold(O);
          if (leader) arrive(10 + V_count % 2);
          ++V_count;
          // TL 9: Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
          #pragma unroll
          for (int m = 0; m < 1; ++m) {
            #pragma unroll
            for (int k = 0; k < 8; ++k) {
              S_a[m][k][0] = pack(S[m][k * 2 + 0][0], S[m][k * 2 + 0][1]);
              S_a[m][k][1] = pack(S[m][k * 2 + 0][2], S[m][k * 2 + 0][3]);
              S_a[m][k][2] = pack(S[m][k * 2 + 1][0], S[m][k * 2 + 1][1]);
              S_a[m][k][3] = pack(S[m][k * 2 + 1][2], S[m][k * 2 + 1][3]);
            }
          }
        }
        // TL 10: Compute GEMM S, V and accumulate O
        wait(8 + V_count % 2, V_count / 2 & 1);
         {
          uint64_t const b = tile_descriptor(smem_at + 131072 + V_count % 2 * 32768, 16384);
          warpgroup_fence();
          #pragma unroll
          for (int k = 0; k < 8; ++k) {
            wgmma_64x128x16_rs_rows(O, S_a[0][k], b + k * 128, 1);
          }
          warpgroup_commit();
        }
        if (leader) arrive(2 + Q_count % 2);
        warpgroup_wait<0>();
        hold(O);
        if (leader) arrive(10 + V_count % 2);
        ++V_count;
      }
      else {
        if (leader) arrive(2 + Q_count % 2);
      }
      // TL 2: Compute Normalize O, S
      #pragma unroll
      for (int m = 0; m < 1; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          float const total = quad_sum(S_sum[m][r]);
          float const inverse = total == 0.f ? 0.f : 1.f / total;
          #pragma unroll
          for (int n = 0; n < 16; ++n) {
            O[m][n][r * 2] *= inverse;
            O[m][n][r * 2 + 1] *= inverse;
          }
        }
      }
      // TL 12: Copy O (128, 128) in coordinate [L = block_idx] from register to global
      // the previous tile's store has read the buffer
      if (leader) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      named_sync(1 + consumer, 128);
      uint32_t const out_at = 196608 + consumer * 8192;
      int const out_row = warp % 4 * 16 + (lane & 15);
      #pragma unroll
      for (int n = 0; n + 1 < 16; n += 2) {
        float const(&x)[4] = O[0][n];
        float const(&y)[4] = O[0][n + 1];
        SM90_U32x4_STSM_N::copy(pack(x[0], x[1]), pack(x[2], x[3]),
            pack(y[0], y[1]), pack(y[2], y[3]),
            *reinterpret_cast<uint128_t*>(smem + out_at + n / 8 * 16384 + out_row * 128 + ((n % 8 + (lane >> 4)) ^ (out_row & 7)) * 16));
      }
      tma_store_fence();
      named_sync(1 + consumer, 128);
      if (leader && own_row0 < M) {
        #pragma unroll
        for (int panel = 0; panel < 2; ++panel) {
          SM90_TMA_STORE_5D::copy(&mapO, smem + out_at + panel * 16384,
              panel * 64, first_head, own_row0, kv_head, batch);
        }
        tma_store_arrive();
      }
      ++Q_count;
       {
        uint32_t const slot = drawn % 2;
        wait(12 + slot, drawn / 2 & 1);
        tile = tile_slots()[slot];
        __syncwarp();
        if (lane == 0) arrive(14 + slot);
        ++drawn;
      }
    }
    if (leader) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
