"""SIGKILL of the GPU's worker at any point: every trial ends in one outcome, the next is judged."""

from __future__ import annotations

import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from fault_jobs import Canary, DeadCanary, Trial
from killers import Killer

from runs.record import Broken, Outcome, Rejected, TrialClass
from tuner.pools import GpuPool
from tuner.worker import Supervisor, Worker, WorkerUnavailable, loads

KILLS = 25


class Watched(GpuPool):
    """A pool of one worker without a GPU; its canary needs none either."""

    def __init__(self) -> None:
        super().__init__([0], lambda _: Worker(None))
        self.supervisor._canary = Canary()

    @property
    def supervisor(self) -> Supervisor:
        """The one supervisor."""
        return self._supervisors[0]

    def kill(self) -> bool:
        """Kill the worker if one is up."""
        pid = self.supervisor.worker.pid
        if pid is None:
            return False
        os.kill(pid, signal.SIGKILL)
        return True

    def judged(self, trial: Trial | Killer) -> Outcome:
        """Judge and wait."""
        return self.submit(trial).result(60)  # type: ignore[arg-type]


@pytest.fixture
def pool() -> Iterator[Watched]:
    pool = Watched()
    assert said(pool.judged(Trial(0))) == "trial 0"
    yield pool
    pool.close()


def said(outcome: Outcome) -> str:
    assert isinstance(outcome, Rejected), outcome
    return outcome.reason


def test_a_worker_killed_at_random_moments_costs_at_most_the_trial_it_ran(pool: Watched) -> None:
    rng = random.Random(7)
    stop = threading.Event()
    kills = 0

    def murder() -> None:
        nonlocal kills
        while not stop.is_set() and kills < KILLS:
            time.sleep(rng.random() * 0.4)
            kills += pool.kill()

    killer = threading.Thread(target=murder)
    killer.start()
    trials, lost = 0, 0
    try:
        while kills < KILLS:
            trials += 1
            outcome = pool.judged(Trial(trials, rng.random() * 0.1))
            if isinstance(outcome, Rejected) and outcome.reason == f"trial {trials}":
                continue
            lost += 1  # at work; with its canary too, the machine is blamed
            assert outcome.trial_class in (TrialClass.CRASHED, TrialClass.BROKEN)
    finally:
        stop.set()
        killer.join()
    assert 0 < lost <= kills < lost + trials
    assert said(pool.judged(Trial(-1))) == "trial -1"


@pytest.mark.parametrize("pause", [0.0, 0.02, 0.3])
def test_a_worker_killed_while_idle_costs_nothing(pool: Watched, pause: float) -> None:
    for number in range(3):
        assert pool.kill()
        time.sleep(pause)
        assert said(pool.judged(Trial(number))) == f"trial {number}"


def test_a_worker_killed_while_it_starts_is_the_machines_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisor = Supervisor(Worker(None))
    killer = threading.Thread(target=_kill_when_up, args=(supervisor.worker,))
    killer.start()
    outcome = supervisor.judge(Trial(1))  # type: ignore[arg-type]
    killer.join()
    assert isinstance(outcome, Broken) and "did not start" in outcome.reason
    assert said(supervisor.judge(Trial(2))) == "trial 2"  # type: ignore[arg-type]
    supervisor.worker.close()


def _kill_when_up(worker: Worker) -> None:
    while (pid := worker.pid) is None:
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "limit_s", "trial_class"),
    [
        ("abort", 20.0, TrialClass.CRASHED),
        ("segfault", 20.0, TrialClass.CRASHED),
        ("sleep", 0.5, TrialClass.TIMEOUT),
        ("garbage", 20.0, TrialClass.CRASHED),
        ("closed", 20.0, TrialClass.CRASHED),
    ],
)
def test_after_each_fault_the_next_trial_is_judged(
    pool: Watched, how: str, limit_s: float, trial_class: TrialClass
) -> None:
    outcome = pool.judged(Killer(how, limit_s))
    assert isinstance(outcome, Rejected) and outcome.trial_class is trial_class
    assert said(pool.judged(Trial(5))) == "trial 5"


def test_when_the_canary_dies_too_the_machine_is_blamed_and_the_next_trial_is_judged(
    pool: Watched,
) -> None:
    pool.supervisor._canary = DeadCanary()
    outcome = pool.judged(Killer("abort"))
    assert isinstance(outcome, Broken) and "a known-good job fails too" in outcome.reason
    assert said(pool.judged(Trial(6))) == "trial 6"


def test_a_worker_that_always_dies_before_it_takes_a_job_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(None)
    monkeypatch.setattr(worker, "_sent", lambda message: False)
    with pytest.raises(WorkerUnavailable, match="died twice"):
        worker.run(Trial(1))
    worker.close()


def test_the_worker_leaves_no_core_file(pool: Watched) -> None:
    pid = pool.supervisor.worker.pid
    with open(f"/proc/{pid}/limits") as limits:
        (line,) = [x for x in limits if x.startswith("Max core file size")]
    assert line.split()[4] == "0"


# ---- what a worker may say ---------------------------------------------------------------------


class Call:
    """Pickles as a call of a function by its module and name."""

    def __init__(self, module: str, name: str, *args: object) -> None:
        self.text = (module, name, args)

    def payload(self) -> bytes:
        """The pickle that makes the call."""
        module, name, args = self.text
        strings = b"".join(
            b"\x8c" + bytes([len(x)]) + x.encode() for x in (module, name)
        )  # two short strings, then STACK_GLOBAL
        body = pickle.dumps(args, 4)[2:-1].lstrip(b"\x95")
        if body[:8].endswith(b"\0\0"):
            body = body[8:]
        return b"\x80\x04" + strings + b"\x93" + body + b"R."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("tuner.worker", "os.system"),
        ("tuner.worker", "subprocess.run"),
        ("tuner.worker", "loads"),
        ("tuner.worker", "Worker"),
        ("tuner.cli", "main"),
        ("runs.store", "RunStore.create"),
        ("runs.record", "dataclass"),
        ("runs.codec", "Any"),
    ],
)
def test_an_answer_that_names_anything_but_a_record_is_refused(module: str, name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match="not one of ours"):
        loads(Call(module, name, "true").payload())
    assert pickle.loads(Call("builtins", "len", "true").payload()) == 4  # the payload does call
