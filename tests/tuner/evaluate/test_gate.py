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
from space.variant import DType, Problem
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
