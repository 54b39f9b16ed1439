// Runs an emitted kernel on the host: a block's threads are fibers of one thread, which give way
// only where they meet. What a kernel calls of its prelude is here, in plain C++.
//
// Two switches widen what a missing barrier or wait can spoil: copies land as early as they may (at
// their issue) or as late (at the wait for their group), and threads run forwards or backwards.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#define __global__
#define __restrict__
#define __launch_bounds__(...)

using std::max;
using std::min;

struct alignas(16) uint128_t { uint64_t low, high; };
struct uint2 { uint32_t x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };

// ---- threads -----------------------------------------------------------------------------------

struct Transfer { void* to; void const* from; bool valid; };
struct Thread {
  ucontext_t context;
  int id = 0;
  bool done = false;
  std::vector<Transfer> open;                 // issued, in no group yet
  std::vector<std::vector<Transfer>> groups;  // in flight, oldest first
};
struct Meeting {
  int waiting = 0, round = 0;
  bool voted[2] = {false, false}, result = false;
};

constexpr int kWarp = 32, kSmemBytes = 228 << 10, kStackBytes = 128 << 10;
alignas(1024) static unsigned char smem[kSmemBytes];
static std::vector<Thread> threads;
static Thread* self;
static ucontext_t scheduler;
static std::function<void()> kernel_call;
static Meeting block_meeting, warp_meetings[kWarp];
static bool copies_land_late;
static struct { int x; } blockIdx, gridDim;
static struct { struct { operator int() const { return self->id; } } x; } threadIdx;

static char const* fault;  // what ended the launch

static void fail(char const* what) {
  fault = what;
  for (;;) swapcontext(&self->context, &scheduler);  // which goes on with no thread
}
static bool meet(Meeting& m, int count, bool vote = false) {
  int const round = m.round;
  m.voted[round & 1] |= vote;
  if (++m.waiting == count) {
    m.waiting = 0;
    m.result = m.voted[round & 1];
    m.voted[round & 1] = false;
    ++m.round;
    return m.result;
  }
  while (m.round == round) swapcontext(&self->context, &scheduler);
  // nobody can end the next round before every thread has left this one
  return m.result;
}
static Meeting& own_warp() { return warp_meetings[self->id / kWarp]; }

inline void __syncthreads() { meet(block_meeting, int(threads.size())); }
inline bool __syncthreads_or(bool vote) { return meet(block_meeting, int(threads.size()), vote); }
inline void __syncwarp() { meet(own_warp(), kWarp); }
inline bool __any_sync(unsigned, bool vote) { return meet(own_warp(), kWarp, vote); }

static uint32_t shown[kWarp][kWarp][6];  // by warp and lane: what a lane shows its warp
static auto& lanes() { return shown[self->id / kWarp]; }

inline float __shfl_xor_sync(unsigned, float x, int mask) {
  int const lane = self->id % kWarp;
  std::memcpy(&lanes()[lane][0], &x, 4);
  __syncwarp();
  float y;
  std::memcpy(&y, &lanes()[lane ^ mask][0], 4);
  __syncwarp();
  return y;
}

// ---- numbers -----------------------------------------------------------------------------------

