"""The real cases: in the interpreter where they are small, on the GPU where there is one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch

from space.gpu import gpu_named
from space.variant import DType, Phase, Problem
from tests.cases import run
from tests.cases.case import DATA, DECODE, LAYOUT, PLANNED, Case, load, out_of_scope, work
from tests.cases.exporting import export_cases, problems
from tests.cases.runners import ExportRunner, InterpreterRunner, KernelRunner
from tests.cases.verdict import FAIL, NOT_IN_SCOPE, PASS, Verdict
from tuner.devices import device_names
from tuner.evaluate.launch import LaunchError

CASES = {case.id: case for case in load()}
QUICK_WORK = 1 << 27


def small(case: Case) -> bool:
    """Whether the interpreter runs the case in about a second."""
    if out_of_scope(case) is not None or case.kind in (*PLANNED, "guard"):
        return False
    if isinstance(case.raw["heads_kv"], dict):
        return False
    return max(work(check) for check in case.checks()) <= QUICK_WORK


SMALL = [case.id for case in CASES.values() if small(case)]
PLANNED_CASES = [case.id for case in CASES.values() if case.kind in PLANNED]


def test_every_case_is_there_and_understood() -> None:
    assert len(CASES) == 64
    for case in CASES.values():
        if out_of_scope(case) is None and case.kind not in PLANNED:
            assert case.raw["input_distribution"] in DATA, case.id
            assert case.raw["layout_stride_notes"] in LAYOUT, case.id


def test_what_is_left_out_is_left_out_for_a_known_reason() -> None:
    reasons = Counter(filter(None, map(out_of_scope, CASES.values())))
    assert reasons == {
        "fp32 operands": 2,
        "mask 'additive [0,-1]'": 1,
    }


@pytest.mark.parametrize("name", SMALL)
def test_interpreter(name: str) -> None:
    verdict = run.judge(CASES[name], InterpreterRunner())
    assert verdict.state == PASS, verdict.why


def test_decode_cases_are_run_as_decode() -> None:
    assert set(CASES) >= DECODE
    for name in DECODE:
        phases = [p.phase for p, _ in CASES[name].runs()]
        assert Phase.DECODE in phases
        assert (Phase.PREFILL in phases) == (CASES[name].raw["head_dim_v"] != 512)
    splits = [(c.splits, c.counts) for p, c in CASES["splitkv-fp32-partials"].runs() if c.splits]
    assert splits == [(n, (keys,)) for keys in (8192, 100) for n in (1, 2, 7, 64)]


def test_splits_of_the_interpreter_all_agree() -> None:
    case = CASES["splitkv-fp32-partials"]
    shorter = dataclasses.replace(case, raw={**case.raw, "seqlen_k": 1000})
    verdict = run.judge(shorter, InterpreterRunner())
    assert verdict.state == PASS, verdict.why


@pytest.mark.parametrize("name", PLANNED_CASES)
def test_planner(name: str) -> None:
    verdict = run.judge(CASES[name], InterpreterRunner())
    assert verdict.state == PASS, verdict.why


def test_enough_cases_fit_the_interpreter() -> None:
    assert len(SMALL) >= 20
    assert {"causal-br-5x2", "bf16-huge-equal", "tail-logits-very-negative"} <= set(SMALL)


def test_a_wrong_scale_fails() -> None:
    case = CASES["headdim-40"]
    wrong = dataclasses.replace(case, raw={**case.raw, "scale": 0.0})

    class PaddedScale(InterpreterRunner):
        def prepare(self, problem, window):  # type: ignore[no-untyped-def]
            inner = super().prepare(problem, window)
            return lambda q, k, v, out, scale: inner(q, k, v, out, 1 / 8)

    assert run.judge(wrong, PaddedScale()).state == FAIL


def test_the_script_prints_one_line_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--runner", "interpreter", "--only", "causal-br-2x5,finfo-min-bias-row"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("causal-br-2x5: pass")
    assert lines[1] == "finfo-min-bias-row: not in scope (fp32 operands)"
    assert lines[2] == "1 pass, 0 fail, 1 not in scope"


def test_verdict_reads_well() -> None:
    assert str(Verdict(NOT_IN_SCOPE, "fp32 operands")) == "not in scope (fp32 operands)"
    assert str(Verdict(PASS)) == "pass"


def test_every_case_in_scope_has_its_kernel_in_the_export() -> None:
    wanted = problems(CASES.values(), gpu_named("h200"))
    assert len(wanted) > 15
    assert {p.dtype for p in wanted} == set(DType)
    assert {p.causal for p in wanted} == {False, True}
    assert {p.page for p in wanted if p.phase is Phase.DECODE and p.latent} == {0, 16}


def test_export_runner_says_what_a_folder_is_not_made_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Problem("mha", DType.FP16, 40, 40, False)
    monkeypatch.setattr("tests.cases.exporting.problems", lambda cases, gpu: (here,))
    folder = export_cases(CASES.values(), gpu_named("h200"), tmp_path)
    runner = ExportRunner(folder)
    assert callable(runner.prepare(here, None))
    verdict = run.judge(CASES["causal-br-2x5"], runner)
    assert verdict.state == NOT_IN_SCOPE
    assert "no kernel of mha-" in verdict.why


def test_export_runner_hands_refusals_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Problem("mha", DType.FP16, 40, 40, False)
    monkeypatch.setattr("tests.cases.exporting.problems", lambda cases, gpu: (here,))
    runner = ExportRunner(export_cases(CASES.values(), gpu_named("h200"), tmp_path))
    q = torch.zeros(1, 8, 2, 40).half()
    with pytest.raises(LaunchError, match="run on CUDA devices"):
        runner.prepare(here, None)(q, q, q, torch.empty_like(q), 0.1)()


@pytest.fixture(scope="module")
def kernels() -> KernelRunner:
    return KernelRunner()


@pytest.fixture(scope="module")
def exported(kernels: KernelRunner, tmp_path_factory: pytest.TempPathFactory) -> ExportRunner:
    return ExportRunner(export_cases(CASES.values(), kernels.gpu, tmp_path_factory.mktemp("cases")))


@pytest.mark.gpu
@pytest.mark.skipif(not device_names(), reason="no CUDA device")
@pytest.mark.parametrize("name", [c.id for c in CASES.values() if c.raw["size"] == "small"])
def test_export(exported: ExportRunner, name: str) -> None:
    verdict = run.judge(CASES[name].quick(), exported)
    assert verdict.state != FAIL, verdict.why


@pytest.mark.gpu
@pytest.mark.skipif(not device_names(), reason="no CUDA device")
@pytest.mark.parametrize("name", [c.id for c in CASES.values() if c.raw["size"] == "small"])
def test_gpu(kernels: KernelRunner, name: str) -> None:
    verdict = run.judge(CASES[name].quick(), kernels)
    assert verdict.state != FAIL, verdict.why
