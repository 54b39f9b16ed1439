"""What a kernel that only reads K and V takes, beside exported decode kernels: the real floor.

    PYTHONPATH=FOLDER python reader.py FOLDER --json reader.json

FOLDER holds `export`, a package of `tune export`. For each decode shape that it was tuned on, all
is replayed as CUDA graphs, in turns, median microseconds of 9 rounds. Before each replay the L2 is
filled with 256 MiB, once by writing them (as is usual, so that what was written must leave while
the keys come) and once by reading.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc
from export import attention

ROUNDS, THREADS, FILL_BYTES = 9, 512, 256 << 20
SOURCE = """
extern "C" __global__ void __launch_bounds__(512)
read(uint4 const* from, long long n, unsigned* out) {
  unsigned seen = 0;
  for (long long i = (long long)blockIdx.x * 512 * UNROLL + threadIdx.x; i < n;
       i += (long long)gridDim.x * 512 * UNROLL) {
    uint4 x[UNROLL];
    #pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      x[u] = make_uint4(0, 0, 0, 0);
      if (i + u * 512 < n) asm volatile(
          "{.reg .b64 policy; createpolicy.fractional.L2::" POLICY ".b64 policy, 1.0;"
          "ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], policy;}"
          : "=r"(x[u].x), "=r"(x[u].y), "=r"(x[u].z), "=r"(x[u].w) : "l"(from + i + u * 512));
    }
    #pragma unroll
    for (int u = 0; u < UNROLL; ++u) seen ^= x[u].x ^ x[u].y ^ x[u].z ^ x[u].w;
  }
  if (seen == 0x12345678u) *out = seen;
}
"""
Timed = Callable[..., Any]


def checked(result: tuple[Any, ...]) -> Any:
    """Return a driver's or compiler's value. Raises RuntimeError when its code is not success."""
    if int(result[0]):
        raise RuntimeError(f"{result[0]}")
    return result[1] if len(result) > 1 else None


def reader(unroll: int, policy: str) -> Any:
    """Compile the kernel that reads, for the device's architecture."""
    text = f'#define UNROLL {unroll}\n#define POLICY "{policy}"\n{SOURCE}'
    program = checked(nvrtc.nvrtcCreateProgram(text.encode(), b"read.cu", 0, [], []))
    major, minor = torch.cuda.get_device_capability()
    option = f"--gpu-architecture=sm_{major}{minor}".encode()
    checked(nvrtc.nvrtcCompileProgram(program, 1, [option]))
    image = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, image))
    return checked(driver.cuModuleGetFunction(checked(driver.cuModuleLoadData(image)), b"read"))


def reading(function: Any, keys: torch.Tensor, blocks: int, sink: torch.Tensor) -> Timed:
    """Return a launch that reads all of `keys`."""
    chunks = keys.numel() * keys.element_size() // 16
    values = (
        ctypes.c_void_p(keys.data_ptr()), ctypes.c_longlong(chunks),
        ctypes.c_void_p(sink.data_ptr()),
    )  # fmt: skip
    slots = (ctypes.c_void_p * 3)(*(ctypes.addressof(v) for v in values))

    def launch(held: object = values) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        checked(driver.cuLaunchKernel(
            function, blocks, 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(slots), 0
        ))  # fmt: skip

    return launch


def graphed(call: Timed) -> Timed:
    """Return the replay of a call's CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Timed = graph.replay
    return replay


def medians_us(calls: dict[str, Timed], fill: Timed) -> dict[str, float]:
    """Time all calls in turns, each behind a filled L2; the first round is not counted."""
    events: dict[str, list[tuple[Any, Any]]] = {n: [] for n in calls}
    for _ in range(ROUNDS + 1):
        for name, call in calls.items():
            fill()
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            call()
            pair[1].record()
            events[name].append((pair[0], pair[1]))
    torch.cuda.synchronize()
    return {
        n: round(statistics.median(a.elapsed_time(b) * 1e3 for a, b in pairs[1:]), 2)
        for n, pairs in events.items()
    }


def cells(export: Path) -> list[dict[str, Any]]:
    """Return the decode shapes without pages that the export was tuned on."""
    shapes = json.loads((export / "manifest.json").read_text())["shapes"]
    return [s for s in shapes if s.get("phase") == "decode" and not s.get("page")]


def measured(cell: dict[str, Any], readers: dict[str, Any]) -> dict[str, Any]:
    """Time one shape's kernel beside the readers, in both ways of filling the L2."""
    batch, heads, kv_heads = cell["batch"], cell["heads"], cell["kv_heads"]
    keys, dim, dim_v = cell["seqlen_k"], cell["head_dim"], cell["head_dim_v"]
    latent = (dim, dim_v) == (576, 512)
    rows = batch * keys * kv_heads
    kv = torch.randn(rows * (dim if latent else dim + dim_v), device="cuda", dtype=torch.bfloat16)
    q = torch.randn(batch, cell["seqlen_q"], heads, dim, device="cuda", dtype=torch.bfloat16)
    k = kv[: rows * dim].view(batch, keys, kv_heads, dim)
    v = k[..., :dim_v] if latent else kv[rows * dim :].view(batch, keys, kv_heads, dim_v)
    calls = {"ours": graphed(lambda: attention(q, k, v, causal=cell["causal"]))}
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for name, function in readers.items():
        for blocks in (1, 2, 4):
            calls[f"{name}, {blocks} an SM"] = graphed(reading(function, kv, blocks * sms, sink))
    filled = torch.zeros(FILL_BYTES // 8, dtype=torch.int64, device="cuda")
    found: dict[str, Any] = {"cell": cell, "bytes": kv.numel() * kv.element_size()}
    for how, fill in (("written", filled.zero_), ("read", filled.sum)):
        us = medians_us(calls, fill)
        found[how] = {"ours": us.pop("ours"), "reader": min(us.values()), "readers": us}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="where `export` is")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    torch.zeros(1, device="cuda")  # makes the context that modules are loaded into
    readers = {
        f"{policy} x{unroll}": reader(unroll, policy)
        for policy in ("evict_normal", "evict_first") for unroll in (4, 8)
    }  # fmt: skip
    rows = []
    for cell in cells(args.folder / "export"):
        rows.append(measured(cell, readers))
        one = rows[-1]
        print(
            f"B={cell['batch']} {cell['heads']}/{cell['kv_heads']} D={cell['head_dim']} "
            f"L={cell['seqlen_k']}",
            *(
                f"| L2 {how}: ours {one[how]['ours']} us, reader {one[how]['reader']} us, "
                f"{one['bytes'] / one[how]['ours'] / 1e6:.3f} of "
                f"{one['bytes'] / one[how]['reader'] / 1e6:.3f} TB/s"
                for how in ("written", "read")
            ),
            flush=True,
        )  # fmt: skip
    args.json.write_text(
        json.dumps({"device": torch.cuda.get_device_name(), "cells": rows}, indent=1)
    )


if __name__ == "__main__":
    main()
