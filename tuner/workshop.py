"""Where candidates are built and judged on this machine: on its GPU, or by the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from codegen.headers import find_headers
from codegen.nvrtc import nvrtc_version
from runs.export import export
from runs.rebuild import stored_kernel
from runs.record import (
    Basis,
    Broken,
    Finalist,
    Measured,
    Note,
    Outcome,
    Reference,
    Rejected,
    RunSpec,
    Scalar,
)
from runs.store import RunStore
from space.gpu import GpuSpec
from space.variant import Phase, Problem, Shape, flops
from tuner.devices import device_names
from tuner.drift import DriftWatch
from tuner.errors import MachineError
from tuner.evaluate.model import Candidate as Modelled
from tuner.evaluate.model import predict
from tuner.finish import Contender, PeerTimes, contenders, rejection
from tuner.job import Built, CompileJob, Entry, EvalJob, FinalsJob, PeerKernelsJob, Reading
from tuner.lanes import Candidate
from tuner.pools import CompilePool, Compiles, GpuPool, Judges
from tuner.reference import answers_of
from tuner.session import Machine, Workshop
from tuner.worker import JobFailed, WorkerLost, WorkerUnavailable

T = TypeVar("T")

AHEAD = 2  #: candidates in flight beyond the compile processes, so that the GPU never waits
TRIAL_S = 15.0  #: time limit of a trial: so much, and what its shapes are worth
REFERENCE_S = 60.0  #: and so much for the answers of a user's function
LAUNCHES = 200  #: of each shape at the hardware's peak: 10 at a twentieth of it
MOST_WORKERS = 8
DECODE_ROUNDS = 50  #: of the final timing of decode, whose launches take microseconds
PEER_ROUNDS = 5  #: of the timing that only serves to show the peers beside the search
FINAL_ROUNDS = 4  #: times that rejected finalists are replaced by the next best


def this_machine() -> Machine:
    """Return what the main job needs of the machine it runs on."""
    return Machine(device_names(), open_workshop, export_into)


def export_into(store: RunStore, out: Path) -> Path:
    """Export a run into `out` and return it."""
    export(store, out)
    return out


def open_workshop(spec: RunSpec, gpu: GpuSpec, device: int | None, workers: int | None) -> Workshop:
    """Start the pools. Raises ToolchainMissing when nothing can be compiled here."""
    find_headers()
    nvrtc_version()
    cores = len(os.sched_getaffinity(0))
    if spec.measure is Basis.PREDICTED:
        return ModelWorkshop(_builder(workers or cores, spec, gpu), spec)
    if device is None:
        raise MachineError(f"no {gpu.title} in this machine")
    # one core drives the GPU, one the search; past MOST_WORKERS compiling is never what waits
    workers = workers or max(1, min(cores - 2, MOST_WORKERS))
    return DeviceWorkshop(_builder(workers, spec, gpu), GpuPool([device]), spec)


def _builder(workers: int, spec: RunSpec, gpu: GpuSpec) -> Builder:
    return Builder(CompilePool(workers), workers, gpu, spec)


def limit_s(shapes: Sequence[Shape], gpu: GpuSpec, reference: Reference | None = None) -> float:
    """Return the seconds after which a trial on `shapes` is killed as hung."""
    at_peak = sum(flops(shape) for shape in shapes) / (gpu.tensor_tflops * 1e12)
    answers = 0.0 if reference is None else REFERENCE_S  # it may be examined in this trial
    return TRIAL_S + LAUNCHES * at_peak + answers


class Builder:
    """Turns candidates into compile jobs."""

    def __init__(self, pool: Compiles, workers: int, gpu: GpuSpec, spec: RunSpec) -> None:
        self.pool = pool
        self.spec = spec
        self.gpu = gpu
        self.depth = workers + AHEAD
        self._cache = cubin_cache()

    def build(self, candidate: Candidate) -> Future[Built | Rejected | Broken]:
        """Start to build."""
        return self.pool.submit(
            CompileJob(
                candidate.text,
                candidate.problem,
                candidate.point,
                self.gpu.name,
                self.gpu.arch,
                self._cache,
                answers=answers_of(self.spec, candidate.problem),
            )
        )


class ModelWorkshop:
    """Compiles for a GPU that is not here and predicts what the kernels take on it."""

    def __init__(self, builder: Builder, spec: RunSpec) -> None:
        self._builder = builder
        self._spec = spec
        self.depth = builder.depth

    def build(self, candidate: Candidate) -> Future[Built | Rejected | Broken]:
        """Start to translate, check in the interpreter and compile."""
        return self._builder.build(candidate)

    def judge(self, candidate: Candidate, built: Built) -> Future[Outcome]:
        """Predict every shape from the point and the cubin's resources."""
        future: Future[Outcome] = Future()
        smem = max(launch.smem_bytes for launch in built.source.launches)
        modelled = Modelled.of(candidate.problem, candidate.point, built.cubin.resources, smem)
        shapes = [s for s in self._spec.shapes if candidate.problem.serves(s)]
        timings = tuple(predict(modelled, s, self._builder.gpu) for s in shapes)
        future.set_result(Measured(timings, error_ratio=None))
        return future

    def facts(self) -> Sequence[Note]:
        """Return what the predictions rest on."""
        return (_toolchain(),)

    def peers(self, spec: RunSpec) -> PeerTimes:
        """Return nothing: a peer cannot be predicted."""
        return PeerTimes()

    def finals(
        self, spec: RunSpec, store: RunStore, entries: Sequence[Contender]
    ) -> Sequence[Finalist]:
        """Return nothing: there is no device to time on."""
        return ()

    def again(self, spec: RunSpec) -> Workshop:
        """See `Workshop.again`."""
        return ModelWorkshop(self._builder, spec)

    def close(self) -> None:
        """Stop the compile processes."""
        self._builder.pool.close()


