"""Tiles over SMs: what is visible is covered, orders are those of the kernels, nobody is idle."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from space.gpu import GPUS
from space.params import Point
from space.variant import DType, Shape, io_bytes, visible_pairs
from tuner.evaluate.waves import (
    TAIL_TILES,
    dram_bytes,
    finish_us,
    key_tiles,
    launch_order,
)


@settings(max_examples=60)
@given(
    st.integers(1, 700), st.integers(1, 700), st.sampled_from([32, 64, 128]),
    st.sampled_from([16, 64, 80]),
)  # fmt: skip
def test_key_tiles_cover_what_is_visible(sq: int, sk: int, bm: int, bn: int) -> None:
    s = Shape(1, 1, 1, sq, sk, 128, 128, causal=True)
    tiles = key_tiles(s, bm, bn)
    assert len(tiles) == -(-sq // bm)
    assert sum(tiles) * bm * bn >= visible_pairs(sq, sk, True)
    assert max(tiles) <= -(-sk // bn)
    assert tiles == sorted(tiles)


@pytest.mark.parametrize(
    ("group", "longest_first", "order"),
    [
        (1, False, [1, 2, 1, 2, 1, 2]),
        (1, True, [2, 1, 2, 1, 2, 1]),
        (0, True, [2, 2, 2, 1, 1, 1]),
        (2, True, [2, 2, 1, 1, 2, 1]),
        (8, False, [1, 1, 1, 2, 2, 2]),
    ],
)
def test_order_of_three_planes(group: int, longest_first: bool, order: list[int]) -> None:
    assert launch_order([1, 2], 3, group, longest_first) == order


def test_dealt_tiles_wait_for_the_unlucky_one() -> None:
    order = [4, 1, 4, 1]
    assert finish_us(order, 2, 1.0, 0.0, static=True) == 8
    assert finish_us(order, 2, 1.0, 0.0, static=False) == 5
    assert finish_us(sorted(order, reverse=True), 2, 1.0, 0.5, static=False) == 6


@settings(max_examples=60)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(1, 9), st.booleans())
def test_nobody_finishes_before_the_work_is_done(
    order: list[int], slots: int, static: bool
) -> None:
    found = finish_us(order, slots, 1.0, 0.25, static)
    busy = sum(order) + 0.25 * len(order)
    assert found >= max(busy / slots, max(order) + 0.25) - 1e-9
    assert found <= busy + 1e-9


def test_many_tiles_are_spread_evenly_but_for_the_tail() -> None:
    tiles = [3] * (4 * TAIL_TILES)
    assert finish_us(tiles, 128, 1.0, 0.0, False) == pytest.approx(3 * len(tiles) / 128)


def test_no_work_takes_no_time() -> None:
    assert finish_us([], 4, 1.0, 1.0, static=True) == 0
    assert finish_us([], 4, 1.0, 1.0, static=False) == 0


@pytest.mark.parametrize("kv_heads", [1, 8, 32])
@pytest.mark.parametrize("group", [0, 1, 8])
def test_device_memory_gives_everything_once_at_least(kv_heads: int, group: int) -> None:
    gpu = GPUS["h200"]
    point = Point.of({"BM": 128, "BN": 128, "head_group": group})
    for length in (100, 512, 4096):
        s = Shape(8, 32, kv_heads, length, length, 128, 128)
        found = dram_bytes(s, point, gpu.num_sms, gpu)
        assert found >= io_bytes(s, DType.BF16)
        if kv_heads == 1 or group == 1:
            assert found == pytest.approx(io_bytes(s, DType.BF16))


def test_heads_that_overflow_the_l2_are_read_again() -> None:
    gpu = GPUS["h200"]
    s = Shape(8, 32, 32, 4096, 4096, 128, 128)
    grouped, all_at_once = (
        dram_bytes(s, Point.of({"BM": 128, "BN": 128, "head_group": g}), gpu.num_sms, gpu)
        for g in (8, 0)
    )
    assert all_at_once > 2 * grouped
