"""A device of host memory whose kernels decode: split keys, then joined, from the packed bytes.

Kernel `partial` gives each split its own output and log-sum-exp, `combine` joins them: through the
workspace alone, as on a GPU. With one split `partial` writes the output itself.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from fake_cuda import HostCuda, HostDriver

from codegen.kernel import (
    Arg,
    ArgKind,
    Cubin,
    GridAxis,
    KernelSource,
    Launch,
    SplitRule,
    Workspace,
)
from space.variant import Problem

PAGE = 16
RULE = SplitRule(rows=16, keys=16, blocks_per_sm=1, min_tiles=1)
LENGTHS = ("M", "N", "heads", "group", "kv_heads", "rows", "splits", "batch")
SPACES = ("O_s", "lse_s")


def _tensor(name: str) -> tuple[Arg, ...]:
    return (Arg(ArgKind.POINTER, name), *(Arg(ArgKind.STRIDE, f"{name}.{a}") for a in "bsh"))


def decode_kernel(problem: Problem, arch: str = "sm_90a") -> tuple[KernelSource, Cubin]:
    """A made-up decode program: its image is the problem's key."""
    names = ("Q", "K", "O") if problem.latent else ("Q", "K", "V", "O")
    ints = tuple(Arg(ArgKind.INT, n) for n in LENGTHS)
    spaces = tuple(Arg(ArgKind.POINTER, n) for n in SPACES)
    pages = (Arg(ArgKind.PAGES, "pages"), Arg(ArgKind.PAGE_STRIDE, "pages"))
    args = (
        *(a for n in names for a in _tensor(n)), *spaces, *ints, Arg(ArgKind.FLOAT, "scale"),
        Arg(ArgKind.KEY_COUNTS, "key_counts"), *(pages if problem.page else ()),
    )  # fmt: skip
    axes = (("rows", RULE.rows), ("splits", 1), ("kv_heads", 1), ("batch", 1))
    grid = tuple(GridAxis(*axis) for axis in axes)
    join = (*_tensor("O"), *spaces, *ints)
    launches = (
        Launch("partial", 128, 65536, grid, args),
        Launch("combine", 128, 0, (grid[0], *grid[2:]), join, if_split=True, dependent=True),
    )
    workspaces = tuple(
        Workspace(name, ("splits", "batch", "kv_heads", "rows", *width))
        for name, width in zip(SPACES, ((str(problem.head_dim_v),), ()), strict=True)
    )
    tensors = (*((n, "in") for n in names[:-1]), ("O", "out"))
    text = f"// {problem.key}\n"
    source = KernelSource(text, arch, launches, tensors, workspaces, RULE)
    image = problem.key.encode()
    return source, Cubin(image, arch, source.digest, source.digest, "log\n", (), 1.0, "13.0")


class _Attribute:
    def __init__(self) -> None:
        self.id = 0
        self.value = type("Value", (), {})()


