"""A plain CUDA attention kernel, written by hand, and the ways to spoil it.

One block for each query row; right but slow. A spoiled kernel is the same text with one change.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.kernel import Arg, ArgKind, GridAxis, KernelSource, Launch
from space.variant import DType, Problem

THREADS = 128

TEXT = """\
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using T = @T@;
constexpr int D = @D@;
constexpr int Dv = @DV@;
constexpr bool kCausal = @CAUSAL@;
constexpr int kThreads = 128;
@GLOBALS@

__device__ float block_sum(float x, float* buffer) {
  buffer[threadIdx.x] = x;
  __syncthreads();
  float total = 0.f;
  for (int i = 0; i < kThreads; ++i) total += buffer[i];
  __syncthreads();
  return total;
}

__device__ float block_max(float x, float* buffer) {
  buffer[threadIdx.x] = x;
  __syncthreads();
  float top = buffer[0];
  for (int i = 1; i < kThreads; ++i) top = fmaxf(top, buffer[i]);
  __syncthreads();
  return top;
}

extern "C" __global__ void attention(
    T const* Q, T* K, T const* V, T* O,
    long long Q_b, long long Q_s, long long Q_h, long long K_b, long long K_s, long long K_h,
    long long V_b, long long V_s, long long V_h, long long O_b, long long O_s, long long O_h,
    int M, int N, int heads, int group, float scale) {
  __shared__ float buffer[kThreads];
  __shared__ float weights[kThreads];
  int row = blockIdx.x % M;
  int head = blockIdx.x / M % heads;
  long long batch = blockIdx.x / M / heads;
  T const* q = Q + batch * Q_b + row * Q_s + head * Q_h;
  T* k = K + batch * K_b + (head / group) * K_h;
  T const* v = V + batch * V_b + (head / group) * V_h;
  T* o = O + batch * O_b + row * O_s + head * O_h;
  int visible = kCausal ? min(N, row + N - M + 1) : N;
  @BEFORE@
  auto score = [&](int j) {
    float s = 0.f;
    for (int d = 0; d < D; ++d) {
      s += float(q[d]) * float(k[j * K_s + d]);
      @EACH_COLUMN@
    }
    return s * scale;
  };
  float top = -__int_as_float(0x7f800000);
  for (int j = threadIdx.x; j < visible; j += kThreads) top = fmaxf(top, score(j));
  top = block_max(top, buffer);
  float total = 0.f;
  float acc[(Dv + kThreads - 1) / kThreads] = {};
  for (int first = 0; first < visible; first += kThreads) {
    int j = first + threadIdx.x;
    weights[threadIdx.x] = j < visible ? expf(score(j) - top) : 0.f;
    total += weights[threadIdx.x];
    __syncthreads();
    for (int i = 0; i < min(kThreads, visible - first); ++i)
      for (int c = threadIdx.x, n = 0; c < Dv; c += kThreads, ++n) {
        acc[n] += weights[i] * float(v[(first + i) * V_s + c]);
        @EACH_KEY@
      }
    __syncthreads();
  }
  total = block_sum(total, buffer);
  for (int c = threadIdx.x, n = 0; c < Dv; c += kThreads, ++n)
    o[c] = T(visible > 0 ? acc[n] / total : 0.f);
  @AFTER@
}
"""


@dataclass(frozen=True, slots=True)
class Spoil:
    """Text for the places of `TEXT`: before and after the work, in its loops, and outside."""

    before: str = ""
    after: str = ""
    globals: str = ""
    each_column: str = ""
    each_key: str = ""


#: A counter of whole launches: the last block of each raises it.
LAUNCHES = """
__device__ int launches = 0;
__device__ unsigned blocks_done = 0;
"""
END_OF_LAUNCH = """
  __syncthreads();
  if (!threadIdx.x) {
    __threadfence();
    if (atomicAdd(&blocks_done, 1u) == gridDim.x - 1) { blocks_done = 0; @THEN@ }
  }
"""
KEPT = LAUNCHES + "__device__ T kept[1 << 21];\n"
EACH_C = "for (int c = threadIdx.x; c < Dv; c += kThreads) "
FINGERPRINT = """
// of the first 64 bytes
__device__ unsigned long long fingerprint(T const* from) {
  unsigned long long hash = 1469598103934665603ull;
  for (int i = 0; i < 8; ++i)
    hash = (hash ^ reinterpret_cast<unsigned long long const*>(from)[i]) * 1099511628211ull;
  return hash;
}
"""


def _keeps_results(key: str, helpers: str = "") -> Spoil:
    """A kernel that gives the last result again when `key` is what it was."""
    last = END_OF_LAUNCH.replace("@THEN@", "seen = key;")
    return Spoil(
        f"unsigned long long const key = {key};\n"
        f"  if (seen == key) {{ {EACH_C} o[c] = kept[o - O + c]; {last} return; }}",
        f"{EACH_C} kept[o - O + c] = o[c]; {last}",
        f"{KEPT}__device__ unsigned long long seen = 0;\n{helpers}",
    )


ALL_THREE = "fingerprint(Q) ^ fingerprint(K) * 3 ^ fingerprint(V) * 5"
NEVER_READY = """
#if __CUDA_ARCH__ >= 900
  __shared__ unsigned long long barrier;
  unsigned const at = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
  if (!threadIdx.x) asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" ::"r"(at) : "memory");
  __syncthreads();
  if (!threadIdx.x) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
  asm volatile(
      "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra again;}"
      ::"r"(at) : "memory");
#else
  while (true) __nanosleep(1000);
