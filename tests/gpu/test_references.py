"""The examples on a GPU: each emitted kernel judged against its PyTorch function, and a bias."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gpu_here import GPU, NEEDS_GPU
from test_programs import BATCH, HEADS, KV_HEADS, SCALARS, M, N, launched

from codegen.cute import translate
from codegen.tl import interpreter
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.customs import CUSTOMS, Custom
from llm_proposer.seeds import seeds
from runs.record import Measured, Reference, Rejected, TrialClass
from space.constraints import Backend, space_for
from space.variant import DType, Problem, Shape
from tuner.build import build
from tuner.evaluate import gate
from tuner.job import Built, CompileJob, EvalJob
from tuner.pools import GpuPool
from tuner.reference import read_reference

BACKENDS = [Backend.MMA_SYNC] + ([Backend.WGMMA] if GPU is not None and GPU.sm == 90 else [])

pytestmark = NEEDS_GPU


def made(custom: Custom, backend: Backend, folder: Path) -> tuple[Built, Problem, Reference]:
    """Build a known-good point of an example's sketch, past the interpreter."""
    from tuner.evaluate.function import Function
    from tuner.evaluate.function_cases import cases_of

    assert GPU is not None
    numbers = [n.replace(" ", "") for n in custom.numbers]
    source = read_reference(f"{custom.path}:{custom.function}", numbers)
    problem = Problem("mha", GPU.dtypes[-1], 128, 128, custom.causal)
    answers = folder / "answers.npz"
    gate.save(answers, cases_of(Function.load(source.reference, problem), problem))
    point = seeds(problem, GPU, space_for(problem, GPU, backend))[0]
    job = CompileJob(custom.sketch, problem, point, GPU.name, GPU.arch, answers=answers)
    found = build(job)
    assert isinstance(found, Built), found
    return found, problem, source.reference


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("custom", CUSTOMS.values(), ids=lambda c: c.name)
def test_an_example_is_judged_right_by_its_function(
    pool: GpuPool, custom: Custom, backend: Backend, tmp_path: Path
) -> None:
    kernel, problem, reference = made(custom, backend, tmp_path)
    shapes = (
        Shape(2, 4, 4, 2048, 2048, 128, 128, custom.causal),
        Shape(1, 4, 4, 16384, 16384, 128, 128, custom.causal),
    )
    job = EvalJob(
        problem, kernel.source, kernel.cubin.image, shapes, 1, limit_s=120.0, reference=reference
    )
    outcome = pool.submit(job).result()
    assert isinstance(outcome, Measured), outcome
    assert outcome.error_ratio is not None and outcome.error_ratio <= 2.0
    if custom.name in ("sliding_window", "sink_tokens"):
        short, long = (t.median_us for t in outcome.timings)
        # 4 times the tokens of the first shape and the same window: not 32 times the work
        assert long < 12 * short


def test_a_kernel_of_another_function_is_wrong(pool: GpuPool, tmp_path: Path) -> None:
    kernel, problem, reference = made(CUSTOMS["softcap"], Backend.MMA_SYNC, tmp_path)
    other = replace(reference, scalars=(("softcap", 5.0),))
    shape = Shape(1, 4, 4, 512, 512, 128, 128, True)
    job = EvalJob(
        problem, kernel.source, kernel.cubin.image, (shape,), 1, limit_s=60.0, reference=other
    )
    outcome = pool.submit(job).result()
    assert isinstance(outcome, Rejected) and outcome.trial_class in (
        TrialClass.WRONG_OUTPUT, TrialClass.PRECISION,
    )  # fmt: skip


def test_a_bias_tensor_is_added_where_the_interpreter_adds_it() -> None:
    assert GPU is not None
    text = (CUSTOMS["alibi"].path.with_suffix(".tl")).read_text()
    copy = "  Copy B in coordinate [L = block_idx, D = i] from global to shared\n"
    text = text.replace("  Compute Mask S, alibi\n", f"{copy}  Compute Mask S, bias(B)\n")
    problem = Problem("gqa", DType.FP16, 64, 64, True)
    point = seeds(problem, GPU, space_for(problem, GPU, Backend.MMA_SYNC))[0]
    program = bind(parse(text), problem, point)
    rng = np.random.default_rng(7)
    sizes = {
        "Q": (BATCH, M, HEADS, 64), "K": (BATCH, N, KV_HEADS, 64), "V": (BATCH, N, KV_HEADS, 64),
        "B": (BATCH, M, HEADS, N),
    }  # fmt: skip
    draw = {n: rng.standard_normal(s, dtype=np.float32) for n, s in sizes.items()}
    inputs = {n: (0.7 * x).astype(np.float16).astype(np.float32) for n, x in draw.items()}
    inputs["B"][:, :, :, 5] = -np.inf
    got = launched(translate(program, problem, GPU), program, inputs, problem.dtype)["O"]
    expected = interpreter.run(program, inputs, SCALARS, problem.dtype)["O"]
    exact = interpreter.run(program, inputs, SCALARS, problem.dtype, exact=True)["O"]
    own = np.abs(expected - exact).max()
    assert np.isfinite(got).all()
    assert np.abs(got - exact).max() <= 2 * own + 1e-4 * np.abs(exact).max()