class DecodeDriver(HostDriver):
    """Runs `partial` and `combine` of one program's arguments, by the names they were given."""

    CUlaunchConfig = type("CUlaunchConfig", (), {})
    CUlaunchAttribute = _Attribute

    class CUlaunchAttributeID:
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6

    def __init__(self, dims: tuple[int, int]) -> None:
        super().__init__()
        self.dims = dims
        self.started: list[str] = []
        self.splits: list[int] = []
        self.spaces: list[int] = []

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[int, Any]:
        return 0, (module, name)

    def cuLaunchKernel(self, function: Any, *values: Any) -> tuple[int]:
        self._run(function, values[0], values[-2])
        return (0,)

    def cuLaunchKernelEx(self, config: Any, function: Any, params: int, extra: int) -> tuple[int]:
        (attribute,) = config.attrs
        assert (attribute.id, attribute.value.programmaticStreamSerializationAllowed) == (6, 1)
        self._run(function, config.gridDimX, params)
        return (0,)

    def _run(self, function: Any, grid: int, params: int) -> None:
        image, entry = function
        self.started.append(entry.decode())
        latent, paged = b"576x512" in image, b"page" in image
        (_partial, _combine) = decode_launches(latent, paged)
        args = _partial if entry == b"partial" else _combine
        addresses = (ctypes.c_void_p * len(args)).from_address(params)
        slots = {
            (a.kind, a.name): ctypes.c_uint64.from_address(p).value
            for a, p in zip(args, addresses, strict=True)
        }
        n = {name: slots[ArgKind.INT, name] for name in LENGTHS}
        self.splits.append(n["splits"])
        self.spaces.append(slots[ArgKind.POINTER, "O_s"])
        blocks = -(-n["rows"] // RULE.rows) * n["kv_heads"] * n["batch"]
        assert grid == blocks * (n["splits"] if entry == b"partial" else 1)
        if entry == b"partial":
            self._partial(slots, n, b"causal" in image, latent, paged)
        else:
            self._combine(slots, n)

    def _partial(
        self, slots: Any, n: dict[str, int], causal: bool, latent: bool, paged: bool
    ) -> None:
        d, dv = self.dims
        counts = slots[ArgKind.KEY_COUNTS, "key_counts"]
        keys = [n["N"]] * n["batch"]
        if counts:
            keys = list((ctypes.c_int32 * n["batch"]).from_address(counts))
        (scale,) = np.array([slots[ArgKind.FLOAT, "scale"]], np.uint32).view(np.float32)
        q = _view(slots, "Q", (n["batch"], n["M"], n["heads"], d))
        for b in range(n["batch"]):
            if paged:
                row = slots[ArgKind.PAGES, "pages"] + 4 * b * slots[ArgKind.PAGE_STRIDE, "pages"]
                pages = list((ctypes.c_int32 * -(-keys[b] // PAGE)).from_address(row))
                where = [(pages[j // PAGE], j % PAGE) for j in range(keys[b])]
            else:
                where = [(b, j) for j in range(keys[b])]
            tiles = -(-keys[b] // RULE.keys)
            per = -(-tiles // n["splits"]) * RULE.keys
            for h in range(n["kv_heads"]):
                k = np.array([_row(slots, "K", (*at, h), d) for at in where]).reshape(-1, d)
                v = k[:, :dv]
                if not latent:
                    v = np.array([_row(slots, "V", (*at, h), dv) for at in where]).reshape(-1, dv)
                for r in range(n["rows"]):
                    i, head = r // n["group"], h * n["group"] + r % n["group"]
                    last = keys[b] - n["M"] + i if causal else keys[b] - 1
                    for s in range(n["splits"]):
                        seen = slice(s * per, max(min((s + 1) * per, last + 1), s * per))
                        out, lse = _softmax(float(scale) * (k[seen] @ q[b, i, head]), v[seen])
                        if n["splits"] == 1:
                            self._out(slots, n)[b, i, head] = out
                        else:
                            parts, sums = self._spaces(slots, n)
                            parts[s, b, h, r], sums[s, b, h, r] = out, lse

    def _combine(self, slots: Any, n: dict[str, int]) -> None:
        parts, sums = self._spaces(slots, n)
        out = self._out(slots, n)
        for b, h, r in np.ndindex(n["batch"], n["kv_heads"], n["rows"]):
            lse = sums[:, b, h, r]
            if lse.max() == -math.inf:
                joined = np.zeros(self.dims[1], np.float32)
            else:
                weight = np.exp(lse - lse.max())
                joined = weight @ parts[:, b, h, r] / weight.sum()
            out[b, r // n["group"], h * n["group"] + r % n["group"]] = joined

    def _spaces(self, slots: Any, n: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
        shape = (n["splits"], n["batch"], n["kv_heads"], n["rows"])
        return tuple(  # type: ignore[return-value]
            np.frombuffer(
                (ctypes.c_float * math.prod(full)).from_address(slots[ArgKind.POINTER, name]),
                np.float32,
            ).reshape(full)
            for name, full in (("O_s", (*shape, self.dims[1])), ("lse_s", shape))
        )

    def _out(self, slots: Any, n: dict[str, int]) -> np.ndarray:
        return _view(slots, "O", (n["batch"], n["M"], n["heads"], self.dims[1]))


def decode_launches(latent: bool, paged: bool) -> tuple[tuple[Arg, ...], tuple[Arg, ...]]:
    """The arguments of the two kernels."""
    from space.variant import DType, Phase

    dims = (576, 512) if latent else (32, 32)
    problem = Problem("gqa", DType.FP16, *dims, False, Phase.DECODE, PAGE if paged else 0)
    source, _ = decode_kernel(problem)
    return source.launches[0].args, source.launches[1].args


def _softmax(scores: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, float]:
    if not len(scores):
        return np.zeros(v.shape[1], np.float32), -math.inf
    weights = np.exp(scores - scores.max())
    return weights @ v / weights.sum(), float(scores.max() + np.log(weights.sum()))


def _strides(slots: Any, name: str) -> list[int]:
    return [slots[ArgKind.STRIDE, f"{name}.{a}"] for a in "bsh"]


def _row(slots: Any, name: str, at: tuple[int, int, int], columns: int) -> np.ndarray:
    offset = sum(i * s for i, s in zip(at, _strides(slots, name), strict=True))
    memory = (ctypes.c_char * (2 * columns)).from_address(slots[ArgKind.POINTER, name] + 2 * offset)
    return np.frombuffer(memory, np.float16).astype(np.float32)


def _view(slots: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    strides = [*_strides(slots, name), 1]
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (2 * extent)).from_address(slots[ArgKind.POINTER, name])
    flat = np.frombuffer(memory, np.float16)
    return np.lib.stride_tricks.as_strided(flat, shape, [2 * s for s in strides])


class DecodeCuda(HostCuda):
    """Host memory posing as GPU 0, for kernels of these head dims."""

    def __init__(self, dims: tuple[int, int] = (32, 32)) -> None:
        super().__init__()
        self.driver = DecodeDriver(dims)
