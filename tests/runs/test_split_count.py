"""How many splits a decode launch takes: by a table, and by what holds for any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runs.templates import launch

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


def test_blocks_that_share_a_split() -> None:
    lengths = launch.problem_lengths(1, 32, 8, 1, 128 * 64)
    assert launch.split_count(RULE, lengths, 132) == 16  # 64 tiles, at least 4 each
    assert launch.split_count(RULE._replace(sharing=2), lengths, 132) == 8
    few = launch.problem_lengths(64, 32, 1, 1, 128 * 64)
    assert launch.split_count(RULE, few, 132) == 4  # 264 places for 64 blocks
    assert launch.split_count(RULE._replace(sharing=2), few, 132) == 2


@given(
    st.builds(
        launch.SplitRule, st.integers(1, 256), st.integers(1, 256), st.integers(1, 4),
        st.integers(1, 4), st.integers(1, 8),
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
        assert each >= rule.min_tiles * rule.sharing
        blocks = -(-queries * group // rule.rows) * kv * batch * rule.sharing
        assert splits * blocks <= rule.blocks_per_sm * sms
