"""From text to cubin: each stage refuses with its own class, and the gate is asked once a tile."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.errors import CompileError, PlanError, ToolchainMissing
from codegen.kernel import KernelSource
from llm_proposer.builtin import sketches
from llm_proposer.seeds import seeds
from runs.record import Broken, Rejected, Stage, TrialClass
from space.constraints import space_for
from space.gpu import gpu_named
from space.params import Point
from space.variant import DType, Problem
from tuner import build as module
from tuner.build import build
from tuner.job import Built, CompileJob

PROBLEM = Problem("mha", DType.FP16, 64, 64, True)
GPU = gpu_named("a100")
POINT = seeds(PROBLEM, GPU, space_for(PROBLEM, GPU))[0]
TEXT = next(iter(sketches("mha", True).values()))


def job(text: str = TEXT, point: Point = POINT, cache: Path | None = None) -> CompileJob:
    return CompileJob(text, PROBLEM, point, "a100", "sm_80", cache)


def test_right_sketch_is_built(tmp_path: Path) -> None:
    built = build(job(cache=tmp_path))
    assert isinstance(built, Built), built
    assert built.cubin.arch == "sm_80"
    assert built.cubin.image[:4] == b"\x7fELF"
    assert built.cubin.source_digest == built.source.digest


def test_text_that_does_not_parse_is_an_invalid_proposal() -> None:
    outcome = build(job("Copy Q from nowhere to shared\n"))
    assert isinstance(outcome, Rejected)
    assert (outcome.trial_class, outcome.stage) == (TrialClass.INVALID_PROPOSAL, Stage.PARSE)
    assert "line 1" in outcome.reason


def test_text_that_does_not_bind_is_an_invalid_proposal() -> None:
    outcome = build(job(TEXT.replace("Q, K.T", "Q, K")))
    assert isinstance(outcome, Rejected)
    assert outcome.trial_class is TrialClass.INVALID_PROPOSAL
    assert outcome.stage is Stage.BIND


def test_program_that_computes_something_else_is_never_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.nvrtc, "compile_source", None)
    text = TEXT.replace("  Compute Mask S, causal\n", "  Compute Mask S, window(3, 0)\n")
    outcome = build(job(text))
    assert isinstance(outcome, Rejected)
    assert (outcome.trial_class, outcome.stage) == (TrialClass.WRONG_OUTPUT, Stage.CHECK)


def test_gate_is_asked_once_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(module, "_gated", {})
    monkeypatch.setattr(module.gate, "fault", lambda *a: asked.append(a))
    monkeypatch.setattr(module.nvrtc, "compile_source", _refuse)
    for stages in (1, 2):
        build(job(point=POINT.replace(stages=stages)))
    assert len(asked) == 1
    build(job(point=POINT.replace(BN=32)))
    assert len(asked) == 2


def _refuse(source: KernelSource, arch: str, cache: Path | None) -> None:
    raise CompileError("note\nkernel.cu(3): error: no such atom\nnote", source)


def test_compile_error_keeps_the_lines_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.nvrtc, "compile_source", _refuse)
    outcome = build(job())
    assert outcome == Rejected(
        TrialClass.COMPILE_ERROR, Stage.COMPILE, "kernel.cu(3): error: no such atom"
    )


def test_limit_of_the_back_end_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PlanError("S wants 300 registers, 255 there")

    monkeypatch.setattr(module.cute, "translate", refuse)
    outcome = build(job())
    assert outcome == Rejected(TrialClass.TOO_LARGE, Stage.PLAN, "S wants 300 registers, 255 there")


def test_missing_compiler_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ToolchainMissing("pip install nvidia-cuda-nvrtc")

    monkeypatch.setattr(module.nvrtc, "compile_source", refuse)
    assert build(job()) == Broken(Stage.COMPILE, "pip install nvidia-cuda-nvrtc")
