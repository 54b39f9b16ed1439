"""Packing and launching through a driver that records what it is told."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace

import pytest
from cuda.bindings import driver as bindings
from hypothesis import given
from hypothesis import strategies as st

from codegen import kernel as source_kernel
from runs.templates import launch, tensor_map


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


def test_packs_every_kind_at_its_width() -> None:
    driver = FakeDriver()
    module = launch.load(b"cubin", 0, driver)
    prepared = launch.prepare(module, [LAUNCH], TENSORS, LENGTHS, {"scale": -0.125})
    prepared.launch(77)
    geometry, arguments = driver.launched[0]
    assert geometry[1:] == (16, 1, 1, 128, 1, 1, 65536, 77)  # ceil(65 / 64) * 8 heads
    assert struct.unpack("<Q", arguments[0])[0] == 0x7F00_0000_1000
    assert struct.unpack("<q", arguments[1])[0] == 1 << 40
    assert struct.unpack("<q", arguments[2])[0] == 1024
    assert struct.unpack("<i", arguments[3][:4])[0] == 65
    assert struct.unpack("<f", arguments[4][:4])[0] == -0.125


def test_a_packed_call_takes_other_addresses() -> None:
    driver = FakeDriver()
    module = launch.load(b"cubin", 0, driver)
    prepared = launch.prepare(module, [LAUNCH], TENSORS, LENGTHS, {"scale": 1.0})
    prepared.launch(0, {"Q": 0x42})
    assert struct.unpack("<Q", driver.launched[0][1][0])[0] == 0x42


COMBINE = launch.Launch(
    "combine", 64, 512, (launch.Axis("rows", 1),), (launch.Arg("int", "splits"),),
    if_split=True, dependent=True,
)  # fmt: skip


def test_the_second_kernel_of_a_decode_program_is_started_only_for_splits() -> None:
    driver = FakeDriver()
    module = launch.load(b"cubin", 0, driver)
    for splits, started in ((1, 1), (3, 2)):
        lengths = LENGTHS | {"splits": splits}
        prepared = launch.prepare(module, [LAUNCH, COMBINE], TENSORS, lengths, {"scale": 1.0})
        assert len(prepared.steps) == started
    with pytest.raises(launch.LaunchError, match="combine needs length 'splits'"):
        launch.prepare(module, [COMBINE], TENSORS, LENGTHS, {"scale": 1.0})


def test_a_dependent_kernel_may_start_early() -> None:
    driver = FakeDriver()
    driver.CUlaunchConfig = bindings.CUlaunchConfig
    driver.CUlaunchAttribute = bindings.CUlaunchAttribute
    driver.CUlaunchAttributeID = bindings.CUlaunchAttributeID
    module = launch.load(b"cubin", 0, driver)
    lengths = LENGTHS | {"splits": 3, "rows": 5}
    prepared = launch.prepare(module, [COMBINE], TENSORS, lengths, {})
    prepared.launch(71)
    seen = []
    for stream in (72, 73):
        prepared.launch(stream)
        _, config, function, params, extra = driver.calls[-1]
        (attribute,) = config.attrs
        seen.append(int(config.hStream))
        sizes = (config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX)
        assert (*sizes, config.blockDimY, config.sharedMemBytes) == (5, 1, 1, 64, 1, 512)
        assert (function, extra) == ("cuModuleGetFunction-handle", 0)
        assert (
            attribute.id
            == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        assert attribute.value.programmaticStreamSerializationAllowed == 1
        slot = ctypes.c_void_p.from_address(params).value
        assert slot is not None and ctypes.c_int32.from_address(slot).value == 3
    assert seen == [72, 73]
    driver.fail = "cuLaunchKernelEx"
    with pytest.raises(launch.DriverError, match="launch combine"):
        prepared.launch(74)


def test_a_decode_launch_gets_its_cache_by_address() -> None:
    args = (
        launch.Arg("key_counts", "key_counts"),
        launch.Arg("pages", "pages"),
        launch.Arg("page_stride", "pages"),
        launch.Arg("int", "rows"),
    )
    partial = LAUNCH._replace(args=args)
    pages = Tensor(0x8000, (33, 1), (2, 30))
    call = launch.pack(partial, {"pages": pages}, LENGTHS, {})
    assert list(call.slots) == [0, 0x8000, 33, 65 * 4]  # every sequence has N keys
    call = launch.pack(partial, {"pages": pages, "key_counts": Tensor(0x9000, (1,))}, LENGTHS, {})
    assert call.slots[0] == 0x9000
    call.bind({"pages": 0xA000, "key_counts": 0})
    assert list(call.slots) == [0, 0xA000, 33, 65 * 4]
    with pytest.raises(launch.LaunchError, match="forward needs tensor 'pages'"):
        launch.pack(partial, {}, LENGTHS, {})


def test_takes_the_translator_s_own_types() -> None:
    theirs = source_kernel.Launch(
        "forward", 128, 0, (source_kernel.GridAxis("batch", 1),),
        (source_kernel.Arg(source_kernel.ArgKind.INT, "group"),),
    )  # fmt: skip
    call = launch.pack(theirs, {}, LENGTHS, {})
    assert (call.grid, call.slots[0]) == (2, 4)


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        (launch.Arg("pointer", "V"), "needs tensor 'V'; given: Q"),
        (launch.Arg("int", "splits"), "needs length 'splits'"),
        (launch.Arg("float", "softcap"), "needs scalar 'softcap'; given: scale"),
        (launch.Arg("stride", "Q.d"), "stride 'Q.d' is not of axis b, s or h"),
        (launch.Arg("blob", "x"), "unknown kind 'blob'"),
    ],
)
def test_says_what_an_argument_lacks(arg: launch.Arg, message: str) -> None:
    with pytest.raises(launch.LaunchError, match=message):
        launch.pack(LAUNCH._replace(args=(arg,)), TENSORS, LENGTHS, {"scale": 1.0})


@pytest.mark.parametrize("length", [0, 2**31 * 64])
def test_refuses_a_grid_that_cannot_start(length: int) -> None:
    with pytest.raises(launch.LaunchError, match="blocks"):
        launch.pack(LAUNCH._replace(args=()), TENSORS, LENGTHS | {"M": length}, {})


def test_an_int_past_32_bits_is_named() -> None:
    with pytest.raises(launch.LaunchError, match=r"M=2147483648 does not fit 32 bits"):
        launch.pack(LAUNCH, TENSORS, LENGTHS | {"M": 2**31}, {"scale": 1.0})


def test_large_shared_memory_is_asked_for_once() -> None:
    driver = FakeDriver()
    module = launch.load(b"cubin", 0, driver)
    assert module.kernel("forward", 65536) is module.kernel("forward", 65536)
    module.kernel("small", 48 * 1024)
    asked = [c for c in driver.calls if c[0] == "cuFuncSetAttribute"]
    assert asked == [("cuFuncSetAttribute", "cuModuleGetFunction-handle", "max", 65536)]


@pytest.mark.parametrize(
    "step", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernel"]
)
def test_every_refusal_is_raised_with_its_name(step: str) -> None:
    driver = FakeDriver(fail=step)
    with pytest.raises(launch.DriverError, match="CUDA_ERROR_NO_BINARY_FOR_GPU") as caught:
        module = launch.load(b"cubin", 0, driver)
        launch.prepare(module, [LAUNCH], TENSORS, LENGTHS, {"scale": 1.0}).launch(0)
    assert (caught.value.code, caught.value.name) == (209, "CUDA_ERROR_NO_BINARY_FOR_GPU")


def test_a_refused_image_gives_the_context_back() -> None:
    driver = FakeDriver(fail="cuModuleLoadData")
    with pytest.raises(launch.DriverError):
        launch.load(b"cubin", 0, driver)
    names = [c[0] for c in driver.calls]
    assert names.count("cuCtxPushCurrent") == names.count("cuCtxPopCurrent") == 1
    assert names.count("cuDevicePrimaryCtxRetain") == names.count("cuDevicePrimaryCtxRelease") == 1


def test_unload_frees_module_and_context_once() -> None:
    driver = FakeDriver()
    module = launch.load(b"cubin", 0, driver)
    module.unload()
    module.unload()
    assert [c[0] for c in driver.calls].count("cuModuleUnload") == 1


def test_workspace_axes_are_numbers_or_lengths() -> None:
    axes = ("splits", "batch", "2")
    assert launch.workspace_shape(axes, LENGTHS | {"splits": 5}) == (5, 2, 2)
    assert launch.workspace_shape(axes, LENGTHS | {"splits": 1}) == (0, 2, 2)  # nothing in between


RULE = launch.SplitRule(rows=64, keys=128, blocks_per_sm=2, min_tiles=4)


@pytest.mark.parametrize(
    ("batch", "kv_heads", "group", "keys", "expected"),
    [
        (1, 1, 128, 4096, 8),  # 2 blocks for 264 places, but a split has at least 4 of 32 tiles
        (1, 1, 128, 131072, 128),  # 132 wanted of 1024 tiles: 8 each, which 128 splits hold
        (128, 1, 128, 8192, 1),  # 256 blocks fill the 264 places once
        (64, 8, 4, 4096, 1),  # more blocks than places
        (8, 8, 4, 4096, 4),  # 64 blocks
        (1, 1, 4, 128 * 33, 7),  # 8 wanted of 33 tiles: 5 each, which 7 splits hold
        (1, 1, 1, 100, 1),
        (1, 1, 1, 0, 1),
    ],
)
def test_splits_fill_the_card(
    batch: int, kv_heads: int, group: int, keys: int, expected: int
) -> None:
    lengths = launch.problem_lengths(batch, kv_heads * group, kv_heads, 1, keys)
    assert launch.split_count(RULE, lengths, 132) == expected


@given(
    st.builds(
        launch.SplitRule, st.integers(1, 256), st.integers(1, 256), st.integers(1, 4),
        st.integers(1, 4),
    ),
    st.integers(1, 600), st.integers(1, 16), st.integers(1, 128), st.integers(1, 8),
    st.integers(0, 2**31 - 1), st.integers(1, 200),
)  # fmt: skip
def test_no_split_is_empty_and_none_is_too_short(
    rule: launch.SplitRule, batch: int, kv: int, group: int, queries: int, keys: int, sms: int
) -> None:
    lengths = launch.problem_lengths(batch, kv * group, kv, queries, keys)
    splits, tiles = launch.split_count(rule, lengths, sms), -(-keys // rule.keys)
    assert 1 <= splits <= 256
    if splits > 1:
        each = -(-tiles // splits)
        assert (splits - 1) * each < tiles <= splits * each  # the last one has a tile
        assert each >= rule.min_tiles
        blocks = -(-queries * group // rule.rows) * kv * batch
        assert splits * blocks <= rule.blocks_per_sm * sms


class FakeLibrary:
    """The driver's descriptor calls: writes what it was told where the descriptor goes."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.encoded: list[dict[str, object]] = []
        self.swizzles: list[int] = []

    def cuTensorMapEncodeTiled(self, target, kind, rank, address, extents, steps, box, ones, *rest):
        assert target.value % 64 == 0
        interleave, swizzle, *rest = rest
        assert (kind, rank, list(ones), interleave, rest) == (1, 4, [1, 1, 1, 1], 0, [2, 0])
        ctypes.c_uint64.from_address(target.value).value = address.value
        self.encoded.append({"extents": list(extents), "steps": list(steps), "box": list(box)})
        self.swizzles.append(swizzle)
        return self.code

    def cuTensorMapReplaceAddress(self, target, address):
        ctypes.c_uint64.from_address(target.value).value = address.value
        return self.code