#ifdef BF16
inline float widen(uint16_t x) {
  uint32_t const bits = uint32_t(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
inline uint16_t narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return x != x ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
#else
inline float widen(uint16_t x) {
  _Float16 y;
  std::memcpy(&y, &x, 2);
  return y;
}
inline uint16_t narrow(float x) {
  _Float16 const y = _Float16(x);
  uint16_t bits;
  std::memcpy(&bits, &y, 2);
  return bits;
}
#endif
inline uint32_t pack(float low, float high) { return narrow(low) | uint32_t(narrow(high)) << 16; }
inline float2 unpack(uint32_t x) { return {widen(x), widen(x >> 16)}; }
inline float exp2_approx(float x) { return exp2f(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline float minus(float a, float b) {
  return a == -INFINITY && b == -INFINITY ? -INFINITY : a - b;
}
inline float over(float a, float b) { return b == 0.f ? 0.f : a / b; }
inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// ---- memory ------------------------------------------------------------------------------------

inline uint32_t cast_smem_ptr_to_uint(void* p) { return static_cast<unsigned char*>(p) - smem; }
inline uint128_t& chunk_at(uint32_t address) {
  if (address % 16 || address + 16 > kSmemBytes) fail("no chunk of shared memory");
  return *reinterpret_cast<uint128_t*>(smem + address);
}
inline uint32_t pin(uint32_t address) { return address; }
template <class T>
T __ldg(T const* p) { return *p; }

inline void perform(Transfer const& t) {
  if (t.valid) std::memcpy(t.to, t.from, 16);
  else std::memset(t.to, 0, 16);
}
template <class T>
struct SM80_CP_ASYNC_CACHEGLOBAL_ZFILL {
  static void copy(T const& from, T& to, bool valid) {
    if (valid && reinterpret_cast<uintptr_t>(&from) % 16) fail("a copy from an odd address");
    Transfer const t{&to, &from, valid};
    if (copies_land_late) self->open.push_back(t);
    else perform(t);
  }
};
inline void cp_async_fence() { self->groups.push_back(std::exchange(self->open, {})); }
template <int N>
void cp_async_wait() {
  while (int(self->groups.size()) > N) {
    for (auto const& t : self->groups.front()) perform(t);
    self->groups.erase(self->groups.begin());
  }
}

// ---- tensor cores ------------------------------------------------------------------------------

// 8x8 matrices of 16-bit elements, one row's address from each lane; lane l gets elements
// 2 * (l % 4) and the next of row l / 4, or of column l / 4 where the matrix is transposed
template <int N>
void load_matrices(uint32_t (&r)[N], uint32_t address, bool transposed) {
  int const lane = self->id % kWarp;
  lanes()[lane][0] = address;
  __syncwarp();
  for (int i = 0; i < N; ++i) {
    uint16_t x[2];
    for (int e = 0; e < 2; ++e) {
      int const row = transposed ? lane % 4 * 2 + e : lane / 4;
      int const column = transposed ? lane / 4 : lane % 4 * 2 + e;
      auto const* chunk = &chunk_at(lanes()[i * 8 + row][0]);
      std::memcpy(&x[e], reinterpret_cast<char const*>(chunk) + column * 2, 2);
    }
    r[i] = x[0] | uint32_t(x[1]) << 16;
  }
  __syncwarp();
}
inline void ldsm(uint32_t (&r)[4], uint32_t address) { load_matrices(r, address, false); }
inline void ldsm(uint32_t (&r)[2], uint32_t address) { load_matrices(r, address, false); }
inline void ldsm_t(uint32_t (&r)[4], uint32_t address) { load_matrices(r, address, true); }
inline void ldsm_t(uint32_t (&r)[2], uint32_t address) { load_matrices(r, address, true); }

// c += a.b of 16 x 8 x K; a register of A or B holds two elements of 8 columns, or rows, of K
template <int K>
void multiply(float (&c)[4], uint32_t const* a, uint32_t const* b) {
  int const lane = self->id % kWarp;
  auto& warp = lanes();
  std::copy(a, a + K / 4, warp[lane]);
  std::copy(b, b + K / 8, warp[lane] + 4);
  __syncwarp();
  auto const element = [](uint32_t x, int k) { return widen(k & 1 ? x >> 16 : x); };
  for (int e = 0; e < 4; ++e) {
    int const row = lane / 4 + (e >> 1) * 8, column = lane % 4 * 2 + (e & 1);
    for (int k = 0; k < K; ++k) {
      int const within = k % 8 / 2;
      uint32_t const x = warp[row % 8 * 4 + within][row / 8 + k / 8 * 2];
      c[e] += element(x, k) * element(warp[column * 4 + within][4 + k / 8], k);
    }
  }
  __syncwarp();
}
inline void mma(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  uint32_t const b[2] = {b0, b1};
  multiply<16>(c, a, b);
}
inline void mma(float (&c)[4], uint32_t const (&a)[2], uint32_t b) { multiply<8>(c, a, &b); }

// ---- launch ------------------------------------------------------------------------------------

static void run_thread() {
  kernel_call();
  self->done = true;
  swapcontext(&self->context, &scheduler);
}

static void run_block(std::vector<std::vector<char>>& stacks, bool backwards) {
  // two bytes of 0x7fff are NaN in either 16-bit type, four in float
  for (int i = 0; i < kSmemBytes; ++i) smem[i] = i & 1 ? 0x7f : 0xff;
  block_meeting = {};
  for (auto& m : warp_meetings) m = {};
  int const count = int(stacks.size());
  threads.assign(count, {});
  for (int t = 0; t < count; ++t) {
    Thread& thread = threads[t];
    thread.id = t;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks[t].data();
    thread.context.uc_stack.ss_size = stacks[t].size();
    makecontext(&thread.context, run_thread, 0);
  }
  for (int left = count, idle = 0; left;) {
    int const rounds = block_meeting.round;
    bool moved = false;
    left = 0;
    for (int k = 0; k < count; ++k) {
      self = &threads[backwards ? count - 1 - k : k];
      if (self->done) continue;
      int const before = own_warp().round;
      swapcontext(&scheduler, &self->context);
      if (fault != nullptr) return;
      left += !self->done;
      moved |= self->done || own_warp().round != before;
    }
    idle = moved || block_meeting.round != rounds ? 0 : idle + 1;
    if (idle > 2) {
      fault = "threads wait for others that have ended or wait elsewhere";
      return;
    }
  }
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
  kernel(*static_cast<A*>(args[I])...);
}
// Returns what went wrong, or null.
template <class... A>
char const* launch(
    void (*kernel)(A...), int grid, int block, void** args, bool late, bool backwards) {
  kernel_call = [=] { call(kernel, args, std::index_sequence_for<A...>{}); };
  copies_land_late = late;
  gridDim.x = grid;
  fault = nullptr;
  std::vector<std::vector<char>> stacks(block, std::vector<char>(kStackBytes));
  for (blockIdx.x = 0; blockIdx.x < grid && fault == nullptr; ++blockIdx.x)
    run_block(stacks, backwards);
  return fault;
}
