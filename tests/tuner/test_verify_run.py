"""`tune verify`: what it finds in a run and in an export, its verdicts, lines and exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from fake_worker import FakeWorker

from runs.record import Rejected, Stage, TrialClass
from space.variant import DType, Problem, Shape
from tests.tuner.evaluate import fakes
from tests.tuner.evaluate.scripted_clock import ScriptedClock
from tuner.cli import main
from tuner.commands.verify import run_verify
from tuner.errors import MachineError, NothingFound, UsageError
from tuner.evaluate.checks import RATIOS, VERIFY_DATA, VERIFY_LAYOUTS, verify_checks
from tuner.evaluate.judge import Judge
from tuner.evaluate.last_exam import examine
from tuner.sanitizer import installed
from tuner.subjects import Subject, Verified, subjects_of
from tuner.verify import VerifyJob, plan, verdicts
from tuner.worker import JobFailed, WorkerLost

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
from exported import CAUSAL, FULL, LONG, SHAPES, problem

H200 = ("NVIDIA H200",)
WRONG = Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, "hidden 3: 0 at\n[b, s, h, d] (0, 1, 2, 3)")
CPU = torch.device("cpu")


# ---- what is there -----------------------------------------------------------------------------


def test_kernels_of_a_run(run: Path) -> None:
    found = subjects_of(run)
    assert [(s.name, s.shapes, s.gpu, s.exported) for s in found] == [
        ("gqa-fp16-d16-full trial 0", (FULL, LONG), "h200", False),
        ("gqa-fp16-d16-causal trial 1", (CAUSAL,), "h200", False),
    ]


def test_kernels_of_an_export(folder: Path) -> None:
    found = subjects_of(folder)
    assert [(s.shapes, s.problem, s.exported) for s in found] == [
        ((FULL, LONG), problem(FULL), True),
        ((CAUSAL,), problem(CAUSAL), True),
    ]


def test_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a run"):
        subjects_of(tmp_path)


def test_damaged_cubin_of_an_export_is_refused(folder: Path) -> None:
    next((folder / "kernels").glob("*.cubin")).write_bytes(b"other")
    with pytest.raises(UsageError, match="digest differs"):
        subjects_of(folder)


def test_run_without_a_right_kernel(tmp_path: Path) -> None:
    from records import SPEC

    from runs.store import RunStore

    with RunStore.create(tmp_path, SPEC) as store:
        pass
    with pytest.raises(NothingFound):
        subjects_of(store.path)


def test_machine_without_the_gpu(run: Path) -> None:
    with pytest.raises(MachineError, match="kernels for H200 and this machine has NVIDIA L40S"):
        plan(run, 1, "auto", ("NVIDIA L40S",))


# ---- verdicts ----------------------------------------------------------------------------------


def test_every_kernel_gets_a_process_of_its_own(run: Path) -> None:
    worker = FakeWorker(lambda s: Verified(40, 1.25))
    found = list(verdicts(plan(run, 7, "no", H200), worker))
    assert all(v.holds for v in found)
    assert (worker.started, worker.closed) == (2, 2)


def test_kernel_that_costs_the_worker_is_to_blame_when_the_device_is_well(run: Path) -> None:
    lost = WorkerLost(TrialClass.CRASHED, "illegal address")
    (first, _) = verdicts(plan(run, 7, "no", H200), FakeWorker(lambda s: lost))
    assert first.outcome == Rejected(TrialClass.CRASHED, Stage.LAUNCH, "illegal address")
    with pytest.raises(MachineError, match="does not answer"):
        list(verdicts(plan(run, 7, "no", H200), FakeWorker(lambda s: lost, lost)))
    with pytest.raises(MachineError, match="adds up wrongly"):
        list(verdicts(plan(run, 7, "no", H200), FakeWorker(lambda s: lost, False)))


def test_fault_of_the_judge_is_no_verdict(run: Path) -> None:
    worker = FakeWorker(lambda s: JobFailed("MemoryError: no"))
    with pytest.raises(MachineError, match="trial 0: MemoryError"):
        list(verdicts(plan(run, 7, "no", H200), worker))
    assert worker.closed == 1


def test_lines(folder: Path) -> None:
    def answer(subject: Subject) -> object:
        return WRONG if subject.problem.causal else Verified(40, 1.25)

    (folder / "attention.py").write_text("import os\n")
    out: list[str] = []
    assert not run_verify(folder, 7, "auto", False, out.append, H200, FakeWorker(answer))
    assert out[0] == "seed 7: see the same problems again with --seed 7"
    assert "compute-sanitizer is not installed" in out[1] or installed()
    assert any(line.startswith("attention.py: not as this version exports") for line in out)
    assert out[-3].endswith(
        "ok, 40 problems and 2 tuned shapes among them, error at most 1.25 of plain attention's"
    )
    assert out[-2].endswith(": wrong_output: hidden 3: 0 at [b, s, h, d] (0, 1, 2, 3)")
    assert out[-1] == "1 of 2 kernels hold"


def test_json(run: Path) -> None:
    out: list[str] = []
    worker = FakeWorker(lambda s: Verified(40, 1.25))
    assert run_verify(run, 7, "no", True, out.append, H200, worker)
    first, _, last = map(json.loads, out)
    assert (first["class"], first["problems"], first["holds"]) == ("ok", 40, True)
    assert first["shapes"] == [FULL.key, LONG.key]
    assert last == {
        "verified": 2, "kernels": 2, "seed": 7, "sanitizer": "off", "strange_files": [],
    }  # fmt: skip


def test_seed_is_new_each_time_and_kept_when_given(run: Path) -> None:
    assert plan(run, None, "no", H200).seed != plan(run, None, "no", H200).seed
    assert plan(run, 5, "no", H200).seed == 5


@pytest.mark.parametrize(
    ("answer", "code"), [(Verified(40, 1.0), 0), (WRONG, 1), (JobFailed("no"), 3)]
)
def test_exit_codes(
    run: Path, monkeypatch: pytest.MonkeyPatch, answer: object, code: int
) -> None:  # fmt: skip
    from tuner.commands import verify as command

    worker = FakeWorker(lambda s: answer)
    monkeypatch.setattr(command, "plan", lambda t, s, z, d, r: plan(t, s, "no", H200, r))
    monkeypatch.setattr(command, "verdicts", lambda todo, make: verdicts(todo, worker))
    assert main(["verify", str(run)]) == code


def test_exit_codes_of_bad_input(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.verify.device_names", lambda: ())
    assert main(["verify", str(tmp_path / "nothing")]) == 2
    assert main(["verify", str(run), "--sanitizer", "perhaps"]) == 2
    assert main(["verify", str(run)]) == 3
    assert "this machine has no GPU" in capsys.readouterr().err


# ---- the problems ------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_every_ratio_layout_and_data_occurs(causal: bool) -> None:
    here = Problem("mla", DType.BF16, 192, 128, causal)
    tuned = (Shape(4, 16, 16, 512, 512, 192, 128, causal),)
    checks = verify_checks(here, tuned, 3)
    assert {(c.shape.heads, c.shape.kv_heads) for c in checks} >= set(RATIOS)
    assert {c.layout for c in checks} >= set(VERIFY_LAYOUTS)
    assert {c.data for c in checks} >= set(VERIFY_DATA)
    assert any(c.shape.seqlen_q == 1 for c in checks)
    assert any(c.shape.seqlen_q > c.shape.seqlen_k for c in checks)
    assert any((c.shape.seqlen_q, c.shape.seqlen_k) == (513, 513) for c in checks)
    assert all(here.serves(c.shape) for c in checks)
    assert checks == verify_checks(here, tuned, 3) != verify_checks(here, tuned, 4)


def examined(body: fakes.Body) -> Verified | Rejected:
    here = Problem("gqa", DType.FP16, 16, 16, True)
    judge = Judge(CPU, ScriptedClock(), lambda *_: None, None)  # type: ignore[arg-type,return-value]
    return examine(judge, fakes.kernel(body, True), here, (CAUSAL,), 3)


def test_right_kernel_is_verified() -> None:
    found = examined(fakes.right)
    assert isinstance(found, Verified)
    assert found.problems > 30 and 0.0 < found.error_ratio <= 2.0


def test_kernel_that_is_right_on_the_ratio_it_was_tuned_with_only() -> None:
    def right_for_three(q, k, v, out, scale, causal):  # type: ignore[no-untyped-def]
        body = fakes.right if q.shape[2] in (6, 4, 64) else fakes.zeros
        body(q, k, v, out, scale, causal)

    found = examined(right_for_three)
    assert isinstance(found, Rejected)
    assert found.reason.startswith("hidden 0: Hq=16 Hkv=2")


def test_tuned_shapes_are_judged_with_hidden_data() -> None:
    def wrong_on_the_tuned_shape(q, k, v, out, scale, causal):  # type: ignore[no-untyped-def]
        body = fakes.zeros if q.shape[:3] == (2, 65, 4) else fakes.right
        body(q, k, v, out, scale, causal)

    found = examined(wrong_on_the_tuned_shape)
    assert isinstance(found, Rejected)
    assert found.reason.startswith("timed shape 2,4,2,65,65")


def test_job_refuses_a_cubin_that_does_not_load(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    from types import SimpleNamespace

    from tuner.evaluate import subject as module
    from tuner.evaluate.launch import LaunchError

    def refuses(*_: object) -> None:
        raise LaunchError("load cubin: CUDA_ERROR_NO_BINARY_FOR_GPU")

    monkeypatch.setattr(module, "LoadedKernel", refuses)
    job = VerifyJob(subjects_of(run)[0], 1, 10.0)
    outcome = job.run(SimpleNamespace(device=CPU, judge=None))
    assert isinstance(outcome, Rejected)
    assert outcome.trial_class is TrialClass.LAUNCH_FAILED


def test_unused_shapes_are_none(run: Path) -> None:
    assert {s for subject in subjects_of(run) for s in subject.shapes} == set(SHAPES)


def test_exported_kernel_is_called_as_its_folder_calls_it(folder: Path) -> None:
    from tuner.evaluate.launch import LaunchError
    from tuner.evaluate.subject import loaded

    prepare = loaded(subjects_of(folder)[0], CPU)
    q, k = torch.zeros(1, 8, 4, 16).half(), torch.zeros(1, 8, 2, 16).half()
    with pytest.raises(LaunchError, match="run on CUDA devices"):
        prepare(q, k, k, torch.empty_like(q), 0.25)()