HOPPER = launch.Launch(
    "forward", 384, 1024, (launch.Axis("M", 64), launch.Axis("heads", 1)),
    (
        launch.Arg("tensor_map", "Q", (64, 128)),
        launch.Arg("int", "M"),
        launch.Arg("tensor_map", "K", (64, 80)),
        launch.Arg("tickets", "tickets"),
        launch.Arg("float", "scale"),
    ),
    persistent=1,
)  # fmt: skip
HOPPER_TENSORS = {
    "Q": Tensor(0x1000, (66560, 1024, 128, 1)),
    "K": Tensor(0x2000, (7, 256, 7, 1), (1, 100, 1, 128)),  # strides of axes of one mean nothing
    "tickets": Tensor(0x3000, (1,), (1,)),
}


def hopper(library: FakeLibrary, num_sms: int = 10) -> launch.Call:
    encoder = tensor_map.Encoder(library)
    return launch.pack(HOPPER, HOPPER_TENSORS, LENGTHS, {"scale": 1.0}, num_sms, encoder)


def test_descriptors_say_how_a_tensor_lies() -> None:
    library = FakeLibrary()
    hopper(library)
    assert library.encoded == [
        {"extents": [128, 65, 8, 2], "steps": [2048, 256, 133120], "box": [64, 128, 1, 1]},
        {"extents": [128, 100, 1, 1], "steps": [512, 16, 16], "box": [64, 80, 1, 1]},
    ]
    assert library.swizzles == [3, 3]


