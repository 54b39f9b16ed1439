"""`tune verify` with real kernels: a right run and its export hold, a spoiled one does not."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_here import GPU, NEEDS_GPU

from codegen.cute import translate
from codegen.kernel import KernelSource
from codegen.nvrtc import compile_source
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import sketches
from llm_proposer.seeds import seeds
from runs.export import export
from runs.record import Basis, Measured, RunSpec, Timing, TrialRecord
from runs.store import RunStore
from space.constraints import space_for
from space.gpu import GpuSpec
from space.variant import DType, Problem, Shape
from tests.adversarial.naive import naive

FULL = Shape(2, 6, 2, 256, 256, 64, 64)
CAUSAL = dataclasses.replace(FULL, causal=True)

pytestmark = NEEDS_GPU


def emitted(problem: Problem, gpu: GpuSpec) -> KernelSource:
    point = seeds(problem, gpu, space_for(problem, gpu))[0]
    text = next(iter(sketches(problem.variant, problem.causal).values()))
    return translate(bind(parse(text), problem, point), problem, gpu)


def make_run(root: Path, spoil: str | None) -> RunStore:
    """A run of a full and a causal kernel; `spoil` puts a hand-written one for the causal."""
    assert GPU is not None
    shapes = (FULL, CAUSAL)
    spec = RunSpec("20261130T1200Z-gqa", "gqa", GPU.name, DType.FP16, shapes, 2, 0, Basis.MEASURED)
    with RunStore.create(root, spec) as store:
        for index, shape in enumerate(shapes):
            problem = Problem("gqa", DType.FP16, 64, 64, shape.causal)
            point = seeds(problem, GPU, space_for(problem, GPU))[0]
            whole = spoil is None or not shape.causal
            source = emitted(problem, GPU) if whole else naive(problem, spoil or "")
            cubin = compile_source(source, GPU.arch)
            store.put_kernel(source, cubin)
            timing = Timing(shape, 1.0, 1.0, 1.0, 1, Basis.MEASURED)
            store.append(
                TrialRecord(
                    index, problem, "canonical", point, "first", Measured((timing,), 1.0),
                    source.digest, cubin.key, cubin.resources,
                )
            )  # fmt: skip
    return store


def tune_verify(*args: str) -> tuple[int, list[dict[str, object]]]:
    """Run the command as a user does; return its exit code and its lines."""
    command = [sys.executable, "-m", "tuner.cli", "verify", *args, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    return make_run(tmp_path_factory.mktemp("right"), None)


def test_right_run_and_its_export_hold(right: RunStore, tmp_path: Path) -> None:
    export(right, tmp_path / "out")
    for target in (right.path, tmp_path / "out"):
        code, lines = tune_verify(str(target), "--sanitizer", "no", "--seed", "11")
        assert code == 0, lines
        assert [line["class"] for line in lines[:-1]] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("wrong one past the tuned length", "wrong_output"),
        ("zeros", "wrong_output"),
        ("changes K", "input_modified"),
        ("right 19 times of 20", "nondeterministic"),
        ("illegal address", "crashed"),
    ],
)
def test_spoiled_kernel_does_not_hold(tmp_path: Path, spoil: str, said: str) -> None:
    store = make_run(tmp_path, spoil)
    code, lines = tune_verify(str(store.path), "--sanitizer", "no")
    assert code == 1
    assert [line["class"] for line in lines[:-1]] == ["ok", said]
    assert (lines[-1]["verified"], lines[-1]["kernels"]) == (1, 2)


def test_small_launch_runs_a_run_and_an_export(right: RunStore, tmp_path: Path) -> None:
    from tuner.subjects import subjects_of

    export(right, tmp_path / "out")
    for target in (right.path, tmp_path / "out"):
        for subject in subjects_of(target):
            command = [sys.executable, "-m", "tuner.evaluate.small_launch", str(target)]
            env = os.environ | {
                "PYTHONPATH": os.pathsep.join(sys.path), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
            }  # fmt: skip
            done = subprocess.run(
                [*command, subject.kernel], env=env, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
