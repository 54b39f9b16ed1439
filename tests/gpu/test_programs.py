"""Every program of the language on a GPU, beside the interpreter; replies as they stand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from gpu_here import GPU, NEEDS_GPU

from codegen.cute import translate
from codegen.kernel import KernelSource
from codegen.nvrtc import compile_source
from codegen.tl import interpreter
from codegen.tl.ast import Program, Rows
from codegen.tl.bind import bind, sketch_choices
from codegen.tl.parser import parse
from llm_proposer.builtin import programs
from llm_proposer.seeds import seeds
from runs.templates import launch
from space.constraints import Backend, space_for
from space.gpu import GPUS
from space.params import Point
from space.variant import DType, Problem
from tuner.evaluate.inputs import TORCH_DTYPE

REPLIES = Path(__file__).parents[1] / "codegen" / "tl" / "replies"

pytestmark = NEEDS_GPU

BATCH, HEADS, KV_HEADS, M, N = 2, 4, 2, 150, 200
SCALARS = {"scale": 0.11, "softcap": 3.0, "window_left": 70, "window_right": 30}


def seeded(problem: Problem, gpu: str, backend: Backend, text: str) -> Point:
    """A seed within what the sketch's own Params allow."""
    space = space_for(problem, GPUS[gpu], backend)
    own = {k: v for k, v in sketch_choices(parse(text)).items() if k in space.names}
    return seeds(problem, GPUS[gpu], space.restrict(own))[0]


def launched(
    source: KernelSource, program: Program, inputs: Mapping[str, np.ndarray], dtype: DType
) -> dict[str, np.ndarray]:
    """Build for this GPU, launch on NaN-filled outputs, and return the outputs as float32."""
    import torch

    assert GPU is not None
    kind = TORCH_DTYPE[dtype]
    tensors = {n: torch.from_numpy(x).to("cuda", kind) for n, x in inputs.items()}
    lengths = launch.problem_lengths(BATCH, HEADS, KV_HEADS, M, N)
    columns = {t.name: t.columns for k in program.kernels for t in k.tensors}
    for name, role in source.tensors:
        if role == "out":
            width = columns[name] if isinstance(columns[name], int) else N
            tensors[name] = torch.full((BATCH, M, HEADS, width), torch.nan, device="cuda").to(kind)
    for w in source.workspaces:
        shape = launch.workspace_shape(w.shape, lengths)
        tensors[w.name] = torch.full(shape, torch.nan, device="cuda")
    for name in launch.ticket_names(source.launches):
        tensors[name] = torch.zeros(1, dtype=torch.int32, device="cuda")
    module = launch.load(compile_source(source, GPU.arch).image, 0)
    scalars = {k: float(v) for k, v in SCALARS.items()}
    wanted = lengths | {"window_left": 70, "window_right": 30}
    prepared = launch.prepare(module, source.launches, tensors, wanted, scalars)
    prepared.launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return {n: tensors[n].float().cpu().numpy() for n, role in source.tensors if role == "out"}


def drawn(program: Program, dtype: DType) -> dict[str, np.ndarray]:
    """Inputs of a program, rounded to the dtype, [batch, rows, heads, columns]."""
    import torch

    rng = np.random.default_rng(7)
    found = {}
    for tensor in (t for k in program.kernels for t in k.tensors):
        if tensor.output or tensor.workspace:
            continue
        query = tensor.rows is Rows.QUERY
        shape = (BATCH, M if query else N, HEADS if query else KV_HEADS, int(tensor.columns))
        values = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32) * 0.7)
        found[tensor.name] = values.to(TORCH_DTYPE[dtype]).float().numpy()
    return found


CASES = [
    (name, causal, gpu, backend)
    for causal in (False, True)
    for name in programs(causal)
    for gpu, backend in (
        ("a100", Backend.MMA_SYNC),
        ("t4", Backend.MMA_SYNC),
        ("h200", Backend.WGMMA),
    )
    if not (name in ("gemm_epilogue", "split_kv") and backend is Backend.WGMMA)
    and not (name == "gemm_epilogue" and causal)
]


@pytest.mark.parametrize(("name", "causal", "gpu", "backend"), CASES)
def test_a_program_computes_what_the_interpreter_does(
    name: str, causal: bool, gpu: str, backend: Backend
) -> None:
    problem = Problem("gqa", DType.FP16, 64, 64, causal)
    text = programs(causal)[name]
    program = bind(parse(text), problem, seeded(problem, gpu, backend, text))
    check(program, problem, gpu)


def check(program: Program, problem: Problem, gpu: str) -> None:
    """Run a program here and assert that it errs no more than twice what its rounding costs."""
    inputs = drawn(program, problem.dtype)
    got = launched(translate(program, problem, GPUS[gpu]), program, inputs, problem.dtype)
    expected = interpreter.run(program, inputs, SCALARS, problem.dtype)
    exact = interpreter.run(program, inputs, SCALARS, problem.dtype, exact=True)
    for output, values in got.items():
        assert np.isfinite(values).all(), f"{output}: {np.argwhere(~np.isfinite(values))[:3]}"
        # the interpreter rounds where the kernel does: its own error is the yardstick
        own = np.abs(expected[output] - exact[output]).max()
        error = np.abs(values - exact[output]).max()
        assert error <= 2 * own + 1e-4 * np.abs(exact[output]).max(), (error, own)


LEGAL_REPLIES = {
    "code-03": ("mha", DType.BF16, (128, 128), False, "a100"),
    "code-05": ("gqa", DType.BF16, (64, 64), True, "a100"),
    "code-06": ("mla", DType.FP16, (192, 128), True, "l40s"),
    "code-08": ("mha", DType.FP16, (80, 80), False, "rtx8000"),
    "code-16": ("mha", DType.BF16, (128, 128), False, "a100"),
    "sketch-12": ("mha", DType.BF16, (64, 64), False, "a100"),
}


@pytest.mark.parametrize("reply", LEGAL_REPLIES)
def test_a_legal_reply_is_right_as_it_stands(reply: str) -> None:
    variant, dtype, dims, causal, gpu = LEGAL_REPLIES[reply]
    problem = Problem(variant, dtype, *dims, causal)
    text = (REPLIES / f"{reply}.txt").read_text()
    program = bind(parse(text), problem, seeded(problem, gpu, Backend.MMA_SYNC, text))
    check(program, problem, gpu)
