"""A plain CUDA attention kernel, written by hand, and the ways to spoil it.

One block for each query row; right but slow. A spoiled kernel is the same text with one change.
"""

from __future__ import annotations

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
    for (int d = 0; d < D; ++d) s += float(q[d]) * float(k[j * K_s + d]);
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
      for (int c = threadIdx.x, n = 0; c < Dv; c += kThreads, ++n)
        acc[n] += weights[i] * float(v[(first + i) * V_s + c]);
    __syncthreads();
  }
  total = block_sum(total, buffer);
  for (int c = threadIdx.x, n = 0; c < Dv; c += kThreads, ++n)
    o[c] = T(visible > 0 ? acc[n] / total : 0.f);
  @AFTER@
}
"""

#: name -> (text that replaces @BEFORE@, text that replaces @AFTER@)
SPOILED = {
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
    "right 19 times of 20": (
        "",
        "if (!threadIdx.x && !blockIdx.x) { if (++launches % 20 == 0) o[0] = T(9.f); }",
    ),
    "endless loop": ("while (true) { __nanosleep(1000); }", ""),
    "trap": ('asm volatile("trap;");', ""),
    "illegal address": ("*(volatile int*)16 = row;", ""),
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
    before, after = SPOILED.get(spoil, ("", ""))
    text = TEXT
    if "launches" in after:
        text = text.replace("using T", "__device__ int launches = 0;\n\nusing T", 1)
    for name, value in {
        "@T@": "__half" if problem.dtype is DType.FP16 else "__nv_bfloat16",
        "@D@": str(problem.head_dim),
        "@DV@": str(problem.head_dim_v),
        "@CAUSAL@": str(problem.causal).lower(),
        "@BEFORE@": before,
        "@AFTER@": after,
    }.items():
        text = text.replace(name, value)
    grid = (GridAxis("M", 1), GridAxis("heads", 1), GridAxis("batch", 1))
    launch = Launch("attention", THREADS, smem_bytes, grid, ARGS)
    tensors = (("Q", "in"), ("K", "in"), ("V", "in"), ("O", "out"))
    return KernelSource(text, "sm_80", (launch,), tensors)