@pytest.mark.parametrize("columns,swizzle", [(64, 3), (32, 2), (16, 1)])
def test_a_box_is_swizzled_by_the_bytes_of_its_columns(columns: int, swizzle: int) -> None:
    library = FakeLibrary()
    narrow = HOPPER._replace(args=(launch.Arg("tensor_map", "Q", (columns, 128)),))
    launch.pack(narrow, HOPPER_TENSORS, LENGTHS, {}, 10, tensor_map.Encoder(library))
    assert library.swizzles == [swizzle]


def test_descriptors_and_tickets_follow_new_addresses() -> None:
    driver = FakeDriver()
    call = hopper(FakeLibrary())
    kernel = launch.load(b"cubin", 0, driver).kernel("forward", 1024)
    call.launch(kernel, 0)
    call.bind({"Q": 0x5000, "K": 0x6000, "tickets": 0x7000})
    call.launch(kernel, 0)
    seen = [[struct.unpack("<Q", a)[0] for a in arguments] for _, arguments in driver.launched]
    assert [(a[0], a[2], a[3]) for a in seen] == [
        (0x1000, 0x2000, 0x3000), (0x5000, 0x6000, 0x7000),
    ]  # fmt: skip
    assert seen[0][1] == seen[1][1] == 65


def test_a_tensor_that_tma_refuses_is_named() -> None:
    with pytest.raises(launch.LaunchError, match=r"TMA cannot describe Q of shape .2, 65, 8, 128"):
        hopper(FakeLibrary(code=1))
    library = FakeLibrary()
    call = hopper(library)
    library.code = 1
    with pytest.raises(launch.LaunchError, match="TMA refuses Q"):
        call.bind({"Q": 1, "K": 2, "tickets": 3})


