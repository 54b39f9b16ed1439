"""Windows with sinks and ALiBi in the interpreter, beside the formulas written out."""

from __future__ import annotations

import numpy as np
import pytest

from codegen.tl.bind import bind
from codegen.tl.checker import check
from codegen.tl.interpreter import run
from codegen.tl.parser import parse
from space.params import Point
from space.variant import DType, Problem

TEXT = """\
Copy Q from global to shared
for i = 0:N
  Copy K from global to shared
  Compute GEMM Q, K.T and get S
  Compute Scale S, scale
  Compute Mask S, {mask}
  Compute Softmax S
  Copy V from global to shared
  Compute GEMM S, V and accumulate O
end
Copy O from register to global
"""
PROBLEM = Problem("gqa", DType.FP16, 16, 16, False)
M, N, HEADS = 70, 150, 4


def interpreted(mask: str, more: str = "") -> tuple[np.ndarray, dict[str, np.ndarray]]:
    program = bind(parse(TEXT.format(mask=mask) + more), PROBLEM, Point((("BM", 64), ("BN", 32))))
    assert program.scalars == ("scale",)
    rng = np.random.default_rng(3)
    sizes = {"Q": (M, HEADS), "K": (N, 2), "V": (N, 2)}
    tensors = {n: rng.standard_normal((1, s, h, 16)) for n, (s, h) in sizes.items()}
    return run(program, tensors, {"scale": 0.3}, DType.FP16, exact=True)["O"], tensors


def attended(tensors: dict[str, np.ndarray], bias: np.ndarray) -> np.ndarray:
    k, v = (np.repeat(tensors[n], 2, axis=2) for n in "KV")
    scores = np.einsum("bmhd,bnhd->bhmn", tensors["Q"], k) * 0.3 + bias
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhmn,bnhd->bmhd", p / p.sum(-1, keepdims=True), v)


rows, keys = np.arange(M)[:, None] + N - M, np.arange(N)[None, :]


@pytest.mark.parametrize(("left", "right", "sinks"), [(20, 0, 3), (20, 5, 40), (0, 0, 1)])
def test_first_keys_stay_visible_in_a_window(left: int, right: int, sinks: int) -> None:
    got, tensors = interpreted(f"window({left}, {right}, {sinks})")
    seen = (keys <= rows + right) & ((keys >= rows - left) | (keys < sinks))
    assert np.allclose(got, attended(tensors, np.where(seen, 0.0, -np.inf)))


def test_params_are_the_numbers_of_a_window() -> None:
    got, _ = interpreted("window(l, 0, k)", "Param l = 20\nParam k = 3\n")
    wanted, _ = interpreted("window(20, 0, 3)")
    assert np.array_equal(got, wanted)


@pytest.mark.parametrize(("mask", "exponent"), [("alibi", 8), ("alibi(4)", 4)])
def test_alibi_subtracts_the_slope_of_each_head_by_distance(mask: str, exponent: int) -> None:
    got, tensors = interpreted(mask)
    slopes = 2.0 ** (-exponent * np.arange(1, HEADS + 1) / HEADS)
    bias = -slopes[:, None, None] * np.abs(rows - keys)
    assert np.allclose(got, attended(tensors, bias))


@pytest.mark.parametrize(
    ("mask", "said"),
    [("window(1, 2, 3, 4)", "two sides"), ("alibi(1, 2)", "one number"), ("lattice", "no kind")],
)
def test_a_mask_that_is_none_is_named(mask: str, said: str) -> None:
    (fault,) = check(parse(TEXT.format(mask=mask)), PROBLEM)
    assert said in fault.message
