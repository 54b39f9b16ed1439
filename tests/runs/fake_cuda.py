"""A CUDA device made of host memory: its one kernel is attention, computed from the packed bytes.

What the exported code packs (addresses, strides, lengths, scale, grid) is all it gets, so a wrong
argument gives a wrong output, as on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from runs.templates import launch
from runs.templates.attention import Cuda
from space.variant import Shape

HEAD_DIM = 16


class HostDriver:
    """The calls of cuda.bindings.driver that launching needs."""

    class CUfunction_attribute:
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    class CUdevice_attribute:
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16

    def __init__(self) -> None:
        self.launches = 0
        self.takes_tickets = False
        self.tickets: list[int] = []
        self.images: list[bytes] = []

    def cuInit(self, flags: int) -> tuple[int]:
        return (0,)

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return 0, index

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        return 0, 1

    def cuCtxPushCurrent(self, context: int) -> tuple[int]:
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[int, int]:
        return 0, 1

    def cuModuleLoadData(self, image: bytes) -> tuple[int, bytes]:
        self.images.append(image)
        return 0, image

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[int, bytes]:
        return 0, module

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:
        return 0, 132

    def cuFuncSetAttribute(self, *values: Any) -> tuple[int]:
        return (0,)

    def cuLaunchKernel(self, function: bytes, *values: Any) -> tuple[int]:
        grid, params = values[0], values[-2]
        self.launches += 1
        slots = [
            ctypes.c_uint64.from_address(a).value
            for a in (ctypes.c_void_p * 21).from_address(params)
        ]
        if self.takes_tickets:
            last = (ctypes.c_void_p * 22).from_address(params)[21]
            self.tickets.append(ctypes.c_uint64.from_address(last).value)
        rows, keys, heads, group = slots[16:20]
        (scale,) = np.array([slots[20]], np.uint32).view(np.float32)
        batch = grid // (-(-rows // 128) * heads)
        q, k, v, out = (
            _view(slots[4 * i : 4 * i + 4], (batch, s, h, HEAD_DIM))
            for i, (s, h) in enumerate(
                ((rows, heads), (keys, heads // group), (keys, heads // group), (rows, heads))
            )
        )
        causal = function.endswith(b"causal")
        out[:] = reference(*map(torch.from_numpy, (q, k, v)), causal, float(scale)).numpy()
        return (0,)


def _view(slots: list[int], shape: tuple[int, ...]) -> np.ndarray:
    address, *strides = slots
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, (*strides, 1), strict=True))
    flat = np.frombuffer((ctypes.c_char * (2 * extent)).from_address(address), np.float16)
    return np.lib.stride_tricks.as_strided(flat, shape, [2 * s for s in (*strides, 1)])


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> torch.Tensor:
    """Attention in float32, [B, S, H, D] in and out, causal bottom-right, unseeing rows 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.float().transpose(1, 2) for t in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = scale * (q @ k.transpose(-1, -2))
    if causal:
        rows, keys = s.shape[-2:]
        s = s.masked_fill(~torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows), -math.inf)
    return (s.softmax(-1).nan_to_num(0) @ v).transpose(1, 2).half()


class HostCuda(Cuda):
    """Host memory posing as GPU 0."""

    def __init__(self, name: str = "NVIDIA H200", capability: tuple[int, int] = (9, 0)) -> None:
        self.driver = HostDriver()
        self.device_name = name
        self.device_capability = capability
        self.now = 0
        self.capturing = False
        self.current_stream = 0
        self.used: list[int] = []

    def index(self, device: torch.device) -> int:
        return 0

    def name(self, index: int) -> str:
        return self.device_name

    def capability(self, index: int) -> tuple[int, int]:
        return self.device_capability

    def current(self) -> int:
        return self.now

    @contextlib.contextmanager
    def use(self, index: int) -> Iterator[None]:
        self.used.append(index)
        yield

    def stream(self, index: int) -> int:
        return self.current_stream

    def is_capturing(self) -> bool:
        return self.capturing

    def load(self, image: bytes, index: int) -> launch.Module:
        return launch.load(image, index, self.driver)


def inputs(shape: Shape, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        _aligned(shape.batch, shape.seqlen_q, shape.heads, shape.head_dim, generator),
        _aligned(shape.batch, shape.seqlen_k, shape.kv_heads, shape.head_dim, generator),
        _aligned(shape.batch, shape.seqlen_k, shape.kv_heads, shape.head_dim_v, generator),
    )


def _aligned(b: int, s: int, h: int, d: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(b, s, h, d, generator=generator).half()


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Apart by no more than half precision explains."""
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