class DeviceWorkshop:
    """Compiles in processes without the device; judges and times in the GPU's worker."""

    def __init__(self, builder: Builder, judges: Judges, spec: RunSpec) -> None:
        self._builder = builder
        self._judges = judges
        self._spec = spec
        self._best: dict[Shape, float] = {}
        self._drift = DriftWatch(judges.submit)
        self.depth = builder.depth

    def build(self, candidate: Candidate) -> Future[Built | Rejected | Broken]:
        """Start to translate, check in the interpreter and compile."""
        return self._builder.build(candidate)

    def judge(self, candidate: Candidate, built: Built) -> Future[Outcome]:
        """Start to run, verify and time; the best times known end hopeless timings early."""
        shapes = tuple(s for s in self._spec.shapes if candidate.problem.serves(s))
        known = tuple((s, self._best[s]) for s in shapes if s in self._best)
        job = EvalJob(
            candidate.problem,
            built.source,
            built.cubin.image,
            shapes,
            self._spec.seed,
            limit_s=limit_s(shapes, self._builder.gpu, self._spec.reference),
            best_us=known,
            reference=self._spec.reference,
        )
        future = self._judges.submit(job)
        future.add_done_callback(self._keep_best)
        self._drift.saw(job, future)
        return future

    def _keep_best(self, future: Future[Outcome]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        outcome = future.result()
        if isinstance(outcome, Measured):
            for t in outcome.timings:
                self._best[t.shape] = min(t.median_us, self._best.get(t.shape, t.median_us))

    def facts(self) -> Sequence[Note]:
        """Return versions, clocks and protocol as the worker reads them."""
        return (_toolchain(), *_answer(self._judges.facts()))

    def peers(self, spec: RunSpec) -> PeerTimes:
        """Time the peers once, to show beside the search."""
        if spec.reference is not None:  # what others ship is plain attention
            return PeerTimes()
        found: list[Finalist] = []
        missing: dict[str, str] = {}
        for problem, shapes in _shapes_by_problem(spec):
            job = FinalsJob(problem, (), shapes, spec.seed, rounds=PEER_ROUNDS)
            result = _answer(self._judges.finals(job))
            found += result.finalists
            for absent in result.absent:
                missing.setdefault(f"{absent.name} at {problem.key}", absent.reason)
        return PeerTimes(tuple(found), tuple(f"no {who}: {why}" for who, why in missing.items()))

    def finals(
        self, spec: RunSpec, store: RunStore, entries: Sequence[Contender]
    ) -> Sequence[Finalist]:
        """Check contenders harder and time them with the peers, interleaved.

        A trial that fails here is noted in the journal, and the next best of its shapes takes
        its place.
        """
        rejected: set[int] = set()
        done: dict[Shape, list[Finalist]] = {}
        for _ in range(FINAL_ROUNDS):
            failed = self._one_final(spec, store, entries, done)
            rejected |= failed
            again = {s for e in entries if e.record.index in failed for s in e.shapes}
            if not again:
                break
            history = store.replay().history.without(rejected)
            entries = contenders(replace(spec, shapes=tuple(again)), history)
        finalists = [f for found in done.values() for f in found]
        for note in self._drift.notes():
            store.append(note)
        self._note_peer_kernels(spec, store, finalists)
        return finalists

    def _note_peer_kernels(
        self, spec: RunSpec, store: RunStore, finalists: Sequence[Finalist]
    ) -> None:
        """Record what really ran behind each peer's name, last: the profiler disturbs timing."""
        for problem, shapes in _shapes_by_problem(spec):
            if any(f.trial is None and f.shape in shapes for f in finalists):
                job = PeerKernelsJob(problem, shapes[0], spec.seed)
                try:
                    names = _answer(self._judges.peer_kernels(job))
                except MachineError:  # a name less, the times stand
                    continue
                if known := {peer: kernel for peer, kernel in names if kernel}:
                    store.append(_note("peer_kernels", problem=problem.key, **known))

    def _one_final(
        self,
        spec: RunSpec,
        store: RunStore,
        entries: Sequence[Contender],
        done: dict[Shape, list[Finalist]],
    ) -> set[int]:
        """Time `entries`; put a shape's finalists into `done` and return the trials that failed."""
        failed: set[int] = set()
        wanted = {s for e in entries for s in e.shapes}
        for problem, shapes in _shapes_by_problem(spec):
            here = tuple(s for s in shapes if s in wanted)
            mine = [e for e in entries if e.record.problem == problem]
            if not mine:
                continue
            job = FinalsJob(
                problem, _loaded(store, mine), here, spec.seed,
                with_peers=spec.reference is None, reference=spec.reference,
            )  # fmt: skip
            if problem.phase is Phase.DECODE:
                job = replace(job, rounds=DECODE_ROUNDS)
            found = _answer(self._judges.finals(job))
            if found.conditions:
                store.append(_note("conditions", problem=problem.key, after=found.conditions))
            for r in found.readings:
                store.append(_reading(problem, r))
            for shape in here:
                done[shape] = [f for f in found.finalists if f.shape == shape]
            for trial, why in found.rejected:
                failed.add(trial)
                store.append(rejection(trial, why))
        return failed

    def again(self, spec: RunSpec) -> Workshop:
        """See `Workshop.again`."""
        return DeviceWorkshop(self._builder, self._judges, spec)

    def close(self) -> None:
        """Stop every process at once."""
        self._builder.pool.close()
        self._judges.close()


def _shapes_by_problem(spec: RunSpec) -> list[tuple[Problem, tuple[Shape, ...]]]:
    return [(p, spec.shapes_of(p)) for p in spec.problems]


def _loaded(store: RunStore, contenders: Sequence[Contender]) -> tuple[Entry, ...]:
    """Read the contenders' kernels back from the run's folder."""
    entries = []
    for c in contenders:
        stored = stored_kernel(store, c.record)
        entries.append(Entry(c.record.index, stored.source, stored.cubin.image, c.shapes))
    return tuple(entries)


def _answer(future: Future[T]) -> T:
    """Wait for a GPU worker. Raises MachineError when it is lost and no trial is to blame."""
    try:
        return future.result()
    except (WorkerUnavailable, WorkerLost, JobFailed) as error:
        raise MachineError(f"the GPU worker failed: {_one_line(str(error))}") from error


def _reading(problem: Problem, r: Reading) -> Note:
    """The card's state while a shape was timed, as the journal keeps it."""
    return _note(
        "final_conditions", problem=problem.key, shape=r.shape.key, sm_clock_mhz=r.sm_clock_mhz,
        memory_clock_mhz=r.memory_clock_mhz, temperature_c=r.temperature_c, power_w=r.power_w,
        throttle=r.throttle, redone=r.redone,
    )  # fmt: skip


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _toolchain() -> Note:
    return _note("toolchain", nvrtc=nvrtc_version(), **dict(find_headers().versions))


def _note(topic: str, **values: Scalar) -> Note:
    return Note(topic, tuple(values.items()))


def cubin_cache() -> Path:
    """Return the folder where cubins are kept between runs, by the XDG rule."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "tltune" / "cubins"
