"""Where jobs are executed: compile processes without a device, and one worker for each GPU.

Both give futures, so that a pool on other machines can take their place.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import re
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Protocol, TypeVar

from joblib.externals.loky import ProcessPoolExecutor

from runs.record import Broken, Note, Outcome, Rejected, Stage, TrialClass
from tuner.job import Built, CompileJob, EvalJob, FactsJob, FinalsJob, FinalsResult, PeerKernelsJob
from tuner.limits import COMPILE_MEMORY_BYTES, allow_cpu, confine_compile_process
from tuner.worker import Supervisor, Worker, WorkerUnavailable

T = TypeVar("T")
Build = Callable[[CompileJob], "Built | Rejected | Broken"]

#: A compile process must neither see a GPU nor start a thread for each core.
COMPILE_ENV = {
    "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}  # fmt: skip
IDLE_S = 600  #: an idle compile process leaves after so long, also when its parent was killed


class Compiles(Protocol):
    """A pool of compile processes, here or elsewhere."""

    def submit(self, job: CompileJob) -> Future[Built | Rejected | Broken]:
        """Start to build a candidate."""

    def close(self) -> None:
        """Stop everything at once; what was not started is cancelled."""


class Judges(Protocol):
    """A pool of GPU workers, here or elsewhere."""

    def submit(self, job: EvalJob) -> Future[Outcome]:
        """Start to judge a built kernel."""

    def finals(self, job: FinalsJob) -> Future[FinalsResult]:
        """Start a final timing. The future raises WorkerLost, JobFailed or WorkerUnavailable."""

    def facts(self) -> Future[tuple[Note, ...]]:
        """Ask for versions, clocks and protocol; raises as `finals` does."""

    def peer_kernels(self, job: PeerKernelsJob) -> Future[tuple[tuple[str, str], ...]]:
        """Ask which device kernels the peers run, at the end of a run; raises as `finals` does."""

    def close(self) -> None:
        """Stop everything at once; what was not started is cancelled."""


def build_here(job: CompileJob) -> Built | Rejected | Broken:
    """Build in this process; imports the translator at the first call."""
    from tuner.build import build

    return build(job)


def _build_within_limits(build: Build, job: CompileJob) -> Built | Rejected | Broken:
    """Build in a confined process; what wants more than it may have is that trial's failure."""
    allow_cpu(job.limit_s)
    try:
        return build(job)
    except MemoryError:
        gib = COMPILE_MEMORY_BYTES >> 30
        return Rejected(
            TrialClass.COMPILE_ERROR, Stage.COMPILE,
            f"the build wanted more memory than the {gib} GiB of a compile process",
        )  # fmt: skip


def _warm() -> None:
    """Import what a build needs, before the first one is waited for."""
    importlib.import_module("tuner.build")


