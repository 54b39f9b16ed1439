"""What a compile process can suffer costs that trial, by its class; the next one is built."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_jobs import faulty

from codegen import nvrtc
from codegen.kernel import Cubin, KernelSource
from runs.record import Rejected, Stage, TrialClass
from space.params import Point
from space.variant import DType, Problem
from tuner.job import Built, CompileJob
from tuner.limits import COMPILE_MEMORY_BYTES, allow_cpu
from tuner.pools import CompilePool

ROOT = Path(__file__).parents[2]
PROBLEM = Problem("mha", DType.FP16, 64, 64, False)
POINT = Point.of({"BM": 64})


def job(text: str, limit_s: float = 60.0) -> CompileJob:
    return CompileJob(text, PROBLEM, POINT, "h200", "sm_90a", limit_s=limit_s)


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    pool = CompilePool(1, faulty)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("fault", "trial_class", "said"),
    [
        ("abort", TrialClass.COMPILE_ERROR, "SIGABRT"),
        ("segfault", TrialClass.COMPILE_ERROR, "SIGSEGV"),
        ("kill", TrialClass.COMPILE_ERROR, "SIGKILL"),
        ("exit", TrialClass.COMPILE_ERROR, "died"),
        ("memory", TrialClass.COMPILE_ERROR, "wanted more memory than the 8 GiB"),
        ("malloc", TrialClass.COMPILE_ERROR, "SIGABRT"),
        ("compiler-memory", TrialClass.COMPILE_ERROR, "out of memory"),
        ("hang", TrialClass.COMPILE_TIMEOUT, "within 1 s"),
        ("spin", TrialClass.COMPILE_TIMEOUT, "within 1 s"),
        ("cpu-limit", TrialClass.COMPILE_TIMEOUT, "within 60 s"),
    ],
)
def test_a_fault_is_its_trials_class_and_the_next_is_built(
    pool: CompilePool, fault: str, trial_class: TrialClass, said: str
) -> None:
    limit_s = 1.0 if fault in ("hang", "spin") else 60.0
    assert isinstance(pool.submit(job("fine")).result(60), Built)  # warm
    outcome = pool.submit(job(fault, limit_s)).result(60)
    assert isinstance(outcome, Rejected)
    assert (outcome.trial_class, outcome.stage) == (trial_class, Stage.COMPILE)
    assert said in outcome.reason.splitlines()[0]
    assert isinstance(pool.submit(job("fine")).result(60), Built)


def pid_of(pool: CompilePool) -> int:
    built = pool.submit(job("fine")).result(60)
    assert isinstance(built, Built)
    return int(built.cubin.key)


def test_a_process_killed_while_idle_costs_no_trial(pool: CompilePool) -> None:
    for pause in (0.0, 0.05, 0.5):
        pid = pid_of(pool)
        os.kill(pid, signal.SIGKILL)
        time.sleep(pause)
        outcome = pool.submit(job("fine")).result(60)
        if pause >= 0.5:  # earlier, the death may still be unnoticed and is taken for the job's
            assert isinstance(outcome, Built)
        assert isinstance(pool.submit(job("fine")).result(60), Built)
        assert pid_of(pool) != pid


def limits_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return {line[:26].strip(): line[26:].split()[0] for line in lines[1:]}


def test_limits_are_set_in_every_compile_process(pool: CompilePool) -> None:
    limits = limits_of(pid_of(pool))
    assert limits["Max address space"] == str(COMPILE_MEMORY_BYTES)
    assert limits["Max core file size"] == "0"
    assert 0 < int(limits["Max cpu time"]) < 200


WATCHED = """
import os, sys, time
sys.path[:0] = sys.argv[1:]
from fault_jobs import faulty
from test_compile_faults import job
from tuner.pools import CompilePool
pool = CompilePool(1, faulty)
built = pool.submit(job("fine")).result(60)
pool.submit(job(os.environ["FAULT"], limit_s=1.0))
time.sleep(0.7)  # well inside the job
print(built.cubin.key, flush=True)
while True:
    os.kill(os.getpid(), int(os.environ["END"]))
"""


@pytest.mark.parametrize(
    ("fault", "end"), [("spin", signal.SIGSTOP), ("hang", signal.SIGKILL), ("spin", signal.SIGKILL)]
)
def test_a_build_ends_by_itself_when_nobody_watches_it(fault: str, end: int) -> None:
    """The parent is stopped, and its clock with it, or killed."""
    paths = [str(ROOT / "tests" / f) for f in ("faults", "tuner", "runs")] + [str(ROOT)]
    env = {"PYTHONPATH": os.pathsep.join(paths), "FAULT": fault, "END": str(int(end))}
    with subprocess.Popen(
        [sys.executable, "-c", WATCHED, *paths], stdout=subprocess.PIPE, text=True,
        env=os.environ | env,
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and _state(pid) in "RSD":
            time.sleep(0.1)
        ended = _state(pid)
        parent.kill()
        assert ended in "ZX"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def test_the_cpu_allowance_is_renewed_for_each_job() -> None:
    before = resource.getrlimit(resource.RLIMIT_CPU)
    try:
        allow_cpu(30)
        soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = used.ru_utime + used.ru_stime
        assert spent + 30 <= soft <= spent + 33
        assert hard == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, before)


def test_a_cache_that_cannot_be_written_or_read_costs_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "_build", lambda source, arch: (b"\x7fELF", ""))
    source = KernelSource("x", "sm_80", (), ())

    def full(cache: Path, cubin: Cubin) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "write_cubin", full)
        assert nvrtc.compile_source(source, "sm_80", tmp_path).image == b"\x7fELF"
    assert list(tmp_path.iterdir()) == []
    built = nvrtc.compile_source(source, "sm_80", tmp_path)
    (file,) = tmp_path.glob("*/*.cubin")
    file.unlink()
    file.mkdir()  # neither a file nor replaceable
    assert nvrtc.compile_source(source, "sm_80", tmp_path).key == built.key
