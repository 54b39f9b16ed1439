// mla-bf16-d576x512-full-decode-page64 for sm_90a
// BM=64 BN=64 blocks_per_sm=1 combine_early=0 combine_groups=4 consumer_warpgroups=2 evict_first=0 integer_max=1 min_split_tiles=2 overlap=0 q_panels=1 rescale_threshold=8 split_blocks=1 stages=2
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
constexpr int kBarriers = 230400;
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
// makes plain stores to shared memory visible to wgmma and to bulk copies
__device__ __forceinline__ void visible_to_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// 16 bytes from global to shared memory, or zeros; waited for by cp.async.wait_all
__device__ __forceinline__ void copy_chunk(uint32_t to, uint16_t const* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// a descriptor takes as long to come as the keys do
__device__ __forceinline__ void fetch_map(TensorMap const* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// bytes in one piece, from shared to global memory
__device__ __forceinline__ void store_bulk(void* to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
// an address that is worked out again where it is used: descriptors that outlive a loop are spilled
__device__ __forceinline__ uint32_t here(uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}
__device__ __forceinline__ void store_words(
    uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void load_words(
    uint32_t address, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address) : "memory");
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

// d (+)= a.b, 64 x 64 x 16; keep = 0 starts from zero
template <int N>  // d may be wider: its first 64 columns are used
__device__ __forceinline__ void wgmma_64x64x16_rs(float (&d)[1][N][4], uint32_t const (&a)[4], uint64_t b, int keep) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
      : "+f"(d[0][0][0]), "+f"(d[0][0][1]), "+f"(d[0][0][2]), "+f"(d[0][0][3]), "+f"(d[0][1][0]), "+f"(d[0][1][1]), "+f"(d[0][1][2]), "+f"(d[0][1][3]),
        "+f"(d[0][2][0]), "+f"(d[0][2][1]), "+f"(d[0][2][2]), "+f"(d[0][2][3]), "+f"(d[0][3][0]), "+f"(d[0][3][1]), "+f"(d[0][3][2]), "+f"(d[0][3][3]),
        "+f"(d[0][4][0]), "+f"(d[0][4][1]), "+f"(d[0][4][2]), "+f"(d[0][4][3]), "+f"(d[0][5][0]), "+f"(d[0][5][1]), "+f"(d[0][5][2]), "+f"(d[0][5][3]),
        "+f"(d[0][6][0]), "+f"(d[0][6][1]), "+f"(d[0][6][2]), "+f"(d[0][6][3]), "+f"(d[0][7][0]), "+f"(d[0][7][1]), "+f"(d[0][7][2]), "+f"(d[0][7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

// d (+)= a.b, 64 x 64 x 16; keep = 0 starts from zero
template <int N>  // d may be wider: its first 64 columns are used
__device__ __forceinline__ void wgmma_64x64x16_ss(float (&d)[1][N][4], uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;}"
      : "+f"(d[0][0][0]), "+f"(d[0][0][1]), "+f"(d[0][0][2]), "+f"(d[0][0][3]), "+f"(d[0][1][0]), "+f"(d[0][1][1]), "+f"(d[0][1][2]), "+f"(d[0][1][3]),
        "+f"(d[0][2][0]), "+f"(d[0][2][1]), "+f"(d[0][2][2]), "+f"(d[0][2][3]), "+f"(d[0][3][0]), "+f"(d[0][3][1]), "+f"(d[0][3][2]), "+f"(d[0][3][3]),
        "+f"(d[0][4][0]), "+f"(d[0][4][1]), "+f"(d[0][4][2]), "+f"(d[0][4][3]), "+f"(d[0][5][0]), "+f"(d[0][5][1]), "+f"(d[0][5][2]), "+f"(d[0][5][3]),
        "+f"(d[0][6][0]), "+f"(d[0][6][1]), "+f"(d[0][6][2]), "+f"(d[0][6][3]), "+f"(d[0][7][0]), "+f"(d[0][7][1]), "+f"(d[0][7][2]), "+f"(d[0][7][3])
      : "l"(a), "l"(b), "r"(keep));
}

// d (+)= a.b, 64 x 256 x 16; keep = 0 starts from zero
template <int N>  // d may be wider: its first 256 columns are used
__device__ __forceinline__ void wgmma_64x256x16_rs_rows(float (&d)[1][N][4], uint32_t const (&a)[4], uint64_t b, int keep) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %133, 0;"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "{%128, %129, %130, %131}, %132, p, 1, 1, 1;}"
      : "+f"(d[0][0][0]), "+f"(d[0][0][1]), "+f"(d[0][0][2]), "+f"(d[0][0][3]), "+f"(d[0][1][0]), "+f"(d[0][1][1]), "+f"(d[0][1][2]), "+f"(d[0][1][3]),
        "+f"(d[0][2][0]), "+f"(d[0][2][1]), "+f"(d[0][2][2]), "+f"(d[0][2][3]), "+f"(d[0][3][0]), "+f"(d[0][3][1]), "+f"(d[0][3][2]), "+f"(d[0][3][3]),
        "+f"(d[0][4][0]), "+f"(d[0][4][1]), "+f"(d[0][4][2]), "+f"(d[0][4][3]), "+f"(d[0][5][0]), "+f"(d[0][5][1]), "+f"(d[0][5][2]), "+f"(d[0][5][3]),
        "+f"(d[0][6][0]), "+f"(d[0][6][1]), "+f"(d[0][6][2]), "+f"(d[0][6][3]), "+f"(d[0][7][0]), "+f"(d[0][7][1]), "+f"(d[0][7][2]), "+f"(d[0][7][3]),
        "+f"(d[0][8][0]), "+f"(d[0][8][1]), "+f"(d[0][8][2]), "+f"(d[0][8][3]), "+f"(d[0][9][0]), "+f"(d[0][9][1]), "+f"(d[0][9][2]), "+f"(d[0][9][3]),
        "+f"(d[0][10][0]), "+f"(d[0][10][1]), "+f"(d[0][10][2]), "+f"(d[0][10][3]), "+f"(d[0][11][0]), "+f"(d[0][11][1]), "+f"(d[0][11][2]), "+f"(d[0][11][3]),
        "+f"(d[0][12][0]), "+f"(d[0][12][1]), "+f"(d[0][12][2]), "+f"(d[0][12][3]), "+f"(d[0][13][0]), "+f"(d[0][13][1]), "+f"(d[0][13][2]), "+f"(d[0][13][3]),
        "+f"(d[0][14][0]), "+f"(d[0][14][1]), "+f"(d[0][14][2]), "+f"(d[0][14][3]), "+f"(d[0][15][0]), "+f"(d[0][15][1]), "+f"(d[0][15][2]), "+f"(d[0][15][3]),
        "+f"(d[0][16][0]), "+f"(d[0][16][1]), "+f"(d[0][16][2]), "+f"(d[0][16][3]), "+f"(d[0][17][0]), "+f"(d[0][17][1]), "+f"(d[0][17][2]), "+f"(d[0][17][3]),
        "+f"(d[0][18][0]), "+f"(d[0][18][1]), "+f"(d[0][18][2]), "+f"(d[0][18][3]), "+f"(d[0][19][0]), "+f"(d[0][19][1]), "+f"(d[0][19][2]), "+f"(d[0][19][3]),
        "+f"(d[0][20][0]), "+f"(d[0][20][1]), "+f"(d[0][20][2]), "+f"(d[0][20][3]), "+f"(d[0][21][0]), "+f"(d[0][21][1]), "+f"(d[0][21][2]), "+f"(d[0][21][3]),
        "+f"(d[0][22][0]), "+f"(d[0][22][1]), "+f"(d[0][22][2]), "+f"(d[0][22][3]), "+f"(d[0][23][0]), "+f"(d[0][23][1]), "+f"(d[0][23][2]), "+f"(d[0][23][3]),
        "+f"(d[0][24][0]), "+f"(d[0][24][1]), "+f"(d[0][24][2]), "+f"(d[0][24][3]), "+f"(d[0][25][0]), "+f"(d[0][25][1]), "+f"(d[0][25][2]), "+f"(d[0][25][3]),
        "+f"(d[0][26][0]), "+f"(d[0][26][1]), "+f"(d[0][26][2]), "+f"(d[0][26][3]), "+f"(d[0][27][0]), "+f"(d[0][27][1]), "+f"(d[0][27][2]), "+f"(d[0][27][3]),
        "+f"(d[0][28][0]), "+f"(d[0][28][1]), "+f"(d[0][28][2]), "+f"(d[0][28][3]), "+f"(d[0][29][0]), "+f"(d[0][29][1]), "+f"(d[0][29][2]), "+f"(d[0][29][3]),
        "+f"(d[0][30][0]), "+f"(d[0][30][1]), "+f"(d[0][30][2]), "+f"(d[0][30][3]), "+f"(d[0][31][0]), "+f"(d[0][31][1]), "+f"(d[0][31][2]), "+f"(d[0][31][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

extern "C" __global__ void __launch_bounds__(384, 1)
partial(
    uint16_t const* __restrict__ gQ,
    __grid_constant__ TensorMap const mapK,
    float* __restrict__ gO_s,
    float* __restrict__ glse_s,
    uint16_t* __restrict__ gO,
    int64_t Q_stride_b,
    int64_t Q_stride_s,
    int64_t Q_stride_h,
    int64_t O_stride_b,
    int64_t O_stride_s,
    int64_t O_stride_h,
    int const* __restrict__ key_counts,
    int const* __restrict__ pages,
    int64_t pages_stride,
    int M,
    int N,
    int rows,
    int group,
    int kv_heads,
    int batch,
    int splits,
    float scale
) {
  int const warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  uint32_t const smem_at = cast_smem_ptr_to_uint(smem);
  int const row_blocks = ceil_div(rows, 64);
  int const row0 = blockIdx.x % row_blocks * 64;
  int const rest = blockIdx.x / row_blocks;
  int const split = rest % splits, plane = rest / splits;
  int const kv_head = plane % kv_heads, sequence = plane / kv_heads;
  int const keys = key_counts == nullptr ? N : key_counts[sequence];
  int const tiles = ceil_div(keys, 64);
  int const tiles_per_split = ceil_div(tiles, splits);
  int const i_lo = split * tiles_per_split;
  int const i_hi = min(tiles, i_lo + tiles_per_split);
  int const i_full = keys / 64;  // no mask touches tiles below
  if (warpgroup == 2) {
    registers_down<24>();
    if (threadIdx.x == 256) {
      fetch_map(&mapK);
      #pragma unroll
      for (int stage = 0; stage < 2; ++stage) {
        initialize_barrier(*barrier_at(0 + stage), 1);
        initialize_barrier(*barrier_at(2 + stage), 1);
      }
      #pragma unroll
      for (int stage = 0; stage < 2; ++stage) {
        initialize_barrier(*barrier_at(4 + stage), 1);
        initialize_barrier(*barrier_at(6 + stage), 1);
      }
      #pragma unroll
      for (int stage = 0; stage < 2; ++stage) {
        initialize_barrier(*barrier_at(8 + stage), 1);
        initialize_barrier(*barrier_at(10 + stage), 1);
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      if (i_lo < i_hi) {
        int const i = i_lo;
        uint32_t const slot = 0, parity = 1;
        int page[1], page_row[1];
        #pragma unroll
        for (int piece = 0; piece < 1; ++piece) {
          int const key = i * 64 + piece * 64;
          bool const there = key < keys;
          page[piece] = there ? pages[sequence * pages_stride + key / 64] : 0;
          page_row[piece] = there ? key % 64 : 64;
        }
        // TL 4: Copy K (64, 576) in coordinate [L = i] from global to shared  (rest)
        wait(2 + slot, parity);
        expect(0 + slot, 8192);
        #pragma unroll
        for (int p = 0; p < 1; ++p) {
          int const panel = 8 + p;
          #pragma unroll
          for (int piece = 0; piece < 1; ++piece) {
            SM90_TMA_LOAD_4D::copy(&mapK, barrier_at(0 + slot), kEvictNormal,
                smem + 73728 + slot * 73728 + panel * 8192 + piece * 8192,
                panel * 64, page_row[piece], kv_head, page[piece]);
          }
        }
        // TL 4: Copy K (64, 576) in coordinate [L = i] from global to shared  (right)
        wait(6 + slot, parity);
        expect(4 + slot, 32768);
        #pragma unroll
        for (int p = 0; p < 4; ++p) {
          int const panel = 4 + p;
          #pragma unroll
          for (int piece = 0; piece < 1; ++piece) {
            SM90_TMA_LOAD_4D::copy(&mapK, barrier_at(4 + slot), kEvictNormal,
                smem + 73728 + slot * 73728 + panel * 8192 + piece * 8192,
                panel * 64, page_row[piece], kv_head, page[piece]);
          }
        }
        // TL 4: Copy K (64, 576) in coordinate [L = i] from global to shared  (left)
        wait(10 + slot, parity);
        expect(8 + slot, 32768);
        #pragma unroll
        for (int p = 0; p < 4; ++p) {
          int const panel = p;
          #pragma unroll
          for (int piece = 0; piece < 1; ++piece) {
            SM90_TMA_LOAD_4D::copy(&mapK, barrier_at(8 + slot), kEvictNormal,
                smem + 73728 + slot * 73728 + panel * 8192 + piece * 8192,
                panel * 64, page_row[piece], kv_head, page[piece]);
          }
        }
      }
    }
    // the consumers may wait on the barriers now
    __syncwarp();
    named_arrive(5, 384);
    // the first product waits for the rows: they come before the second tile
    named_sync(6, 384);
    if (threadIdx.x == 256) {
      uint32_t count = 1;
      #pragma unroll 1
      for (int i = i_lo + 1; i < i_hi; ++i, ++count) {
        uint32_t const slot = count % 2;
        uint32_t const parity = (count / 2 & 1) ^ 1;
        int page[1], page_row[1];
        #pragma unroll
        for (int piece = 0; piece < 1; ++piece) {
          int const key = i * 64 + piece * 64;
          bool const there = key < keys;
          page[piece] = there ? pages[sequence * pages_stride + key / 64] : 0;
          page_row[piece] = there ? key % 64 : 64;
        }
        // TL 4: Copy K (64, 576) in coordinate [L = i] from global to shared  (rest)
        wait(2 + slot, parity);
        expect(0 + slot, 8192);
        #pragma unroll
        for (int p = 0; p < 1; ++p) {
          int const panel = 8 + p;
          #pragma unroll
          for (int piece = 0; piece < 1; ++piece) {
            SM90_TMA_LOAD_4D::copy(&mapK, barrier_at(0 + slot), kEvictNormal,
                smem + 73728 + slot * 73728 + panel * 8192 + piece * 8192,
                panel * 64, page_row[piece], kv_head, page[piece]);
          }
        }
        // TL 4: Copy K (64, 576) in coordinate [L = i] from global to shared  (right)
        wait(6 + slot, parity);
        expect(4 + slot, 32768);
        #pragma unroll
        for (int p = 0; p < 4; ++p) {
          int const panel = 4 + p;
          #pragma unroll
          for (int piece = 0; piece < 1; ++piece) {
            SM90_TMA_LOAD_4D::copy(&mapK, barrier_at(4 + slot), kEvictNormal,
                smem + 73728 + slot * 73728 + panel * 8192 + piece * 8192,
                panel * 64, page_row[piece], kv_head, page[piece]);
          }
        }
        // TL 4: Copy K (64, 576) in coordinate [L = i] from global to shared  (left)
        wait(10 + slot, parity);
        expect(8 + slot, 32768);
        #pragma unroll
        for (int p = 0; p < 4; ++p) {
          int const panel = p;
          #pragma unroll
          for (int piece = 0; piece < 1; ++piece) {
            SM90_TMA_LOAD_4D::copy(&mapK, barrier_at(8 + slot), kEvictNormal,
                smem + 73728 + slot * 73728 + panel * 8192 + piece * 8192,
                panel * 64, page_row[piece], kv_head, page[piece]);
          }
        }
      }
    }
  }
  else {
    registers_up<240>();
    int const tid = threadIdx.x % 128, lane = tid & 31, warp = tid >> 5;
    bool const leader = tid == 0;  // arrives for its warpgroup
    // TL 2: Copy Q (64, 576) in coordinate [L = block_idx] from global to shared
     {
      int const r = threadIdx.x / 4, lane_at = threadIdx.x % 4;
      int const row = row0 + r;
      uint16_t const* const from = row < rows ? gQ + sequence * Q_stride_b + int64_t(row / group) * Q_stride_s + int64_t(kv_head * group + row % group) * Q_stride_h + lane_at * 8 : gQ;
      uint32_t const to = smem_at + r * 128;
      #pragma unroll
      for (int j = 0; j < 18; ++j) {
        copy_chunk(to + j / 2 * 8192 + ((j % 2 * 4 + lane_at) ^ (r & 7)) * 16, from + j * 32, row < rows);
      }
    }
    named_arrive(6, 384);
    asm volatile("cp.async.wait_all;" ::: "memory");
    visible_to_async();
    // all rows are there, and the barriers
    named_sync(5, 384);
    if (warpgroup == 0) {
      uint32_t scored = 0, multiplied = 0;  // tiles
      float O_s[1][32][4];
      float S[1][8][4];
      float lse_s[1][2];
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
      // TL 3: Compute Fill O_s, 0.0
      #pragma unroll
      for (int m = 0; m < 1; ++m) {
        #pragma unroll
        for (int n = 0; n < 32; ++n) {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            O_s[m][n][e] = 0.f;
          }
        }
      }
      uint32_t Q_r[4][4];
       {
        int const row = warp * 16 + (lane & 15);
        uint32_t const rows_at = smem_at + 65536 + row * 128;
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          ldsm(Q_r[k], rows_at + k / 4 * 8192 + ((k % 4 * 2 + (lane >> 4)) ^ (row & 7)) * 16);
        }
      }
      uint32_t S_a[1][4][4];
      int i = i_lo;
      #pragma unroll 1
      for (; i < i_hi; ++i) {
        // TL 5: Compute GEMM Q, K.T and get S
         {
          uint32_t const slot = scored % 2;
          uint64_t const a = tile_descriptor(here(smem_at), 16);
          uint64_t const b = tile_descriptor(smem_at + 73728 + slot * 73728, 16);
          wait(0 + slot, scored / 2 & 1);
          warpgroup_fence();
          #pragma unroll
          for (int k = 32; k < 36; ++k) {
            int const panel = k / 4, within = k % 4 * 32;
            wgmma_64x64x16_rs(S, Q_r[k - 32], b + (panel * 8192 + within) / 16, k > 32);
          }
          warpgroup_commit();
          wait(4 + slot, scored / 2 & 1);
          warpgroup_fence();
          #pragma unroll
          for (int k = 16; k < 32; ++k) {
            int const panel = k / 4, within = k % 4 * 32;
            wgmma_64x64x16_ss(S, a + (panel * 8192 + within) / 16, b + (panel * 8192 + within) / 16, 1);
          }
          warpgroup_commit();
          wait(8 + slot, scored / 2 & 1);
          warpgroup_fence();
          #pragma unroll
          for (int k = 0; k < 16; ++k) {
            int const panel = k / 4, within = k % 4 * 32;
            wgmma_64x64x16_ss(S, a + (panel * 8192 + within) / 16, b + (panel * 8192 + within) / 16, 1);
          }
          warpgroup_commit();
        }
        warpgroup_wait<0>();
        hold(S);
        if (leader) arrive(2 + scored % 2);
        ++scored;
         {
          // TL 6: Compute Scale S, scale
          // the factor is part of the softmax's exponent; only its sign is applied here
          if (scale < 0.f) {
            #pragma unroll
            for (int m = 0; m < 1; ++m) {
              #pragma unroll
              for (int n = 0; n < 8; ++n) {
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
            for (int r = 0; r < 2; ++r) {
              int const last = keys - 1 - (i * 64 + (lane & 3) * 2);
              #pragma unroll
              for (int n = 0; n < 8; ++n) {
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                  if (n * 8 + c > last) S[0][n][r * 2 + c] = -INFINITY;
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
              for (int n = 1; n < 8; ++n) {
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
                for (int n = 1; n < 8; ++n) {
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
                for (int n = 0; n < 32; ++n) {
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
          for (int m = 0; m < 1; ++m) {
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
        }
        // TL 8: Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
        #pragma unroll
        for (int m = 0; m < 1; ++m) {
          #pragma unroll
          for (int k = 0; k < 4; ++k) {
            S_a[m][k][0] = pack(S[m][k * 2 + 0][0], S[m][k * 2 + 0][1]);
            S_a[m][k][1] = pack(S[m][k * 2 + 0][2], S[m][k * 2 + 0][3]);
            S_a[m][k][2] = pack(S[m][k * 2 + 1][0], S[m][k * 2 + 1][1]);
            S_a[m][k][3] = pack(S[m][k * 2 + 1][2], S[m][k * 2 + 1][3]);
          }
        }
        if (i > i_lo) named_sync(4, 256);
        uint32_t const p_at = smem_at + 221184 + tid * 16;
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          store_words(p_at + k * 2048, S_a[0][k][0], S_a[0][k][1], S_a[0][k][2], S_a[0][k][3]);
        }
        *reinterpret_cast<float2*>(smem + 229376 + tid * 8) = {S_max[0][0], S_max[0][1]};
        named_arrive(3, 256);
        // TL 9: Compute GEMM S, K[:, 0:512] and accumulate O_s
        wait(8 + multiplied % 2, multiplied / 2 & 1);
         {
          uint32_t const values_at = smem_at + 73728 + multiplied % 2 * 73728 + 0;
          if ((i + 1) * 64 > keys) {
            int const left = keys - (i) * 64;
            #pragma unroll 1
            for (int at = tid; at < 2048; at += 128) {
              int const r = at % 64, chunk = at / 64;
              if (r >= left) chunk_at(values_at + chunk / 8 * 8192 + r * 128 + chunk % 8 * 16) = uint128_t{};
            }
            visible_to_async();
            named_sync(1 + 0, 128);
          }
          uint64_t const b = tile_descriptor(values_at, 8192);
          warpgroup_fence();
          #pragma unroll
          for (int k = 0; k < 4; ++k) {
            wgmma_64x256x16_rs_rows(O_s, S_a[0][k], b + k * 128, 1);
          }
          warpgroup_commit();
        }
        warpgroup_wait<0>();
        hold(O_s);
        if (leader) arrive(10 + multiplied % 2);
        ++multiplied;
      }
       {
        float inverse[2];
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          float const total = quad_sum(S_sum[0][r]);
          inverse[r] = total == 0.f ? 0.f : 1.f / total;
        }
        if (i_lo < i_hi) named_sync(4, 256);
        *reinterpret_cast<float2*>(smem + 229376 + tid * 8) = {inverse[0], inverse[1]};
        named_arrive(3, 256);
      }
      // TL 3: Compute Normalize O_s, S
      #pragma unroll
      for (int m = 0; m < 1; ++m) {
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          float const total = quad_sum(S_sum[m][r]);
          float const inverse = total == 0.f ? 0.f : 1.f / total;
          #pragma unroll
          for (int n = 0; n < 32; ++n) {
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
          float const total = quad_sum(S_sum[m][r]);
          lse_s[m][r] = total == 0.f ? -INFINITY : (S_max[m][r] * S_log2 + log2f(total)) * 0.69314718056f;
        }
      }
      // TL 12: Copy O_s (64, 512) in coordinate [L = block_idx, splits = split] from register to global
       {
        unsigned char* const staged = smem + 0;
        int const pitch = splits > 1 ? 1056 : 528;
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          int const own_row = warp * 16 + r * 8 + lane / 4;
          unsigned char* const to = staged + own_row * pitch;
          if (splits > 1) {
            #pragma unroll
            for (int n = 0; n < 32; ++n) {
              *reinterpret_cast<float2*>(to + n * 32 + (lane & 3) * 8) = {O_s[0][n][r * 2 + 0], O_s[0][n][r * 2 + 1]};
            }
          }
          else {
            #pragma unroll
            for (int n = 0; n < 32; ++n) {
              *reinterpret_cast<uint32_t*>(to + n * 16 + (lane & 3) * 4) = pack(O_s[0][n][r * 2 + 0], O_s[0][n][r * 2 + 1]);
            }
          }
        }
        visible_to_async();
        named_sync(1 + 0, 128);
        int const row = row0 + tid;
        if (tid < 64 && row < rows) {
          uint32_t const from = cast_smem_ptr_to_uint(staged + tid * pitch);
          if (splits > 1) store_bulk(gO_s + ((int64_t(split) * kv_heads * batch + plane) * rows + row) * 512, from, 1024);
          // the keys are in one piece: this is the output
          else store_bulk(gO + sequence * O_stride_b + int64_t(row / group) * O_stride_s + int64_t(kv_head * group + row % group) * O_stride_h, from, 512);
          asm volatile("cp.async.bulk.commit_group;" ::: "memory");
          asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        }
      }
      // TL 13: Copy lse_s (64, 1) in coordinate [L = block_idx, splits = split] from register to global
      #pragma unroll
      for (int r = 0; r < 2; ++r) {
        int const row = row0 + warp * 16 + r * 8 + lane / 4;
        if (splits > 1 && lane % 4 == 0 && row < rows) glse_s[(int64_t(split) * kv_heads * batch + plane) * rows + row] = lse_s[0][r];
      }
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
    else {
      uint32_t multiplied = 0;  // tiles
      float O_s[1][32][4];
      #pragma unroll
      for (int n = 0; n < 32; ++n) {
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
          O_s[0][n][e] = 0.f;
        }
      }
      float const log2 = fmaxf(fabsf(scale), 1e-37f) * 1.44269504089f;
      float top[2] = {-INFINITY, -INFINITY};
      #pragma unroll 1
      for (int i = i_lo; i < i_hi; ++i) {
        uint32_t S_a[1][4][4];
        named_sync(3, 256);
        uint32_t const p_at = smem_at + 221184 + tid * 16;
        #pragma unroll
        for (int k = 0; k < 4; ++k) {
          load_words(p_at + k * 2048, S_a[0][k][0], S_a[0][k][1], S_a[0][k][2], S_a[0][k][3]);
        }
        float2 const high = *reinterpret_cast<float2 const*>(smem + 229376 + tid * 8);
        named_arrive(4, 256);
        if (__any_sync(~0u, high.x != top[0] || high.y != top[1])) {
          #pragma unroll
          for (int r = 0; r < 2; ++r) {
            float const own = r ? high.y : high.x;
            float const decay = own == -INFINITY ? 1.f : exp2_approx((top[r] - own) * log2);
            top[r] = own;
            #pragma unroll
            for (int n = 0; n < 32; ++n) {
              O_s[0][n][r * 2] *= decay;
              O_s[0][n][r * 2 + 1] *= decay;
            }
          }
        }
        // TL 9: Compute GEMM S, K[:, 0:512] and accumulate O_s
        wait(4 + multiplied % 2, multiplied / 2 & 1);
         {
          uint32_t const values_at = smem_at + 73728 + multiplied % 2 * 73728 + 32768;
          if ((i + 1) * 64 > keys) {
            int const left = keys - (i) * 64;
            #pragma unroll 1
            for (int at = tid; at < 2048; at += 128) {
              int const r = at % 64, chunk = at / 64;
              if (r >= left) chunk_at(values_at + chunk / 8 * 8192 + r * 128 + chunk % 8 * 16) = uint128_t{};
            }
            visible_to_async();
            named_sync(1 + 1, 128);
          }
          uint64_t const b = tile_descriptor(values_at, 8192);
          warpgroup_fence();
          #pragma unroll
          for (int k = 0; k < 4; ++k) {
            wgmma_64x256x16_rs_rows(O_s, S_a[0][k], b + k * 128, 1);
          }
          warpgroup_commit();
        }
        warpgroup_wait<0>();
        hold(O_s);
        if (leader) arrive(6 + multiplied % 2);
        ++multiplied;
      }
      named_sync(3, 256);
      float2 const inverse = *reinterpret_cast<float2 const*>(smem + 229376 + tid * 8);
      #pragma unroll
      for (int n = 0; n < 32; ++n) {
        #pragma unroll
        for (int e = 0; e < 4; ++e) {
          O_s[0][n][e] *= e < 2 ? inverse.x : inverse.y;
        }
      }
      // TL 12: Copy O_s (64, 512) in coordinate [L = block_idx, splits = split] from register to global
       {
        unsigned char* const staged = smem + 67584;
        int const pitch = splits > 1 ? 1056 : 528;
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          int const own_row = warp * 16 + r * 8 + lane / 4;
          unsigned char* const to = staged + own_row * pitch;
          if (splits > 1) {
            #pragma unroll
            for (int n = 0; n < 32; ++n) {
              *reinterpret_cast<float2*>(to + n * 32 + (lane & 3) * 8) = {O_s[0][n][r * 2 + 0], O_s[0][n][r * 2 + 1]};
            }
          }
          else {
            #pragma unroll
            for (int n = 0; n < 32; ++n) {
              *reinterpret_cast<uint32_t*>(to + n * 16 + (lane & 3) * 4) = pack(O_s[0][n][r * 2 + 0], O_s[0][n][r * 2 + 1]);
            }
          }
        }
        visible_to_async();
        named_sync(1 + 1, 128);
        int const row = row0 + tid;
        if (tid < 64 && row < rows) {
          uint32_t const from = cast_smem_ptr_to_uint(staged + tid * pitch);
          if (splits > 1) store_bulk(gO_s + ((int64_t(split) * kv_heads * batch + plane) * rows + row) * 512 + 256, from, 1024);
          // the keys are in one piece: this is the output
          else store_bulk(gO + sequence * O_stride_b + int64_t(row / group) * O_stride_s + int64_t(kv_head * group + row % group) * O_stride_h + 256, from, 512);
          asm volatile("cp.async.bulk.commit_group;" ::: "memory");
          asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        }
      }
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
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
  asm volatile("griddepcontrol.wait;" ::: "memory");
  float top;
  float lse_s;
  float O[4];
  float total_;
  float O_s[4];
  float w;
  // TL 16: Compute Fill top, -inf
  top = -INFINITY;
  // TL 17: Copy lse_s (64, 1) in coordinate [L = block_idx, splits = s] from global to register
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
  // TL 21: Copy O_s (64, 512) in coordinate [L = block_idx, splits = s] from global to register
  float O_s_next4[4][4];
  // TL 22: Copy lse_s (64, 1) in coordinate [L = block_idx, splits = s] from global to register
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
  // TL 30: Copy O (64, 512) in coordinate [L = block_idx] from register to global
  if (group_at == 0) {
    int const batch_at = plane / kv_heads, kv_head = plane % kv_heads;
    *reinterpret_cast<uint2*>(gO + batch_at * O_stride_b + int64_t(row / group) * O_stride_s + int64_t(kv_head * group + row % group) * O_stride_h + column) = {pack(O[0], O[1]), pack(O[2], O[3])};
  }
}
