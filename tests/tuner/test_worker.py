"""Murdering the worker: each way costs one job, is named, and the next job works."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from killers import Killer, Sum

from codegen.kernel import KernelSource
from runs.record import Broken, Measured, Outcome, Rejected, Stage, TrialClass
from space.variant import DType, Problem
from tuner.job import Entry, EvalJob, FinalsJob, FinalsResult, KernelCanary
from tuner.worker import JobFailed, Supervisor, Worker, WorkerLost, WorkerUnavailable, environment

PROBLEM = Problem("mha", DType.FP16, 64, 64, False)
SOURCE = KernelSource("", "sm_80", (), ())
JOB = EvalJob(PROBLEM, SOURCE, b"", (), 0)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(None)
    yield worker
    worker.close()


@pytest.mark.parametrize(
    ("how", "trial_class", "said"),
    [
        ("abort", TrialClass.CRASHED, "SIGABRT"),
        ("segfault", TrialClass.CRASHED, "SIGSEGV"),
        ("kill", TrialClass.CRASHED, "SIGKILL"),
        ("exit", TrialClass.CRASHED, "exit code 3"),
        ("closed", TrialClass.CRASHED, "died"),
        ("garbage", TrialClass.CRASHED, "garbled"),
        ("foreign", TrialClass.CRASHED, "not one of ours"),
        ("sleep", TrialClass.TIMEOUT, "within 0.5 s"),
    ],
)
def test_loss_is_named_and_next_job_works(
    worker: Worker, how: str, trial_class: TrialClass, said: str
) -> None:
    worker.run(Sum(1, 1))
    before = worker.pid
    with pytest.raises(WorkerLost, match=said) as lost:
        worker.run(Killer(how, limit_s=0.5 if how == "sleep" else 20.0))
    assert lost.value.trial_class is trial_class
    assert worker.run(Sum(2, 3)) == 5
    assert worker.pid != before


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "ValueError: a plain fault"),
        ("unpicklable", "holds a lambda"),
        ("lambda", "pickle"),
    ],
)
def test_fault_of_the_job_costs_no_worker(worker: Worker, how: str, said: str) -> None:
    worker.run(Sum(1, 1))
    before = worker.pid
    with pytest.raises(JobFailed, match=said):
        worker.run(Killer(how))
    assert worker.pid == before


def test_words_on_stdout_do_not_disturb(worker: Worker) -> None:
    assert isinstance(worker.run(Killer("print")), Rejected)


def test_hung_worker_is_gone_after_the_limit(worker: Worker) -> None:
    worker.start()
    pid = worker.pid
    assert pid is not None
    with pytest.raises(WorkerLost):
        worker.run(Killer("sleep", limit_s=0.2))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_worker_dies_with_its_parent() -> None:
    code = (
        "from tuner.worker import Worker; import os; w = Worker(None); w.start();"
        "print(w.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(None), capture_output=True, check=True
    )
    pid = int(done.stdout)
    for _ in range(50):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError(f"worker {pid} outlives its parent")


def test_worker_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.worker.ENTRY", "import no_such_module")
    worker = Worker(None)
    with pytest.raises(WorkerUnavailable, match=r"did not start: .*no_such_module"):
        worker.run(Sum(1, 2))
    worker.close()


def test_environment_shows_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment(2)["CUDA_VISIBLE_DEVICES"] == "2"
    assert environment(None)["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert environment(1)["CUDA_VISIBLE_DEVICES"] == "7"


# ---- blame -------------------------------------------------------------------------------------


@dataclass
class Scripted:
    """A worker that answers by script: an exception is raised, anything else returned."""

    script: list[object]
    jobs: list[object]

    def run(self, job: object) -> object:
        self.jobs.append(job)
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def judged(*script: object) -> tuple[Outcome, Scripted]:
    worker = Scripted(list(script), [])
    outcome = Supervisor(worker).judge(JOB)  # type: ignore[arg-type]
    return outcome, worker


LOST = WorkerLost(TrialClass.CRASHED, "an illegal memory access was encountered")


def test_loss_with_singing_canary_is_the_kernels() -> None:
    outcome, _ = judged(LOST, True)
    assert outcome == Rejected(TrialClass.CRASHED, Stage.LAUNCH, str(LOST))


@pytest.mark.parametrize("canary", [False, LOST, JobFailed("x"), WorkerUnavailable("no GPU")])
def test_loss_with_dead_canary_is_the_machines(canary: object) -> None:
    outcome, _ = judged(LOST, canary)
    assert isinstance(outcome, Broken)
    assert "illegal memory access" in outcome.reason


@pytest.mark.parametrize("fault", [JobFailed("KeyError: x"), WorkerUnavailable("no GPU")])
def test_fault_of_the_program_is_broken(fault: Exception) -> None:
    outcome, worker = judged(fault)
    assert isinstance(outcome, Broken)
    assert len(worker.jobs) == 1


def test_last_right_kernel_becomes_the_canary() -> None:
    worker = Scripted([Measured((), 1.0), LOST, True], [])
    supervisor = Supervisor(worker)  # type: ignore[arg-type]
    supervisor.judge(JOB)
    assert isinstance(supervisor.judge(JOB), Rejected)
    assert worker.jobs[2] == KernelCanary(PROBLEM, SOURCE, b"")


def test_finals_leave_out_the_trial_that_costs_the_worker() -> None:
    entries = tuple(Entry(t, SOURCE, b"", ()) for t in (3, 5))
    job = FinalsJob(PROBLEM, entries, (), 0)
    empty = FinalsResult(())
    worker = Scripted([LOST, empty, LOST, empty], [])
    result = Supervisor(worker).finals(job)  # type: ignore[arg-type]
    assert [trial for trial, _ in result.rejected] == [5]
    last = worker.jobs[-1]
    assert isinstance(last, FinalsJob)
    assert [e.trial for e in last.entries] == [3]
    assert last.with_peers


def test_finals_of_peers_alone_raise() -> None:
    worker = Scripted([LOST], [])
    with pytest.raises(WorkerLost):
        Supervisor(worker).finals(FinalsJob(PROBLEM, (), (), 0))  # type: ignore[arg-type]
