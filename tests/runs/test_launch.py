"""Packing and launching through a driver that records what it is told."""

from __future__ import annotations

import ctypes
import struct

import pytest
from cuda.bindings import driver as bindings
from fake_driver import LAUNCH, LENGTHS, TENSORS, FakeDriver, Result, Tensor

from codegen import kernel as source_kernel
from runs.templates import launch


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
