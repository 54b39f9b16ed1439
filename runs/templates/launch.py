"""Loads a cubin, packs its arguments and starts its kernels, through `cuda.bindings` alone.

An exported folder carries a copy of this file, so it imports nothing else of the project. Launches
are described by objects with the fields of `description.Launch`; tensors are anything with
`data_ptr()` and `stride()`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from . import tensor_map
from .description import Arg, ArgLike, Axis, Launch, LaunchLike, SplitRule
from .lengths import problem_lengths, split_count, workspace_shape

__all__ = [
    "Arg", "Axis", "Call", "DriverError", "Kernel", "Launch", "LaunchError", "Module", "Prepared",
    "SplitRule", "TensorLike", "grid_size", "load", "pack", "prepare", "problem_lengths",
    "split_count", "ticket_names", "workspace_shape",
]  # fmt: skip

DEFAULT_SMEM_BYTES = 48 * 1024  #: dynamic shared memory a kernel gets without asking
INT32_MAX = 2**31 - 1
#: kinds that are packed as an address; that of key_counts may be null
ADDRESSES = ("pointer", "tickets", "pages", "key_counts")
STRIDE_AXES = {"b": 0, "s": 1, "h": 2}  #: axes of a [batch, rows, heads, columns] tensor


class LaunchError(RuntimeError):
    """A launch that cannot be made as asked, or a driver call that failed."""


class DriverError(LaunchError):
    """The CUDA driver refused a call; `code` is its CUresult and `name` the name of that."""

    def __init__(self, what: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{what}: {name} ({text})")
        self.code = code
        self.name = name


class TensorLike(Protocol):
    """A tensor in device memory; strides in elements, [batch, rows, heads, ...] first."""

    @property
    def shape(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...
    def stride(self) -> tuple[int, ...]: ...


def cuda_driver() -> Any:
    """Return the driver bindings. Raises LaunchError naming the package that brings them."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise LaunchError(f"no CUDA driver bindings ({error}); pip install cuda-bindings") from None


def checked(driver: Any, result: tuple[Any, ...], what: str) -> Any:
    """Return a driver call's value. Raises DriverError when its code is not success."""
    code = int(result[0])
    if code:
        name, text = driver.cuGetErrorName(result[0])[1], driver.cuGetErrorString(result[0])[1]
        raise DriverError(what, code, _decoded(name), _decoded(text))
    return result[1] if len(result) > 1 else None


def _decoded(text: bytes | None) -> str:
    return text.decode() if text else "unknown error"


class Kernel:
    """A `__global__` function on one device, allowed the dynamic shared memory it needs."""

    __slots__ = ("driver", "entry", "function", "smem_bytes")

    def __init__(self, driver: Any, entry: str, function: Any, smem_bytes: int) -> None:
        self.driver = driver
        self.entry = entry
        self.function = function
        self.smem_bytes = smem_bytes


class Module:
    """A cubin loaded into the primary context of one device (the context that torch uses)."""

    def __init__(self, driver: Any, device: int, cu_device: Any, module: Any) -> None:
        self.driver = driver
        self.device = device
        self._cu_device = cu_device
        self._module = module
        self._kernels: dict[tuple[str, int], Kernel] = {}

    @functools.cached_property
    def num_sms(self) -> int:
        """Streaming multiprocessors of the device."""
        attribute = self.driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        result = self.driver.cuDeviceGetAttribute(attribute, self._cu_device)
        return int(checked(self.driver, result, "count multiprocessors"))

    def kernel(self, entry: str, smem_bytes: int) -> Kernel:
        """Return the function called `entry`. Raises DriverError when absent or too large."""
        if (known := self._kernels.get((entry, smem_bytes))) is not None:
            return known
        driver = self.driver
        function = checked(
            driver, driver.cuModuleGetFunction(self._module, entry.encode()), f"find {entry}"
        )
        if smem_bytes > DEFAULT_SMEM_BYTES:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(
                driver,
                driver.cuFuncSetAttribute(function, attribute, smem_bytes),
                f"allow {entry} {smem_bytes} bytes of shared memory",
            )
        kernel = self._kernels[entry, smem_bytes] = Kernel(driver, entry, function, smem_bytes)
        return kernel

    def unload(self) -> None:
        """Free the code. Kernels of this module must not be launched afterwards."""
        if self._module is None:
            return
        module, self._module = self._module, None
        self._kernels.clear()
        checked(self.driver, self.driver.cuModuleUnload(module), "unload module")
        checked(
            self.driver, self.driver.cuDevicePrimaryCtxRelease(self._cu_device), "release context"
        )


def load(image: bytes, device: int, driver: Any = None) -> Module:
    """Load a cubin on a device. Raises DriverError, e.g. when it is for another architecture."""
    driver = driver or cuda_driver()
    try:
        started = driver.cuInit(0)
    except RuntimeError as error:  # the bindings find no libcuda
        raise LaunchError(f"no CUDA driver on this machine ({error})") from None
    checked(driver, started, "initialise CUDA")
    cu_device = checked(driver, driver.cuDeviceGet(device), f"open device {device}")
    context = checked(driver, driver.cuDevicePrimaryCtxRetain(cu_device), f"use device {device}")
    checked(driver, driver.cuCtxPushCurrent(context), f"use device {device}")
    try:
        module = checked(driver, driver.cuModuleLoadData(image), "load cubin")
    except DriverError:
        checked(driver, driver.cuDevicePrimaryCtxRelease(cu_device), "release context")
        raise
    finally:
        checked(driver, driver.cuCtxPopCurrent(), "restore context")
    return Module(driver, device, cu_device, module)


