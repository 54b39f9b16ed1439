"""One process that runs jobs on one GPU and can be killed: untrusted kernels run nowhere else.

`Worker` is the parent's end, `main` the process. Jobs go down as length-prefixed pickles; what
comes up is unpickled with our own classes only. `Supervisor` decides whose fault a loss is.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from runs.record import Broken, Measured, Outcome, Rejected, Stage, TrialClass
from tuner.job import DeviceCanary, EvalJob, FinalsJob, FinalsResult, Job, KernelCanary
from tuner.limits import die_with_parent, no_core_dump

START_LIMIT_S = 180.0  #: importing torch and making a context on a cold machine
ENTRY = "import sys; from tuner.worker import main; main(sys.argv[1:])"
TAKEN = b"taken"  #: the worker's word that it begins with a job
OURS = ("space.", "codegen.", "runs.", "tuner.")
PLAIN = {"set", "frozenset", "complex", "bytearray"}
T = TypeVar("T")


class WorkerLost(Exception):
    """The process died, hung or lost its device while it ran a job."""

    def __init__(self, trial_class: TrialClass, text: str) -> None:
        super().__init__(text)
        self.trial_class = trial_class


class WorkerUnavailable(Exception):
    """The process did not come up; no job was started."""


class JobFailed(Exception):
    """The job raised in the worker, and the device is still well: a fault of this program."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker's first message."""


@dataclass(frozen=True, slots=True)
class Done:
    """A job's result."""

    value: object


@dataclass(frozen=True, slots=True)
class Failed:
    """A job's exception in words; `lost` when the device is of no more use to the process."""

    text: str
    lost: bool


