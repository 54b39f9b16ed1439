"""The real compile processes and the model end to end; the device's part with a fake judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
from fake_machine import FULL, FakeMachine, build, done

from runs.record import (
    REJECTED_IN_FINAL,
    Basis,
    Finalist,
    Measured,
    Note,
    Outcome,
    Rejected,
    RunSpec,
    Stage,
    Timing,
    TrialClass,
)
from runs.store import RunStore
from space.gpu import GPUS
from space.variant import Shape
from tuner.cli import main
from tuner.drift import EVERY
from tuner.errors import MachineError
from tuner.finish import choose, contenders
from tuner.job import EvalJob, FinalsJob, FinalsResult, PeerKernelsJob, Reading
from tuner.lanes import Candidate
from tuner.pools import CompilePool
from tuner.session import Machine
from tuner.worker import WorkerUnavailable
from tuner.workshop import Builder, DeviceWorkshop, export_into, open_workshop

SHAPE = "1,16,16,4096,4096,192,128"
WRONG = Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, "hidden shape 3")


def no_device() -> Machine:
    return Machine((), open_workshop, export_into)


# ---- predicted, for real -----------------------------------------------------------------------


def test_the_main_job_without_a_gpu_ends_in_an_exported_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    args = ["--variant", "mla", "--gpu", "l40s", "--budget", "3", "--shapes", SHAPE, "--causal"]
    assert main([*args, "--runs-dir", str(tmp_path / "runs")], no_device()) == 0
    (run,) = (tmp_path / "runs").iterdir()
    manifest = json.loads((run / "export" / "manifest.json").read_text())
    assert "predicted" in json.dumps(manifest)
    assert list((run / "export" / "kernels").glob("*.cubin"))
    for record in RunStore.open(run).replay().history:
        assert isinstance(record.outcome, Measured)
        assert record.outcome.error_ratio is None
        assert {t.basis for t in record.outcome.timings} == {Basis.PREDICTED}
        assert record.resources[0].registers > 32
        assert record.compile_s > 0
    again = tmp_path / "again"
    assert main(["export", str(run), "--out", str(again)]) == 0
    assert (again / "manifest.json").exists()
    assert "predicted" in capsys.readouterr().out


def test_a_missing_compiler_is_exit_code_3_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tuner.workshop
    from codegen.errors import ToolchainMissing

    def absent() -> None:
        raise ToolchainMissing("CuTe headers not found; pip install nvidia-cutlass==4.2.0.0")

    monkeypatch.setattr(tuner.workshop, "find_headers", absent)
    runs = tmp_path / "runs"
    args = ["--variant", "mha", "--gpu", "t4", "--budget", "3", "--runs-dir", str(runs)]
    assert main(args, no_device()) == 3
    assert "pip install nvidia-cutlass" in capsys.readouterr().err
    assert not runs.exists()


# ---- measured, with a fake judge ---------------------------------------------------------------


class FakeJudges:
    """Answers jobs; trials in `bad` fail the final timing."""

    def __init__(self, bad: Sequence[int] = (), lost: bool = False) -> None:
        self.bad = set(bad)
        self.lost = lost
        self.evals: list[EvalJob] = []
        self.finals_jobs: list[FinalsJob] = []

    def submit(self, job: EvalJob) -> Future[Outcome]:
        self.evals.append(job)
        us = 100.0 - len(self.evals)
        timings = (Timing(s, us, us - 1, us + 1, 9, Basis.MEASURED) for s in job.shapes)
        return done(Measured(tuple(timings), 1.0))

    def finals(self, job: FinalsJob) -> Future[FinalsResult]:
        self.finals_jobs.append(job)
        if self.lost:
            future: Future[FinalsResult] = Future()
            future.set_exception(WorkerUnavailable("no context\non this device"))
            return future
        finalists = [
            Finalist(
                s, e.trial, f"trial {e.trial}", Timing(s, 50.0, 49.0, 51.0, 25, Basis.MEASURED)
            )
            for e in job.entries
            for s in e.shapes
            if e.trial not in self.bad
        ]
        finalists += [
            Finalist(s, None, "fa2", Timing(s, 60.0, 59.0, 61.0, 25, Basis.MEASURED))
            for s in job.shapes
        ]
        rejected = tuple((e.trial, WRONG) for e in job.entries if e.trial in self.bad)
        readings = tuple(Reading(s, 1980, 2600, 40, 650.5, "power cap", 1) for s in job.shapes)
        return done(FinalsResult(tuple(finalists), (), rejected, "1980 MHz, 40 C", readings))

    def facts(self) -> Future[tuple[Note, ...]]:
        return done((Note("device", (("device", "NVIDIA A100-SXM4-80GB"),)),))

    def peer_kernels(self, job: PeerKernelsJob) -> Future[tuple[tuple[str, str], ...]]:
        return done((("fa2", "flash_fwd_kernel"), ("cudnn", "")))

    def close(self) -> None:
        pass


class IdlePool(CompilePool):
    """Starts no process."""

    def __init__(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    """A measured run of twelve trials by the fake machine, opened to write."""
    sketch = tmp_path / "s.tl"
    sketch.write_text(FULL)
    args = ["--variant", "mla", "--gpu", "a100", "--shapes", SHAPE, "--sketch", str(sketch)]
    args += ["--budget", "12", "--runs-dir", str(tmp_path / "runs")]
    assert main(args, FakeMachine(("NVIDIA A100-SXM4-80GB",)).machine()) == 0
    (run,) = (tmp_path / "runs").iterdir()
    return RunStore.open(run, write=True)


def shop(spec: RunSpec, judges: FakeJudges) -> DeviceWorkshop:
    return DeviceWorkshop(Builder(IdlePool(), 1, GPUS["a100"], spec), judges, spec)


def test_a_finalist_that_fails_makes_room_for_the_next_best(store: RunStore) -> None:
    entries = contenders(store.spec, store.replay().history)
    bad = [e.record.index for e in entries]
    judges = FakeJudges(bad)
    found = shop(store.spec, judges).finals(store.spec, store, entries)
    assert len(judges.finals_jobs) == 2
    named = {f.trial for f in found if f.trial is not None}
    assert named and not named & set(bad)
    notes = [n.as_dict() for n in store.replay().notes if n.topic == REJECTED_IN_FINAL]
    assert sorted(int(str(n["trial"])) for n in notes) == sorted(bad)
    assert {n["reason"] for n in notes} == {"hidden shape 3"}
    assert not set(bad) & {r.index for r in store.replay().sound}


def test_finals_record_conditions_and_what_ran_behind_a_peers_name(store: RunStore) -> None:
    entries = contenders(store.spec, store.replay().history)
    shop(store.spec, FakeJudges()).finals(store.spec, store, entries)
    notes = {n.topic: n.as_dict() for n in store.replay().notes}
    assert notes["conditions"]["after"] == "1980 MHz, 40 C"
    assert notes["final_conditions"] == {
        "problem": entries[0].record.problem.key, "shape": store.spec.shapes[0].key,
        "sm_clock_mhz": 1980, "memory_clock_mhz": 2600, "temperature_c": 40, "power_w": 650.5,
        "throttle": "power cap", "redone": 1,
    }  # fmt: skip
    assert notes["peer_kernels"]["fa2"] == "flash_fwd_kernel"
    assert "cudnn" not in notes["peer_kernels"]


def test_trials_after_the_first_know_the_best_times(store: RunStore) -> None:
    judges = FakeJudges()
    bench = shop(store.spec, judges)
    record = store.replay().history.records[0]
    candidate = Candidate(record.sketch, FULL, record.problem, record.point, "first")
    for _ in range(2):
        bench.judge(candidate, build(candidate)).result()
    shape: Shape = store.spec.shapes[0]
    assert [j.best_us for j in judges.evals] == [(), ((shape, 99.0),)]


def test_first_kernel_is_timed_again_and_the_drift_is_recorded(store: RunStore) -> None:
    judges = FakeJudges()
    bench = shop(store.spec, judges)
    record = store.replay().history.records[0]
    candidate = Candidate(record.sketch, FULL, record.problem, record.point, "first")
    for _ in range(EVERY):
        bench.judge(candidate, build(candidate)).result()
    assert len(judges.evals) == EVERY + 1
    assert judges.evals[-1].source == judges.evals[0].source
    bench.finals(store.spec, store, contenders(store.spec, store.replay().history))
    (note,) = [n.as_dict() for n in store.replay().notes if n.topic == "drift"]
    assert note["trials"] == EVERY
    assert note["median_ratio"] == round((100 - EVERY - 1) / 99, 4)


def test_a_lost_worker_is_one_line(store: RunStore) -> None:
    with pytest.raises(MachineError, match="no context on this device"):
        shop(store.spec, FakeJudges(lost=True)).peers(store.spec)


def test_a_disturbed_time_is_no_tie_with_a_steady_one() -> None:
    """An interval that another process made wide meets every other."""
    shape = Shape(1, 1, 1, 64, 64, 64, 64)

    def chosen(*times: tuple[float, float, float]) -> list[str]:
        finalists = [
            Finalist(shape, n, f"trial {n}", Timing(shape, *us, 25, Basis.MEASURED))
            for n, us in enumerate(times)
        ]
        return [f.name for f in choose(finalists) if f.chosen]

    steady = (100.0, 99.0, 101.0)
    assert chosen((150.0, 100.5, 300.0), steady) == ["trial 1"]
    assert chosen((101.5, 100.5, 103.0), steady) == ["trial 0"]