class Call:
    """One launch with its arguments packed: a grid, a block, a slot of 8 bytes for each argument
    and memory for TMA descriptors.

    `bind` replaces the addresses, so that a packed call serves every call of the same shape and
    strides.
    """

    __slots__ = ("_addresses", "_config", "_encoder", "_maps", "_memory", "_params", "_pointers",
                 "grid", "launch_info", "slots")  # fmt: skip

    def __init__(self, launch: LaunchLike, grid: int, encoder: tensor_map.Encoder | None) -> None:
        self.launch_info = launch
        self.grid = grid
        count = max(len(launch.args), 1)
        self.slots = (ctypes.c_uint64 * count)()
        self._encoder = encoder
        maps = [i for i, arg in enumerate(launch.args) if arg.kind == "tensor_map"]
        self._memory, base = tensor_map.buffer(len(maps))
        self._maps = tuple(
            (base + k * tensor_map.BYTES, launch.args[i].name) for k, i in enumerate(maps)
        )
        self._pointers = tuple(
            (i, arg.name) for i, arg in enumerate(launch.args) if arg.kind in ADDRESSES
        )
        first, size = ctypes.addressof(self.slots), ctypes.sizeof(ctypes.c_uint64)
        at = {i: base + k * tensor_map.BYTES for k, i in enumerate(maps)}
        self._addresses = (ctypes.c_void_p * count)(
            *(at.get(i, first + i * size) for i in range(count))
        )
        self._params = ctypes.addressof(self._addresses)
        self._config: Any = None  #: of a dependent launch, made at its first

    def bind(self, addresses: Mapping[str, int]) -> None:
        """Write the tensors' addresses, by name. Raises LaunchError when TMA refuses one."""
        for slot, name in self._pointers:
            self.slots[slot] = addresses[name]
        for target, name in self._maps:
            assert self._encoder is not None
            if code := self._encoder.move(target, addresses[name]):
                raise LaunchError(f"{self.launch_info.entry}: TMA refuses {name} (CUresult {code})")

    def describe(self, tensors: Mapping[str, TensorLike], lengths: Mapping[str, int]) -> None:
        """Write the TMA descriptors. Raises LaunchError naming the tensor that has none."""
        info = self.launch_info
        maps = {arg.name: arg for arg in info.args if arg.kind == "tensor_map"}
        for target, name in self._maps:
            assert self._encoder is not None
            tensor = _named(tensors, name, "tensor", info)
            box, pack = maps[name].box, maps[name].pack
            group = _named(lengths, "group", "length", info) if pack > 1 else 1
            shape, strides = tuple(tensor.shape), tensor.stride()
            address = tensor.data_ptr()
            code = self._encoder.encode(target, address, shape, strides, box, pack, group)
            if code:
                raise LaunchError(
                    f"{info.entry}: TMA cannot describe {name} of shape {shape}, "
                    f"strides {strides}, box {box} (CUresult {code})"
                )

    def launch(self, kernel: Kernel, stream: int) -> None:
        """Start the kernel on a stream; does not wait. Raises DriverError."""
        info = self.launch_info
        if info.dependent:
            if self._config is None:
                self._config = _dependent_config(kernel.driver, info, self.grid)
            self._config.hStream = stream
            result = kernel.driver.cuLaunchKernelEx(self._config, kernel.function, self._params, 0)
        else:
            result = kernel.driver.cuLaunchKernel(
                kernel.function, self.grid, 1, 1, info.threads, 1, 1, info.smem_bytes, stream,
                self._params, 0,
            )  # fmt: skip
        if result[0]:
            checked(kernel.driver, result, f"launch {info.entry}")


