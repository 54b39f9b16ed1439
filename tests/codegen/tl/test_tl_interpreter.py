"""The interpreter gives plain attention for every mask and variant, and the other programs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tl_reference import Array, attention, hidden_by, random_inputs, scores_of

from codegen.tl.bind import bind
from codegen.tl.interpreter import run
from codegen.tl.numerics import round_to
from codegen.tl.parser import parse
from llm_proposer.builtin import programs, sketches
from space.params import Point
from space.variant import DType, Phase, Problem

POINT = Point.of({"BM": 32, "BN": 16, "warps": 2, "stages": 2})
LENGTHS = ((64, 64), (70, 50), (33, 100), (100, 33), (1, 37), (5, 1))
HEADS = {"mha": (4, 4), "gqa": (6, 2), "mqa": (4, 1), "mla": (2, 2)}
SCALE = 0.17
SCALARS = {"scale": SCALE, "softcap": 2.5, "window_left": 9, "window_right": 4}


def problem(variant: str, causal: bool, dtype: DType = DType.FP16) -> Problem:
    head_dim, head_dim_v = (48, 32) if variant == "mla" else (24, 24)
    return Problem(variant, dtype, head_dim, head_dim_v, causal)


def inputs(variant: str, m: int, n: int) -> dict[str, Array]:
    heads, kv_heads = HEADS[variant]
    wanted = problem(variant, False)
    return random_inputs((2, heads, kv_heads, m, n, wanted.head_dim, wanted.head_dim_v))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", list(HEADS))
@pytest.mark.parametrize("name", list(sketches("mha", False)))
def test_attention_of_every_variant_and_mask(name: str, variant: str, causal: bool) -> None:
    text = sketches(variant, causal)[name]
    program = bind(parse(text), problem(variant, causal), POINT)
    for m, n in LENGTHS:
        tensors = inputs(variant, m, n)
        found = run(program, tensors, {"scale": SCALE}, DType.FP16, exact=True)["O"]
        expected = attention(tensors, SCALE, hidden_by(m, n, causal))
        np.testing.assert_allclose(found, expected, atol=1e-12)


def relu(scores: Array) -> Array:
    return np.maximum(scores, 0.0)


def sigmoid(scores: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-scores)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "weigh"), [("relu", relu), ("sigmoid", sigmoid), ("linear", lambda s: s)]
)
def test_attention_without_a_softmax(name: str, weigh: object, causal: bool) -> None:
    program = bind(parse(programs(causal)[name]), problem("gqa", causal), POINT)
    for m, n in LENGTHS:
        tensors = inputs("gqa", m, n)
        found = run(program, tensors, SCALARS, DType.FP16, exact=True)["O"]
        expected = attention(tensors, SCALE, hidden_by(m, n, causal), weigh)  # type: ignore[arg-type]
        np.testing.assert_allclose(found, expected, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
def test_softcap_and_window(causal: bool) -> None:
    program = bind(parse(programs(causal)["softcap_window"]), problem("mqa", causal), POINT)
    for m, n in LENGTHS:
        tensors = inputs("mqa", m, n)
        found = run(program, tensors, SCALARS, DType.FP16, exact=True)["O"]
        hidden = hidden_by(m, n, causal, (9, 0 if causal else 4))
        expected = attention(tensors, SCALE, hidden, cap=2.5)
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_additive_bias_and_minus_infinity_in_it() -> None:
    text = sketches("mha", False)["forward"].replace(
        "  Compute Softmax S",
        "  Copy B in coordinate [L = block_idx, D = i] from global to register\n"
        "  Compute Mask S, bias(B)\n  Compute Softmax S",
    )
    program = bind(parse(text), problem("mha", False), POINT)
    m, n = 70, 50
    tensors = inputs("mha", m, n)
    bias = np.random.default_rng(5).normal(size=(2, m, 4, n))
    bias[:, 3] = -np.inf  # a row that sees nothing
    bias[:, :, :, 7] = -np.inf
    found = run(program, tensors | {"B": bias}, SCALARS, DType.FP16, exact=True)["O"]
    scores = scores_of(tensors["Q"], tensors["K"], SCALE) + bias.transpose(0, 2, 1, 3)
    weights = np.exp(scores - np.max(np.where(np.isinf(scores), -99.0, scores), -1, keepdims=True))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    expected = np.einsum("bhmn,bnhd->bmhd", weights, tensors["V"])
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert not found[:, 3].any()


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_split_keys_and_combine(splits: int, causal: bool) -> None:
    text = programs(causal)["split_kv"].replace("in {2, 4, 8}", f"= {splits}")
    program = bind(parse(text), problem("gqa", causal), POINT)
    assert [k.name for k in program.kernels] == ["partial", "combine"]
    for m, n in LENGTHS:  # with five splits of a short key range, some splits are empty
        tensors = inputs("gqa", m, n)
        found = run(program, tensors, SCALARS, DType.FP16, exact=True)["O"]
        expected = attention(tensors, SCALE, hidden_by(m, n, causal))
        np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("depth", [32, 80, 128])
def test_plain_gemm_with_an_epilogue(depth: int) -> None:
    wanted = Problem("mha", DType.FP16, depth, depth, False)
    program = bind(parse(programs()["gemm_epilogue"]), wanted, POINT)
    generator = np.random.default_rng(2)
    a, b = generator.normal(size=(1, 75, 2, depth)), generator.normal(size=(1, 41, 2, depth))
    found = run(program, {"A": a, "B": b}, {}, DType.FP16, exact=True)["C"]
    np.testing.assert_allclose(found, relu(np.einsum("bmhd,bnhd->bmhn", a, b)), atol=1e-12)


def test_chunked_linear_attention_keeps_a_state() -> None:
    text = """
    for i = 0:num_chunks
        Copy Q from global to shared
        Copy K from global to shared
        Copy V from global to shared
        Copy H from register to shared
        Compute GEMM Q, H and get O
        Compute GEMM Q, K.T and get S
        Compute CausalMask S
        Compute GEMM S, V and accumulate O
        Compute GEMM K.T, V and accumulate H
        Copy O from register to global
    end
    """
    wanted = Problem("mha", DType.FP16, 24, 24, True)
    program = bind(parse(text), wanted, Point.of({"BM": 32, "BN": 32}))
    tensors = random_inputs((1, 2, 2, 64, 64, 24, 24))
    found = run(program, tensors, {"scale": 1.0}, DType.FP16, exact=True)["O"]
    expected = attention(tensors, 1.0, hidden_by(64, 64, True), lambda s: s)
    np.testing.assert_allclose(found, expected, atol=1e-10)


# ---- element types -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(DType))
def test_rounding_is_that_of_torch(dtype: DType) -> None:
    values = (
        np.random.default_rng(0).normal(size=20000) * 10.0 ** np.arange(-9, 9).repeat(1112)[:20000]
    )
    values = np.concatenate([values, [0.0, -0.0, np.inf, -np.inf, 65519.0, 65520.0, 1e-8]])
    wide = values.astype(np.float32)
    kind = torch.float16 if dtype is DType.FP16 else torch.bfloat16
    expected = torch.from_numpy(wide).to(kind).to(torch.float32).numpy()
    np.testing.assert_array_equal(round_to(wide, dtype), expected)
    assert np.isnan(round_to(np.array([np.nan], dtype=np.float32), dtype)).all()


@pytest.mark.parametrize("dtype", list(DType))
def test_real_types_lose_what_plain_attention_loses(dtype: DType) -> None:
    program = bind(parse(sketches("gqa", True)["forward"]), problem("gqa", True, dtype), POINT)
    m, n = 90, 75
    tensors = {k: round_to(v, dtype) for k, v in inputs("gqa", m, n).items()}
    found = run(program, tensors, {"scale": SCALE}, dtype)["O"]
    expected = attention(tensors, SCALE, hidden_by(m, n, True))
    kind = torch.float16 if dtype is DType.FP16 else torch.bfloat16
    q, k, v = (torch.from_numpy(tensors[x]).to(kind).transpose(1, 2) for x in "QKV")
    k, v = (x.repeat_interleave(3, dim=1) for x in (k, v))
    hidden = torch.from_numpy(hidden_by(m, n, True))
    scores = (q.float() @ k.float().mT * SCALE).masked_fill(hidden, -torch.inf)
    plain = torch.nan_to_num(scores.softmax(-1)).to(kind) @ v
    lost = np.abs(plain.transpose(1, 2).double().numpy() - expected).max()
    assert found.dtype == np.float32
    assert 0 < np.abs(found - expected).max() <= 2 * lost
    assert np.array_equal(found, round_to(found, dtype))  # stored at the problem's type


def test_torch_tensors_are_taken() -> None:
    program = bind(parse(sketches("mha", False)["forward"]), problem("mha", False), POINT)
    tensors = {k: torch.from_numpy(v).to(torch.bfloat16) for k, v in inputs("mha", 40, 40).items()}
    found = run(program, tensors, {"scale": SCALE}, DType.BF16)["O"]
    wide = {k: v.double().numpy() for k, v in tensors.items()}
    expected = attention(wide, SCALE, hidden_by(40, 40))
    np.testing.assert_allclose(found, expected, atol=2e-2)


def test_very_negative_scores_and_first_block_all_masked() -> None:
    program = bind(parse(sketches("mha", True)["forward"]), problem("mha", True), POINT)
    tensors = inputs("mha", 48, 48)
    tensors["K"] = tensors["K"] * 40.0  # logits past any finite sentinel of a 16-bit type
    found = run(program, tensors, {"scale": 100.0}, DType.FP16, exact=True)["O"]
    expected = attention(tensors, 100.0, hidden_by(48, 48, True))
    np.testing.assert_allclose(found, expected, atol=1e-9)


# ---- what is wrong with a call -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"K": None}, "needs a tensor K"),
        ({"K": np.zeros((2, 40, 3, 24))}, "4 query heads are not a multiple of 3|does not go with"),
        ({"Q": np.zeros((2, 40, 4, 25))}, "Q has 25 columns, the program has 24"),
        ({"V": np.zeros((2, 41, 4, 24))}, "V has shape"),
        ({"V": np.zeros((40, 4, 24))}, r"\[batch, rows, heads, columns\]"),
    ],
)
def test_wrong_tensors_are_named(change: dict[str, Array | None], message: str) -> None:
    program = bind(parse(sketches("mha", False)["forward"]), problem("mha", False), POINT)
    tensors = {**inputs("mha", 40, 40), **change}
    given = {k: v for k, v in tensors.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        run(program, given, {"scale": SCALE}, DType.FP16)


def test_a_missing_scalar_is_named() -> None:
    program = bind(parse(programs()["softcap_window"]), problem("mha", False), POINT)
    with pytest.raises(ValueError, match="softcap, window_left, window_right"):
        run(program, inputs("mha", 8, 8), {"scale": SCALE}, DType.FP16)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("variant", "dims"), [("gqa", (64, 64)), ("mla", (576, 512))])
def test_decode_does_not_depend_on_the_number_of_splits(
    variant: str, dims: tuple[int, int], causal: bool
) -> None:
    """Partial outputs joined by their log-sum-exp are attention; empty splits add nothing."""
    own = Problem(variant, DType.FP16, *dims, causal, Phase.DECODE)
    sketch = parse(sketches(variant, causal, Phase.DECODE)["decode"])
    program = bind(sketch, own, Point.of({"BM": 64, "BN": 32}))
    rng = np.random.default_rng(5)
    q = rng.standard_normal((2, 3, 4, dims[0]))
    k = rng.standard_normal((2, 70, 1, dims[0]))
    v = k[..., : dims[1]] if own.latent else rng.standard_normal((2, 70, 1, dims[1]))
    scale = own.default_scale
    given = {"Q": q, "K": k, "V": v}
    expected = attention(given, scale, hidden_by(3, 70, causal))
    for splits in (1, 2, 3, 7):  # of three tiles: with seven most splits are empty
        out = run(program, given, {"scale": scale}, own.dtype, exact=True, splits=splits)["O"]
        assert np.abs(out - expected).max() < 1e-12