def test_a_persistent_grid_is_at_most_the_machine() -> None:
    assert hopper(FakeLibrary(), num_sms=10).grid == 10
    assert hopper(FakeLibrary(), num_sms=132).grid == 16
    with pytest.raises(launch.LaunchError, match="persistent; the number of SMs is wanted"):
        hopper(FakeLibrary(), num_sms=0)


def test_a_cluster_takes_the_place_of_a_block() -> None:
    pairs = launch.Launch("forward", 384, 0, (launch.Axis("M", 64), launch.Axis("heads", 1)), ())
    pairs = pairs._replace(cluster=2)
    assert launch.pack(pairs, {}, LENGTHS, {}).grid == 2 * 16
    stays = pairs._replace(persistent=1)
    assert launch.pack(stays, {}, LENGTHS, {}, 132).grid == 32
    assert launch.pack(stays, {}, LENGTHS, {}, 11).grid == 10  # whole clusters only
    with pytest.raises(launch.LaunchError, match="forward wants 2 SMs at once, 1 there"):
        launch.pack(stays, {}, LENGTHS, {}, 1)


def test_a_module_counts_its_multiprocessors() -> None:
    driver = FakeDriver()
    driver.cuDeviceGetAttribute = lambda attribute, device: (Result.OK, 10)
    plain = LAUNCH._replace(persistent=1)
    module = launch.load(b"cubin", 0, driver)
    prepared = launch.prepare(module, [plain], TENSORS, LENGTHS, {"scale": 1.0})
    prepared.launch(0)
    assert driver.launched[0][0][1] == 10


def test_tickets_are_named_once() -> None:
    assert launch.ticket_names([HOPPER, HOPPER, LAUNCH]) == ("tickets",)
