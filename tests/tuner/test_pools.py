"""The pools survive what happens in them: one job is lost, the others are answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import pytest
from builders import scripted
from killers import Killer

from codegen.kernel import Cubin, KernelSource, Launch, Resources
from runs.record import Broken, Note, Outcome, Rejected, Stage, TrialClass
from space.gpu import gpu_named
from space.params import Point
from space.variant import DType, Problem
from tuner.build import too_large
from tuner.job import Built, CompileJob, EvalJob, FactsJob
from tuner.pools import CompilePool, GpuPool
from tuner.worker import JobFailed, Worker, WorkerLost, WorkerUnavailable

PROBLEM = Problem("mha", DType.FP16, 64, 64, False)
POINT = Point.of({"BM": 64})


def job(text: str, limit_s: float = 30.0) -> CompileJob:
    return CompileJob(text, PROBLEM, POINT, "h200", "sm_90a", limit_s=limit_s)


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    pool = CompilePool(2, scripted)
    yield pool
    pool.close()


def test_build_is_answered_from_a_process_without_a_device(pool: CompilePool) -> None:
    built = pool.submit(job("fine")).result(60)
    assert isinstance(built, Built)
    assert built.cubin.log == "'' 1"


def test_rejection_passes_through(pool: CompilePool) -> None:
    outcome = pool.submit(job("reject")).result(60)
    assert outcome == Rejected(TrialClass.TOO_LARGE, Stage.PLAN, "too large")


def test_crash_costs_one_job(pool: CompilePool) -> None:
    futures = [pool.submit(job(t)) for t in ("fine", "abort", "fine", "fine")]
    outcomes = [f.result(60) for f in futures]
    assert [type(o) for o in outcomes] == [Built, Rejected, Built, Built]
    crashed = outcomes[1]
    assert isinstance(crashed, Rejected)
    assert crashed.trial_class is TrialClass.COMPILE_ERROR
    assert "died" in crashed.reason


def test_timeout_costs_one_job(pool: CompilePool) -> None:
    slow, fine = pool.submit(job("sleep 60", limit_s=0.5)), pool.submit(job("fine"))
    outcome = slow.result(60)
    assert isinstance(outcome, Rejected)
    assert outcome.trial_class is TrialClass.COMPILE_TIMEOUT
    assert "0.5 s" in outcome.reason
    assert isinstance(fine.result(60), Built)
    assert isinstance(pool.submit(job("fine")).result(60), Built)


def test_fault_of_the_program_is_broken(pool: CompilePool) -> None:
    outcome = pool.submit(job("raise")).result(60)
    assert outcome == Broken(Stage.COMPILE, "KeyError: 'no such layout'")


def test_close_does_not_wait_for_what_runs() -> None:
    pool = CompilePool(1, scripted)
    pool.submit(job("fine")).result(60)
    running, waiting = pool.submit(job("sleep 60")), pool.submit(job("fine"))
    time.sleep(0.3)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 20
    assert waiting.cancelled()
    assert not isinstance(running.result(1), Built)


# ---- GPU pool ----------------------------------------------------------------------------------

SOURCE = KernelSource("", "sm_80", (), ())


class FakeWorker(Worker):
    """Answers a job with its own device index; `FactsJob` meets a script."""

    script: list[Exception]

    def __init__(self, device: int) -> None:
        super().__init__(None)
        self.index = device
        self.at_work = threading.Event()

    def start(self) -> None:
        if self.index == 9:
            raise WorkerUnavailable("the GPU worker did not start: no GPU")

    def run(self, job: Any) -> Any:
        self.start()
        if isinstance(job, FactsJob):
            return (Note("device", (("index", self.index),)),)
        time.sleep(0.05)
        if job.seed == 13:
            raise JobFailed("KeyError: x")
        return Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, f"device {self.index}")


def trial(seed: int = 0) -> EvalJob:
    return EvalJob(PROBLEM, SOURCE, b"", (), seed)


def test_jobs_go_to_every_gpu() -> None:
    pool = GpuPool([0, 1], FakeWorker)
    futures = [pool.submit(trial()) for _ in range(8)]
    said = {f.result(20).reason for f in futures}  # type: ignore[union-attr]
    pool.close()
    assert said == {"device 0", "device 1"}


def test_facts_come_from_a_worker() -> None:
    pool = GpuPool([0], FakeWorker)
    assert pool.facts().result(20)[0].topic == "device"
    pool.close()


def test_gpu_that_does_not_start_breaks_trials_not_the_pool() -> None:
    pool = GpuPool([9], FakeWorker)
    outcome: Outcome = pool.submit(trial()).result(20)
    assert isinstance(outcome, Broken) and "no GPU" in outcome.reason
    with pytest.raises(WorkerUnavailable):
        pool.facts().result(20)
    pool.close()


def test_fault_in_a_trial_is_broken() -> None:
    pool = GpuPool([0], FakeWorker)
    assert isinstance(pool.submit(trial(13)).result(20), Broken)
    pool.close()


def test_close_kills_a_worker_that_another_thread_waits_for() -> None:
    worker = Worker(None)
    worker.start()
    ended: list[Exception] = []

    def drive() -> None:
        try:
            worker.run(Killer("sleep", limit_s=60.0))
        except (WorkerLost, WorkerUnavailable) as lost:
            ended.append(lost)

    thread = threading.Thread(target=drive)
    thread.start()
    time.sleep(0.3)
    worker.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(ended) == 1
    with pytest.raises(WorkerUnavailable, match="closed"):
        worker.run(Killer("print"))


def test_closed_pool_cancels_what_waits() -> None:
    pool = GpuPool([0], FakeWorker)
    futures = [pool.submit(trial()) for _ in range(20)]
    wait(futures[:1])
    pool.close()
    assert any(f.cancelled() for f in futures)


# ---- limits after the compile ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "smem", "registers", "said"),
    [
        ("t4", 65536, 64, None),
        ("t4", 65552, 64, "65552 bytes of shared memory wanted, 65536 there"),
        ("l40s", 101376, 255, None),
        ("l40s", 131072, 64, "131072 bytes of shared memory wanted, 101376 there"),
        ("h200", 1024, 300, "300 registers x 256 threads = 76800, 65536 there"),
    ],
)
def test_too_large_names_both_numbers(
    gpu: str, smem: int, registers: int, said: str | None
) -> None:
    launch = Launch("attention", 256, smem, (), ())
    source = KernelSource("", "sm_80", (launch,), ())
    used = (Resources("attention", registers, 0, 0, 0, 0),)
    cubin = Cubin(b"", "sm_80", "", "", "", used, 0.0, "13.0")
    found = too_large(source, cubin, gpu_named(gpu))
    assert (found is None) if said is None else (found is not None and said in found)