def _dependent_config(driver: Any, launch: LaunchLike, grid: int) -> Any:
    """Return a configuration whose kernel may be scheduled before the one ahead of it ends."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
    config.sharedMemBytes = launch.smem_bytes
    config.attrs, config.numAttrs = [attribute], 1
    return config


def pack(
    launch: LaunchLike,
    tensors: Mapping[str, TensorLike],
    lengths: Mapping[str, int],
    scalars: Mapping[str, float],
    num_sms: int = 0,
    encoder: tensor_map.Encoder | None = None,
) -> Call:
    """Pack the arguments of one launch.

    `lengths` holds batch, heads, group, M, N and any whole-number parameter the launch names;
    `scalars` the floats; `tensors` every tensor, workspaces, tickets, `pages` and `key_counts`
    included; without `key_counts` every sequence has N keys. A persistent launch wants `num_sms`.
    Raises LaunchError naming what is missing or out of range.
    """
    grid = grid_size(launch, lengths)
    if launch.persistent:
        if num_sms < 1:
            raise LaunchError(f"{launch.entry} is persistent; the number of SMs is wanted")
        most = launch.persistent * num_sms
        if most < launch.cluster:
            raise LaunchError(f"{launch.entry} wants {launch.cluster} SMs at once, {num_sms} there")
        grid = min(grid, most - most % launch.cluster)
    if any(arg.kind == "tensor_map" for arg in launch.args):
        encoder = encoder or _encoder()
    call = Call(launch, grid, encoder)
    for i, arg in enumerate(launch.args):
        if arg.kind == "key_counts" and arg.name not in tensors:
            call.slots[i] = 0
        elif arg.kind in ADDRESSES:
            call.slots[i] = _named(tensors, arg.name, "tensor", launch).data_ptr()
        elif arg.kind != "tensor_map":
            call.slots[i] = _packed(arg, launch, tensors, lengths, scalars)
    call.describe(tensors, lengths)
    return call


def _encoder() -> tensor_map.Encoder:
    try:
        return tensor_map.encoder()
    except OSError as error:
        raise LaunchError(f"no CUDA driver on this machine ({error})") from None


def _packed(
    arg: ArgLike,
    launch: LaunchLike,
    tensors: Mapping[str, TensorLike],
    lengths: Mapping[str, int],
    scalars: Mapping[str, float],
) -> int:
    """Return the low-order bytes of a stride, an int32 or a float32 as one 8-byte slot."""
    if arg.kind == "stride":
        name, _, axis = arg.name.rpartition(".")
        if axis not in STRIDE_AXES:
            raise LaunchError(f"{launch.entry}: stride {arg.name!r} is not of axis b, s or h")
        stride = _named(tensors, name, "tensor", launch).stride()[STRIDE_AXES[axis]]
        return ctypes.c_uint64(stride).value
    if arg.kind == "page_stride":
        return ctypes.c_uint64(_named(tensors, arg.name, "tensor", launch).stride()[0]).value
    if arg.kind == "int":
        value = _named(lengths, arg.name, "length", launch)
        if not -INT32_MAX <= value <= INT32_MAX:
            raise LaunchError(f"{launch.entry}: {arg.name}={value} does not fit 32 bits")
        return ctypes.c_uint32(value).value
    if arg.kind == "float":
        number = ctypes.c_float(_named(scalars, arg.name, "scalar", launch))
        return int.from_bytes(bytes(number), "little")
    raise LaunchError(f"{launch.entry}: argument {arg.name!r} has unknown kind {arg.kind!r}")


def _named(values: Mapping[str, Any], name: str, what: str, launch: LaunchLike) -> Any:
    try:
        return values[name]
    except KeyError:
        known = ", ".join(sorted(values)) or "none"
        raise LaunchError(f"{launch.entry} needs {what} {name!r}; given: {known}") from None


def grid_size(launch: LaunchLike, lengths: Mapping[str, int]) -> int:
    """Return the number of blocks. Raises LaunchError when there is none or too many."""
    blocks = 1
    for axis in launch.grid:
        whole = axis.length.isdecimal()
        length = int(axis.length) if whole else _named(lengths, axis.length, "length", launch)
        blocks *= -(-length // axis.tile)
    blocks *= launch.cluster
    if not 1 <= blocks <= INT32_MAX:
        raise LaunchError(f"{launch.entry}: a grid of {blocks} blocks; 1 to {INT32_MAX} can start")
    return blocks


def ticket_names(launches: Iterable[LaunchLike]) -> tuple[str, ...]:
    """Return the names of the tickets that launches want: one int32 each, 0 before the first."""
    names = (arg.name for x in launches for arg in x.args if arg.kind == "tickets")
    return tuple(dict.fromkeys(names))


class Prepared:
    """All launches of one program, in order, packed for one set of shapes and strides."""

    __slots__ = ("_lock", "steps")

    def __init__(self, steps: tuple[tuple[Kernel, Call], ...]) -> None:
        self.steps = steps
        self._lock = threading.Lock()

    def launch(self, stream: int, addresses: Mapping[str, int] | None = None) -> None:
        """Start every kernel in order on a stream, at these addresses or the packed ones."""
        with self._lock:  # the driver copies the slots before it returns
            for kernel, call in self.steps:
                if addresses is not None:
                    call.bind(addresses)
                call.launch(kernel, stream)


def prepare(
    module: Module,
    launches: Iterable[LaunchLike],
    tensors: Mapping[str, TensorLike],
    lengths: Mapping[str, int],
    scalars: Mapping[str, float],
) -> Prepared:
    """Pack every launch of a program that these lengths need. Raises LaunchError or DriverError.

    Arguments are as for `pack`; `lengths` holds `splits` where a launch asks for more than one.
    """
    steps = []
    for x in launches:
        if x.if_split and _named(lengths, "splits", "length", x) == 1:
            continue
        num_sms = module.num_sms if x.persistent else 0
        call = pack(x, tensors, lengths, scalars, num_sms)
        steps.append((module.kernel(x.entry, x.smem_bytes), call))
    return Prepared(tuple(steps))