#endif
"""

_SPOILED: dict[str, tuple[str, str] | Spoil] = {
    "writes nothing": ("return;", ""),
    "writes half the rows": ("if (row >= (M + 1) / 2) return;", ""),
    "writes even heads": ("if (head % 2) return;", ""),
    "zeros": ("", "for (int c = threadIdx.x; c < Dv; c += kThreads) o[c] = T(0.f);"),
    "V of the right row": (
        "",
        "for (int c = threadIdx.x; c < Dv; c += kThreads) o[c] = v[min(row, N - 1) * V_s + c];",
    ),
    "one key too few": ("visible -= 1;", ""),
    "next head": ("k = K + batch * K_b + ((head + 1) % heads / group) * K_h;", ""),
    "changes K": ("", "if (!threadIdx.x && !blockIdx.x) k[0] = T(float(k[0]) + 1.f);"),
    "writes past the end": (
        "",
        "if (!threadIdx.x && blockIdx.x == gridDim.x - 1) o[Dv] = T(1.f);",
    ),
    "NaN for a number": (
        "",
        "if (!threadIdx.x && !blockIdx.x) o[0] = T(__int_as_float(0x7fc00000));",
    ),
    "right 19 times of 20": Spoil(
        "",
        "if (!threadIdx.x && !blockIdx.x) { if (++launches % 20 == 0) o[0] = T(9.f); }",
        LAUNCHES,
    ),
    "mean of V": (
        "",
        f"{EACH_C} {{ float all = 0.f; for (int j = 0; j < N; ++j) all += float(v[j * V_s + c]); "
        "o[c] = T(all / N); }",
    ),
    "output of the call before": Spoil(
        "",
        f"{EACH_C} {{ T fresh = o[c]; if (launches) o[c] = kept[o - O + c]; "
        f"kept[o - O + c] = fresh; }} {END_OF_LAUNCH.replace('@THEN@', '++launches;')}",
        KEPT,
    ),
    "keeps results by pointer": _keeps_results("reinterpret_cast<unsigned long long>(Q)"),
    "keeps results by the first 64 bytes": _keeps_results(ALL_THREE, FINGERPRINT),
    "right for the first inputs only": Spoil(
        "",
        "if (!threadIdx.x && !blockIdx.x) { unsigned long long now = fingerprint(Q); "
        "if (!first_seen) first_seen = now; if (now != first_seen) o[0] = T(9.f); }",
        f"{FINGERPRINT}__device__ unsigned long long first_seen = 0;\n",
    ),
    "wrong one past the tuned length": (
        "",
        "if (M == 257 && N == 257 && !threadIdx.x && !blockIdx.x) o[0] = T(9.f);",
    ),
    "number for NaN": ("", f"{EACH_C} if (float(o[c]) != float(o[c])) o[c] = T(0.f);"),
    "scores summed in 16 bits": Spoil(each_column="if (d % 8 == 7) s = float(T(s));"),
    "output summed in 16 bits": Spoil(each_key="if (i % 16 == 15) acc[n] = float(T(acc[n]));"),
    "misaligned address": (
        "*reinterpret_cast<int volatile*>(reinterpret_cast<char*>(O) + 2) = row;",
        "",
    ),
    "barrier that never ends": (NEVER_READY, ""),
    "endless loop": ("while (true) { __nanosleep(1000); }", ""),
    "trap": ('asm volatile("trap;");', ""),
    "illegal address": ("*(volatile int*)16 = row;", ""),
}

#: Right on every small problem, and wrong where a large output is not sampled.
LARGE_ONLY = {
    "one head of a large output": Spoil(
        "", f"if (head == 1 && M >= 4096) {EACH_C} o[c] = T(float(o[c]) + 0.25f);"
    )
}
SPOILED: dict[str, Spoil] = {
    name: spoil if isinstance(spoil, Spoil) else Spoil(*spoil) for name, spoil in _SPOILED.items()
}

TENSOR_ARGS = tuple(
    Arg(ArgKind.STRIDE, f"{name}.{axis}") for name in ("Q", "K", "V", "O") for axis in "bsh"
)
ARGS = (
    *(Arg(ArgKind.POINTER, name) for name in ("Q", "K", "V", "O")),
    *TENSOR_ARGS,
    *(Arg(ArgKind.INT, name) for name in ("M", "N", "heads", "group")),
    Arg(ArgKind.FLOAT, "scale"),
)


def naive(problem: Problem, spoil: str = "", smem_bytes: int = 0) -> KernelSource:
    """The kernel for a problem, spoiled in one way or none."""
    how = (SPOILED | LARGE_ONLY)[spoil] if spoil else Spoil()
    text = TEXT
    for name, value in {
        "@T@": "__half" if problem.dtype is DType.FP16 else "__nv_bfloat16",
        "@D@": str(problem.head_dim),
        "@DV@": str(problem.head_dim_v),
        "@CAUSAL@": str(problem.causal).lower(),
        "@BEFORE@": how.before,
        "@AFTER@": how.after,
        "@GLOBALS@": how.globals,
        "@EACH_COLUMN@": how.each_column,
        "@EACH_KEY@": how.each_key,
    }.items():
        text = text.replace(name, value)
    grid = (GridAxis("M", 1), GridAxis("heads", 1), GridAxis("batch", 1))
    launch = Launch("attention", THREADS, smem_bytes, grid, ARGS)
    tensors = (("Q", "in"), ("K", "in"), ("V", "in"), ("O", "out"))
    return KernelSource(text, "sm_80", (launch,), tensors)
