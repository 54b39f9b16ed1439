"""Descriptors, tickets and persistent grids of Hopper launches, by a library that keeps calls."""

from __future__ import annotations

import ctypes
import struct

import pytest
from fake_driver import LAUNCH, LENGTHS, FakeDriver, Tensor

from runs.templates import launch, tensor_map


class FakeLibrary:
    """The driver's descriptor calls: writes what it was told where the descriptor goes."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.encoded: list[dict[str, object]] = []
        self.swizzles: list[int] = []

    def cuTensorMapEncodeTiled(self, target, kind, rank, address, extents, steps, box, ones, *rest):
        assert target.value % 64 == 0
        interleave, swizzle, *rest = rest
        assert (kind, list(ones), interleave, rest) == (1, [1] * rank, 0, [2, 0])
        assert (len(extents), len(steps), len(box)) == (rank, rank - 1, rank)
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


@pytest.mark.parametrize(
    ("kv_heads", "group_and_heads", "steps"),
    [(2, (4, 2), [256, 2048, 1024]), (8, (1, 8), [16, 2048, 256]), (1, (8, 1), [256, 2048, 16])],
)
def test_a_box_of_packed_heads_stays_in_its_group(
    kv_heads: int, group_and_heads: tuple[int, int], steps: list[int]
) -> None:
    """Axes are columns, group, rows, KV heads and batch: past a group the box reads zeros."""
    library = FakeLibrary()
    arg = launch.Arg("tensor_map", "Q", (64, 32), 4)
    packed = HOPPER._replace(args=(arg,))
    lengths = launch.problem_lengths(2, 8, kv_heads, 65, 100)
    launch.pack(packed, HOPPER_TENSORS, lengths, {}, 10, tensor_map.Encoder(library))
    group, groups = group_and_heads
    assert library.encoded == [
        {
            "extents": [128, group, 65, groups, 2], "steps": [*steps, 133120],
            "box": [64, 4, 32, 1, 1],
        },
    ]  # fmt: skip
    assert library.swizzles == [3]
    without = {n: x for n, x in lengths.items() if n != "group"}
    with pytest.raises(launch.LaunchError, match="forward needs length 'group'"):
        launch.pack(packed, HOPPER_TENSORS, without, {}, 10, tensor_map.Encoder(library))


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


def test_tickets_are_named_once() -> None:
    assert launch.ticket_names([HOPPER, HOPPER, LAUNCH]) == ("tickets",)