class Worker:
    """The parent's end of one worker process, started at the first job and after each loss."""

    def __init__(self, device: int | None) -> None:
        """`device` is an index among the visible GPUs; None gives a process without a GPU."""
        self.device = device
        self._closed = False
        self._busy = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker

    @property
    def pid(self) -> int | None:
        """The process id, or None when no process is up."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process if it is not up. Raises WorkerUnavailable with its last words."""
        with self._busy:
            self._start()

    def _start(self) -> None:
        if self._closed:
            raise WorkerUnavailable("the GPU worker was closed")
        if self._process is not None:
            return
        ours, theirs = Pipe()
        self._stderr.seek(0)
        self._stderr.truncate()
        command = [sys.executable, "-c", ENTRY, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command if self.device is None else [*command, "gpu"],
            env=environment(self.device),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._stderr,  # a kernel's printf must not reach the terminal
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C is the parent's business
        )
        self._pipe = ours
        theirs.close()
        try:
            self._receive(START_LIMIT_S)
        except (WorkerLost, JobFailed) as failed:
            self.kill()
            raise WorkerUnavailable(f"the GPU worker did not start: {failed}") from failed

    def run(self, job: Job[T]) -> T:
        """Run a job. Raises WorkerLost, JobFailed, WorkerUnavailable."""
        with self._busy:
            return self._run(job)

    def _run(self, job: Job[T]) -> T:
        message = pickle.dumps(job)
        if not self._sent(message) and not self._sent(message):
            raise WorkerUnavailable("the GPU worker died twice before it took a job")
        answer = self._receive(job.limit_s)
        result: T = answer.value  # type: ignore[assignment]
        return result

    def _sent(self, message: bytes) -> bool:
        """Hand over a job; False when the process died before it began: that is no job's fault."""
        if self._process is not None and self._process.poll() is not None:
            self.kill()
        self._start()
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(message)
            if self._pipe.poll(START_LIMIT_S) and self._pipe.recv_bytes() == TAKEN:
                return True
        except (OSError, EOFError):
            pass
        self.kill()
        return False

    def _receive(self, limit_s: float) -> Done:
        assert self._pipe is not None
        try:
            if not self._pipe.poll(limit_s):
                raise self._lost(TrialClass.TIMEOUT, f"no answer within {limit_s:g} s; killed")
            message = loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._lost(TrialClass.CRASHED, self._last_words()) from error
        except pickle.UnpicklingError as error:
            raise self._lost(TrialClass.CRASHED, f"garbled answer ({error})") from error
        match message:
            case Done():
                return message
            case Ready():
                return Done(None)
            case Failed(text=text, lost=True):
                raise self._lost(TrialClass.CRASHED, text)
            case Failed(text=text):
                raise JobFailed(text)
        raise self._lost(TrialClass.CRASHED, f"unknown answer {type(message).__name__}")

    def _lost(self, trial_class: TrialClass, text: str) -> WorkerLost:
        self.kill()
        return WorkerLost(trial_class, text)

    def _last_words(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "the worker closed its pipe"
        how = f"exit code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                how = signal.Signals(-code).name
        self._stderr.seek(0)
        lines = self._stderr.read()[-2000:].decode(errors="replace").strip().splitlines()
        return f"the worker died: {how}" + (f": {lines[-1]}" if lines else "")

    def kill(self) -> None:
        """End the process at once."""
        process, self._process = self._process, None
        pipe, self._pipe = self._pipe, None
        if process is not None:
            process.kill()
            process.wait()
        if pipe is not None:
            pipe.close()

    def close(self) -> None:
        """End the process for good, also while another thread waits for its answer."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()  # who waits for it sees the end of the pipe and lets go
        with self._busy:
            self.kill()
            self._stderr.close()


def environment(device: int | None) -> dict[str, str]:
    """Return the environment of a worker that sees one GPU, or none."""
    env = dict(os.environ)
    if device is None:
        env["CUDA_VISIBLE_DEVICES"] = ""
    else:
        visible = env.get("CUDA_VISIBLE_DEVICES")
        env["CUDA_VISIBLE_DEVICES"] = visible.split(",")[device] if visible else str(device)
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    return env


class _OurUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a record class of ours: no function, and no module's import reached by a dot."""
        if module == "builtins" and name in PLAIN:
            return super().find_class(module, name)
        if module.startswith(OURS) and "." not in name:
            found = super().find_class(module, name)
            is_record = is_dataclass(found) or (isinstance(found, type) and issubclass(found, Enum))
            if is_record and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is not one of ours")


def loads(data: bytes) -> object:
    """Unpickle our own records and plain values. Raises UnpicklingError on all else."""
    try:
        return _OurUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # damaged bytes raise whatever they please
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error


# ---- whose fault it is -------------------------------------------------------------------------


class Supervisor:
    """A worker with the rule of blame: after a loss, a known-good job decides."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._canary: Job[bool] = DeviceCanary()

    def judge(self, job: EvalJob) -> Outcome:
        """Run a trial. A loss is the kernel's when the canary then sings, else the machinery's."""
        try:
            outcome = self.worker.run(job)
        except JobFailed as failed:
            return Broken(Stage.VERIFY, str(failed))
        except WorkerUnavailable as missing:
            return Broken(Stage.LAUNCH, str(missing))
        except WorkerLost as lost:
            return self._blame(lost)
        if isinstance(outcome, Measured):
            self._canary = KernelCanary(job.problem, job.source, job.image, reference=job.reference)
        return outcome

    def _blame(self, lost: WorkerLost) -> Rejected | Broken:
        try:
            sings = self.worker.run(self._canary)
        except (JobFailed, WorkerLost, WorkerUnavailable) as dead:
            return Broken(Stage.LAUNCH, f"{lost}; a known-good job fails too: {dead}")
        if not sings:
            return Broken(Stage.LAUNCH, f"{lost}; a known-good job gives wrong results too")
        return Rejected(lost.trial_class, Stage.LAUNCH, str(lost))

    def finals(self, job: FinalsJob) -> FinalsResult:
        """Run the final timing; a trial that costs the worker is found, left out and named.

        Raises WorkerLost, JobFailed or WorkerUnavailable when it is not one trial's fault.
        """
        try:
            return self.worker.run(job)
        except WorkerLost:
            if not job.entries:
                raise
        culprits: list[tuple[int, Rejected]] = []
        for entry in job.entries:
            alone = replace(job, entries=(entry,), rounds=1, with_peers=False)
            try:
                self.worker.run(alone)
            except WorkerLost as lost:
                culprits.append((entry.trial, Rejected(lost.trial_class, Stage.LAUNCH, str(lost))))
        guilty = {trial for trial, _ in culprits}
        rest = tuple(e for e in job.entries if e.trial not in guilty)
        result = self.worker.run(replace(job, entries=rest))
        return replace(result, rejected=(*result.rejected, *culprits))


# ---- the process -------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    """Serve jobs from the pipe whose descriptor is given, until the parent is gone."""
    no_core_dump()
    pipe: Connection[Any, Any] = Connection(int(argv[0]))
    die_with_parent()
    bench: Any = None
    if "gpu" in argv[1:]:
        from tuner.evaluate.bench import Bench

        bench = Bench()
        bench.sum_of_ones()  # the context is made here, not in the first job's time
    pipe.send_bytes(pickle.dumps(Ready()))
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(TAKEN)
        job = pickle.loads(message)
        answer = _answer(job, bench)
        fault = _device_fault(bench)
        pipe.send_bytes(answer if fault is None else pickle.dumps(Failed(fault, lost=True)))
        if fault is not None:
            os._exit(1)  # a lost context cannot be torn down in order


def _answer(job: Any, bench: Any) -> bytes:
    try:
        return pickle.dumps(Done(job.run(bench)))
    except Exception as error:  # the boundary of the process: every fault becomes words
        return pickle.dumps(Failed(f"{type(error).__name__}: {error}", lost=False))


def _device_fault(bench: Any) -> str | None:
    """Return what the device says when it no longer answers, or None when it is well."""
    if bench is None:
        return None
    from tuner.evaluate.fault import device_fault

    return device_fault(bench.device)