class CompilePool:
    """`size` slots, each one loky process: a crash or a timeout costs one job and one process."""

    def __init__(self, size: int | None = None, build: Build = build_here) -> None:
        """Start the processes; they import the translator meanwhile."""
        self.size = size or max(1, len(os.sched_getaffinity(0)) - 1)
        self._build = build
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="compile")
        self._slots: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._all = [_Slot(warm=build is build_here) for _ in range(self.size)]
        for slot in self._all:
            self._slots.put(slot)

    def submit(self, job: CompileJob) -> Future[Built | Rejected | Broken]:
        """See `Compiles.submit`."""
        return self._threads.submit(self._run, job)

    def _run(self, job: CompileJob) -> Built | Rejected | Broken:
        slot = self._slots.get()
        try:
            return slot.call(self._build, job)
        finally:
            self._slots.put(slot)

    def close(self) -> None:
        """See `Compiles.close`."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for slot in self._all:
            slot.close()
        self._threads.shutdown(wait=True)


class _Slot:
    """One compile process, replaced after a crash or a timeout."""

    def __init__(self, warm: bool) -> None:
        self._warm = warm
        self._closed = False
        self._executor = self._start()

    def _start(self) -> Any:
        executor = ProcessPoolExecutor(
            1, env=COMPILE_ENV, timeout=IDLE_S, initializer=confine_compile_process
        )
        if self._warm:
            executor.submit(_warm)
        return executor

    def call(self, build: Build, job: CompileJob) -> Built | Rejected | Broken:
        """Build in the process; the outcome says when the process was lost or the code failed."""
        late = Rejected(
            TrialClass.COMPILE_TIMEOUT, Stage.COMPILE, f"not compiled within {job.limit_s:g} s"
        )
        try:
            result: Built | Rejected | Broken = self._submit(build, job).result(job.limit_s)
        except FutureTimeout:
            self._replace()
            return late
        except BrokenExecutor as error:
            self._replace()
            if self._closed:
                return Broken(Stage.COMPILE, "the compile pool was closed")
            if "SIGXCPU" in (how := _how_it_died(error)):
                return late
            return Rejected(
                TrialClass.COMPILE_ERROR, Stage.COMPILE, f"the compile process died: {how}"
            )
        except Exception as error:  # the boundary of the process: a fault of ours, in words
            return Broken(Stage.COMPILE, f"{type(error).__name__}: {error}")
        return result

    def _submit(self, build: Build, job: CompileJob) -> Any:
        try:
            return self._executor.submit(_build_within_limits, build, job)
        except BrokenExecutor:  # it died while idle (out of memory, killed): not this job's doing
            if self._closed:
                raise
            self._replace()
            return self._executor.submit(_build_within_limits, build, job)

    def _replace(self) -> None:
        self._executor.shutdown(wait=True, kill_workers=True)
        if not self._closed:
            self._executor = self._start()

    def close(self) -> None:
        """Kill the process."""
        self._closed = True
        self._executor.shutdown(wait=True, kill_workers=True)


def _how_it_died(error: BrokenExecutor) -> str:
    """The signal or exit code that loky names, else the first line of what it says."""
    if (
        codes := re.search(r"exit codes? of the workers? (?:are|is) \{(.*?)\}", str(error))
    ) is not None:
        return codes[1]
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class GpuPool:
    """One thread for each GPU, which drives that GPU's worker."""

    def __init__(
        self, devices: Sequence[int], make_worker: Callable[[int], Worker] = Worker
    ) -> None:
        """Start a worker on each device; they import torch meanwhile."""
        self._supervisors = [Supervisor(make_worker(d)) for d in devices]
        self._idle: queue.SimpleQueue[Supervisor] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(len(devices), thread_name_prefix="gpu")
        for supervisor in self._supervisors:
            self._threads.submit(self._open, supervisor)

    def _open(self, supervisor: Supervisor) -> None:
        with contextlib.suppress(WorkerUnavailable):  # the first job tries again and reports it
            supervisor.worker.start()
        self._idle.put(supervisor)

    def submit(self, job: EvalJob) -> Future[Outcome]:
        """See `Judges.submit`."""
        return self._on_a_gpu(lambda s: s.judge(job))

    def finals(self, job: FinalsJob) -> Future[FinalsResult]:
        """See `Judges.finals`."""
        return self._on_a_gpu(lambda s: s.finals(job))

    def facts(self) -> Future[tuple[Note, ...]]:
        """See `Judges.facts`."""
        return self._on_a_gpu(lambda s: s.worker.run(FactsJob()))

    def peer_kernels(self, job: PeerKernelsJob) -> Future[tuple[tuple[str, str], ...]]:
        """See `Judges.peer_kernels`."""
        return self._on_a_gpu(lambda s: s.worker.run(job))

    def _on_a_gpu(self, work: Callable[[Supervisor], T]) -> Future[T]:
        def run() -> T:
            supervisor = self._idle.get()
            try:
                return work(supervisor)
            finally:
                self._idle.put(supervisor)

        return self._threads.submit(run)

    def close(self) -> None:
        """See `Judges.close`."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for supervisor in self._supervisors:
            supervisor.worker.close()
        self._threads.shutdown(wait=True)
