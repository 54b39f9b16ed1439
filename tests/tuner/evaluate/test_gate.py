"""The interpreter gate: right programs pass, a wrong mask or a missing tile is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from codegen.tl.ast import Custom, For, Program, Stmt
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import sketches
from llm_proposer.seeds import seeds
from space.constraints import space_for
from space.gpu import gpu_named
from space.params import Point
from space.variant import LATENT_DIMS, DType, Phase, Problem
from tuner.evaluate import gate


def program(problem: Problem) -> Program:
    gpu = gpu_named("a100")
    point = seeds(problem, gpu, space_for(problem, gpu))[0]
    text = next(iter(sketches(problem.variant, problem.causal).values()))
    return bind(parse(text), problem, point)


def without(p: Program, op: str) -> Program:
    """The program without one operator."""

    def kept(statements: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return tuple(
            replace(s, body=kept(s.body)) if isinstance(s, For) else s
            for s in statements
            if not (isinstance(s, Custom) and s.op == op)
        )

    return replace(p, kernels=tuple(replace(k, body=kept(k.body)) for k in p.kernels))


@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "mla"])
@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("causal", [False, True])
def test_right_program_passes(variant: str, dtype: DType, causal: bool) -> None:
    problem = Problem(variant, dtype, 48 if variant == "mla" else 32, 32, causal)
    assert gate.fault(program(problem), problem) is None


@pytest.mark.parametrize("op", ["Mask", "Scale"])
def test_missing_operator_is_wrong_output(op: str) -> None:
    problem = Problem("mha", DType.FP16, 64, 64, True)
    said = gate.fault(without(program(problem), op), problem)
    assert said is not None
    assert said.startswith("interpreter, N(0,1), Sq=")
    assert "is right, limit" in said


def test_mask_that_the_problem_does_not_have_is_wrong_output() -> None:
    causal = Problem("mha", DType.FP16, 64, 64, True)
    full = replace(causal, causal=False)
    assert gate.fault(program(causal), full) is not None


def test_bf16_rounding_is_to_nearest_even() -> None:
    x = np.random.default_rng(1).standard_normal(4096) * 100
    right = torch.from_numpy(x).float().bfloat16().double().numpy()
    assert (gate.rounded(x, DType.BF16) == right).all()
    ties = np.array([1.00390625, 1.01171875])
    assert gate.rounded(ties, DType.BF16).tolist() == [1.0, 1.015625]


def decode_program(problem: Problem, change: tuple[str, str] = ("", "")) -> Program:
    """The built-in decode sketch at tiles that need no space, with a part of its text replaced."""
    text = sketches(problem.variant, problem.causal, Phase.DECODE)["decode"]
    assert change[0] in text
    if change[0]:
        text = text.replace(*change)
    return bind(parse(text), problem, Point.of({"BM": 64, "BN": 64}))


def decode_problem(variant: str, causal: bool) -> Problem:
    dims = LATENT_DIMS if variant == "mla" else (64, 32)
    return Problem(variant, DType.BF16, *dims, causal, Phase.DECODE)


@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "mla"])
@pytest.mark.parametrize("causal", [False, True])
def test_right_decode_program_passes(variant: str, causal: bool) -> None:
    problem = decode_problem(variant, causal)
    assert gate.fault(decode_program(problem), problem) is None


#: what stands in the sketch, and what is put there
DECODE_FAULTS = {
    "weights are no exponentials": ("  Compute Exp w\n", "  Compute Relu w\n"),
    "parts are not weighed": ("  Compute Multiply O_s, w and get new O_s\n", ""),
}


@pytest.mark.parametrize("name", list(DECODE_FAULTS))
@pytest.mark.parametrize("variant", ["gqa", "mla"])
def test_wrong_combination_of_splits_is_wrong_output(variant: str, name: str) -> None:
    problem = decode_problem(variant, False)
    said = gate.fault(decode_program(problem, DECODE_FAULTS[name]), problem)
    assert said is not None
    assert said.startswith("interpreter, N(0,1), Sq=")


def test_latent_values_are_the_first_columns_of_the_keys() -> None:
    problem = decode_problem("mla", False)
    shifted = decode_program(problem, ("K[:, 0:Dv]", "K[:, 64:576]"))
    assert gate.fault(shifted, problem) is not None
