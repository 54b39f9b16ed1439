"""What a language model really wrote goes through with the outcome that the language asks for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tl_reference import attention, hidden_by, random_inputs

from codegen.errors import TLError
from codegen.tl.bind import bind, sketch_choices
from codegen.tl.checker import check, repaired
from codegen.tl.interpreter import run
from codegen.tl.parser import parse, read
from codegen.tl.printer import to_text
from codegen.tl.source import Diagnostic
from space.params import Point
from space.variant import DType, Problem

FOLDER = Path(__file__).parent / "replies"

#: file -> (line, code) of each fault; none is a clean reply
EXPECTED: dict[str, list[tuple[int, str]]] = {
    "code-03": [],
    "code-05": [],
    "code-06": [],
    "code-08": [],
    "code-11": [],
    "code-13": [(26, "undeclared")],
    "code-15": [(36, "schedule")],
    "code-16": [],
    "sketch-04": [],
    "sketch-05": [],
    "sketch-06": [(7, "undefined")],
    "sketch-08": [],
    "sketch-10": [],
    "sketch-12": [],
    "sketch-14": [],
    "sketch-15": [(11, "unknown-operator")],
    "tune-04": [(3, "json")],
    "tune-05": [(1, "json")],
    "tune-06": [(2, "json")],
    "tune-11": [(17, "global-not-allocated")],
    "tune-12": [(15, "bad-fragment"), (18, "global-not-allocated")],
    "tune-13": [
        (11, "unknown-clause"),
        (14, "unknown-clause"),
        (17, "unknown-clause"),
        (18, "bad-fragment"),
        (21, "global-not-allocated"),
        (21, "unknown-clause"),
    ],
    "tune-16": [(11, "gemm-shapes"), (14, "missing-reshape"), (16, "global-not-allocated")],
    "tune-17": [
        (6, "never-moved"),
        (12, "gemm-shapes"),
        (15, "missing-reshape"),
        (17, "global-not-allocated"),
    ],
    "tune-18": [(10, "schedule"), (23, "bad-fragment"), (27, "global-not-allocated")],
}


def reply(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def outcome(text: str) -> tuple[Diagnostic, ...]:
    try:
        return check(parse(text))
    except TLError as error:
        return error.diagnostics


def test_every_recorded_reply_has_an_expected_outcome() -> None:
    assert {p.stem for p in FOLDER.glob("*.txt")} == set(EXPECTED)


@pytest.mark.parametrize("name", list(EXPECTED))
def test_outcome(name: str) -> None:
    found = outcome(reply(name))
    assert Counter((d.span.line, d.code) for d in found) == Counter(EXPECTED[name])
    assert all(d.hint for d in found)


@pytest.mark.parametrize("name", [n for n, faults in EXPECTED.items() if not faults])
def test_clean_replies_print_and_parse_again(name: str) -> None:
    sketch = read(reply(name)).sketch
    assert parse(to_text(sketch)) == sketch


def test_remedies_name_what_is_meant() -> None:
    hints = {n: " ".join(d.hint for d in outcome(reply(n))) for n in EXPECTED}
    assert "`Cast`" in hints["sketch-15"]
    assert "Param bias" in hints["code-13"]
    assert "Compute GEMM Q, K.T and get S" in hints["tune-16"]
    assert "Allocate O in global (M, D) with offset o_offset" in hints["tune-11"]
    assert "Param stages" in hints["code-15"]
    (distance,) = outcome(reply("sketch-06"))
    assert distance.message.startswith("distance ")


@pytest.mark.parametrize("name", ["code-15", "tune-18"])
def test_the_dataflow_of_a_refused_reply_is_plain_attention(name: str) -> None:
    offered = repaired(parse(reply(name)))
    assert offered is not None
    sketch = parse(offered)
    assert check(sketch) == ()
    assert runs_as_attention(offered, 128, 128, False)


def runs_as_attention(text: str, head_dim: int, head_dim_v: int, causal: bool) -> bool:
    sketch = parse(text)
    choices = sketch_choices(sketch)
    point = Point.of({n: choices.get(n, (32,))[0] for n in ("BM", "BN")})
    problem = Problem("mha", DType.FP16, head_dim, head_dim_v, causal)
    program = bind(sketch, problem, point)
    for m, n in ((150, 200), (200, 150)):
        tensors = random_inputs((1, 2, 1, m, n, head_dim, head_dim_v))
        found = run(program, tensors, {"scale": 0.11}, DType.FP16, exact=True)["O"]
        expected = attention(tensors, 0.11, hidden_by(m, n, causal))
        np.testing.assert_allclose(found, expected, atol=1e-12)
    return True


@pytest.mark.parametrize(
    ("name", "head_dim", "head_dim_v", "causal"),
    [
        ("code-03", 128, 128, False),
        ("code-05", 64, 64, True),
        ("code-06", 192, 128, True),
        ("code-08", 80, 80, False),
        ("code-16", 128, 128, False),
        ("sketch-12", 64, 64, False),
    ],
)
def test_legal_forward_kernels_are_right(
    name: str, head_dim: int, head_dim_v: int, causal: bool
) -> None:
    assert runs_as_attention(reply(name), head_dim, head_dim_v, causal)


def test_absorbed_decode_takes_its_values_from_the_keys() -> None:
    problem = Problem("mla", DType.FP16, 576, 512, False)
    program = bind(parse(reply("code-11")), problem, Point.of({"BM": 64, "BN": 64}))
    tensors = random_inputs((1, 2, 1, 70, 90, 576, 512))
    given = {"Q": tensors["Q"], "KV": tensors["K"]}
    found = run(program, given, {"scale": 0.07}, DType.FP16, exact=True)["O"]
    wide = tensors | {"V": tensors["K"][..., :512]}
    np.testing.assert_allclose(found, attention(wide, 0.07, hidden_by(70, 90)), atol=1e-12)


def test_latent_decode_by_splits_is_attention_over_both_parts() -> None:
    problem = Problem("mla", DType.FP16, 48, 32, False)
    point = Point.of({"BM": 32, "BN": 16, "num_splits": 3})
    program = bind(parse(reply("sketch-04")), problem, point)
    parts = random_inputs((1, 2, 1, 40, 70, 48, 32))
    q, k = parts["Q"], parts["K"]
    given = {
        "Q_latent": q[..., :32], "Q_rope": q[..., 32:], "KV_latent": k[..., :32],
        "K_rope": k[..., 32:],
    }  # fmt: skip
    found = run(program, given, {"scale": 0.2}, DType.FP16, exact=True)["O"]
    wide = {"Q": q, "K": k, "V": k[..., :32]}
    np.testing.assert_allclose(found, attention(wide, 0.2, hidden_by(40, 70)), atol=1e-12)


def test_softcap_and_window_spelt_out() -> None:
    problem = Problem("mha", DType.FP16, 32, 32, False)
    program = bind(parse(reply("sketch-05")), problem, Point.of({"BM": 32, "BN": 32}))
    tensors = random_inputs((1, 2, 2, 70, 90, 32, 32))
    scalars = {"scale": 0.3, "c": 1.5, "window_left": 11, "window_right": 2}
    found = run(program, tensors, scalars, DType.FP16, exact=True)["O"]
    hidden = hidden_by(70, 90, window=(11, 2))
    np.testing.assert_allclose(found, attention(tensors, 0.3, hidden, cap=1.5), atol=1e-12)


def test_squared_relu_over_the_length() -> None:
    problem = Problem("mha", DType.FP16, 32, 32, False)
    program = bind(parse(reply("sketch-10")), problem, Point.of({"BM": 32, "BN": 32}))
    tensors = random_inputs((1, 2, 2, 70, 90, 32, 32))
    found = run(program, tensors, {"scale": 0.3, "n": 90}, DType.FP16, exact=True)["O"]
    expected = attention(tensors, 0.3, hidden_by(70, 90), lambda s: np.maximum(s, 0) ** 2) / 90
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_differential_attention() -> None:
    problem = Problem("mha", DType.FP16, 32, 32, False)
    program = bind(parse(reply("sketch-14")), problem, Point.of({"BM": 32, "BN": 32}))
    one, two = (random_inputs((1, 2, 2, 70, 90, 32, 32), seed) for seed in (1, 2))
    given = {"Q1": one["Q"], "K1": one["K"], "Q2": two["Q"], "K2": two["K"], "V": one["V"]}
    found = run(program, given, {"scale": 0.3, "lambda": 0.4}, DType.FP16, exact=True)["O"]
    hidden = hidden_by(70, 90)
    second = attention(two | {"V": one["V"]}, 0.3, hidden)
    np.testing.assert_allclose(found, attention(one, 0.3, hidden) - 0.4 * second, atol=1e-12)
