"""Shapes, masks and counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from space.variant import (
    VARIANTS,
    DType,
    Problem,
    Shape,
    SpaceError,
    check_shape,
    dtype_named,
    flops,
    io_bytes,
    paper_shapes,
    parse_shape,
    problems_of,
    variant_named,
    visible_pairs,
    with_causal,
)

lengths = st.integers(0, 40)


@given(lengths, lengths, st.booleans())
def test_visible_pairs_are_those_of_a_bottom_right_mask(sq: int, sk: int, causal: bool) -> None:
    seen = sum(not causal or key <= query + sk - sq for query in range(sq) for key in range(sk))
    assert visible_pairs(sq, sk, causal) == seen


def test_flops_count_both_products_over_visible_pairs() -> None:
    shape = Shape(2, 4, 1, 8, 8, 64, 32)
    assert flops(shape) == 2 * 2 * 4 * 64 * (64 + 32)
    assert flops(with_causal(shape, True)) == 2 * 2 * 4 * 36 * (64 + 32)


def test_bytes_are_each_tensor_once() -> None:
    shape = Shape(2, 4, 1, 8, 16, 64, 32)
    q, k, v, o = 2 * 8 * 4 * 64, 2 * 16 * 64, 2 * 16 * 32, 2 * 8 * 4 * 32
    assert io_bytes(shape, DType.BF16) == 2 * (q + k + v + o)


def test_parses_a_shape() -> None:
    assert parse_shape("2,32,8,512,1024,128") == Shape(2, 32, 8, 512, 1024, 128, 128)
    assert parse_shape(" 1, 16,16,7,7,192,128 ") == Shape(1, 16, 16, 7, 7, 192, 128)
    assert parse_shape("1,1,1,1,1,256").key == "1,1,1,1,1,256,256"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not B,Hq,Hkv,Sq,Sk,D"),
        ("1,2,3", "is not B,Hq,Hkv,Sq,Sk,D"),
        ("1,1,1,1,1,64,64,64", "is not B,Hq,Hkv,Sq,Sk,D"),
        ("1,1,1,1,1,64,", "with whole numbers"),
        ("1,1,1,1,1.5,64", "with whole numbers"),
        ("1_0,1,1,1,1,64", "with whole numbers"),
        ("１,1,1,1,1,64", "with whole numbers"),
        ("1,1,1,1," + "9" * 5000 + ",64", "with whole numbers"),
        ("0,1,1,1,1,64", "every number must be at least 1"),
        ("1,1,1,-5,1,64", "every number must be at least 1"),
        ("1,1,0,1,1,64", "every number must be at least 1"),
        ("1,6,4,1,1,64", "Hq=6 is not a multiple of Hkv=4"),
        ("1,1,1,1,1,72,100", "head dim Dv=100 is not a multiple of 8 from 16 to 256"),
        ("1,1,1,1,1,8", "head dim D=8 is not a multiple of 8 from 16 to 256"),
        ("1,1,1,1,1,264", "head dim D=264 is not"),
        ("1,1,1,2147483648,1,64", "a size is past 2147483647"),
    ],
)
def test_says_what_is_wrong_with_a_shape(text: str, message: str) -> None:
    with pytest.raises(SpaceError, match=message) as caught:
        parse_shape(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dim", range(16, 257, 8))
def test_every_head_dim_is_legal(dim: int) -> None:
    check_shape(Shape(1, 1, 1, 1, 1, dim, dim))


def test_heads_of_zero_are_named_before_any_division() -> None:
    with pytest.raises(SpaceError, match="got Hq=4 and Hkv=0"):
        check_shape(Shape(1, 4, 0, 1, 1, 64, 64))
    with pytest.raises(SpaceError, match="negative size"):
        check_shape(Shape(1, 1, 1, -1, 1, 64, 64))


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(SpaceError, match="unknown variant 'mhx'; known variants: mha, gqa, mqa"):
        variant_named("mhx")
    with pytest.raises(SpaceError, match="unknown dtype 'fp8'; known dtypes: fp16, bf16"):
        dtype_named("fp8")
    assert (variant_named("mla").name, dtype_named("bf16")) == ("mla", DType.BF16)


@pytest.mark.parametrize(
    ("variant", "heads", "kv_heads", "message"),
    [
        ("mha", 8, 2, "mha needs Hq = Hkv, got 8 and 2; use gqa"),
        ("mqa", 8, 2, "mqa has one KV head, got 2; use gqa"),
        ("gqa", 2, 4, "gqa needs Hq >= Hkv, got 2 and 4"),
        ("mha", 8, 8, None),
        ("mqa", 71, 1, None),
        ("gqa", 28, 4, None),
        ("gqa", 4, 4, None),
        ("mla", 16, 16, None),
    ],
)
def test_a_variant_says_whether_heads_are_its(
    variant: str, heads: int, kv_heads: int, message: str | None
) -> None:
    assert VARIANTS[variant].admits(Shape(1, heads, kv_heads, 8, 8, 64, 64)) == message


@pytest.mark.parametrize("name", VARIANTS)
def test_paper_shapes_are_legal_and_of_16k_tokens(name: str) -> None:
    shapes = tuple(paper_shapes(VARIANTS[name], causal=True))
    assert shapes and {s.batch * s.seqlen_q for s in shapes} == {16384}
    for s in shapes:
        check_shape(s)
        assert VARIANTS[name].admits(s) is None and s.causal
    problems = problems_of(name, DType.FP16, shapes)
    assert len(problems) == len(VARIANTS[name].paper_heads)
    assert all(sum(p.serves(s) for p in problems) == 1 for s in shapes)


def test_keys_and_scale() -> None:
    shape = Shape(1, 16, 16, 512, 512, 192, 128, causal=True)
    assert shape.key == "1,16,16,512,512,192,128c"
    assert math.isclose(shape.default_scale, 192**-0.5)
    assert Problem("mla", DType.FP16, 192, 128, False).key == "mla-fp16-d192x128-full"
    assert Problem("mha", DType.BF16, 64, 64, True).key == "mha-bf16-d64-causal"
    assert not Problem("mha", DType.BF16, 192, 128, False).serves(shape)
    assert Shape(1, 28, 4, 1, 1, 64, 64).group == 7
