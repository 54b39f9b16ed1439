"""A driver that records what it is told, and a launch to give it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace

from runs.templates import launch


class Result(IntEnum):
    OK = 0
    NO_BINARY = 209


class FakeDriver:
    """Answers like cuda.bindings.driver and keeps each launch's argument bytes."""

    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="max")
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="sms")

    def __init__(self, fail: str = "") -> None:
        self.fail = fail
        self.calls: list[tuple[object, ...]] = []
        self.launched: list[tuple[tuple[int, ...], list[bytes]]] = []

    def _answer(self, name: str, *values: object) -> tuple[object, ...]:
        self.calls.append((name, *values))
        return (Result.NO_BINARY,) if name == self.fail else (Result.OK, f"{name}-handle")

    def __getattr__(self, name: str) -> object:
        return lambda *values: self._answer(name, *values)

    def cuGetErrorName(self, code: Result) -> tuple[Result, bytes]:
        return Result.OK, b"CUDA_ERROR_NO_BINARY_FOR_GPU"

    def cuGetErrorString(self, code: Result) -> tuple[Result, bytes]:
        return Result.OK, b"no kernel image"

    def cuLaunchKernel(self, *values: object) -> tuple[Result]:
        if self.fail == "cuLaunchKernel":
            return (Result.NO_BINARY,)
        *geometry, params, extra = values
        assert extra == 0
        pointers = (ctypes.c_void_p * 5).from_address(int(str(params)))
        arguments = [ctypes.string_at(p, 8) for p in pointers if p]
        self.launched.append((tuple(geometry), arguments))
        return (Result.OK,)


@dataclass
class Tensor:
    address: int
    strides: tuple[int, ...]
    shape: tuple[int, ...] = (2, 65, 8, 128)

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return self.strides


ARGS = (
    launch.Arg("pointer", "Q"),
    launch.Arg("stride", "Q.b"),
    launch.Arg("stride", "Q.s"),
    launch.Arg("int", "M"),
    launch.Arg("float", "scale"),
)
LAUNCH = launch.Launch("forward", 128, 65536, (launch.Axis("M", 64), launch.Axis("heads", 1)), ARGS)
LENGTHS = launch.problem_lengths(2, 8, 2, 65, 100)
TENSORS = {"Q": Tensor(0x7F00_0000_1000, (1 << 40, 1024, 128, 1))}
