"""Work that is sent to another process: frozen, picklable, and without a tensor in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from codegen.kernel import Cubin, KernelSource
from runs.record import Finalist, Note, Outcome, Reference, Rejected
from space.params import Point
from space.variant import Problem, Shape

if TYPE_CHECKING:
    from tuner.evaluate.bench import Bench

R_co = TypeVar("R_co", covariant=True)


class Job(Protocol[R_co]):
    """Something a GPU worker runs."""

    @property
    def limit_s(self) -> float:
        """Seconds after which the worker is killed."""

    def run(self, bench: Bench) -> R_co:
        """Do the work, in the worker. A device fault is raised and costs the worker."""


@dataclass(frozen=True, slots=True)
class EvalJob:
    """Judge one built kernel on its problem and time it on `shapes`."""

    problem: Problem
    source: KernelSource
    image: bytes
    shapes: tuple[Shape, ...]
    seed: int
    limit_s: float = 30.0
    #: best median known on each shape: a hopeless candidate is not timed further
    best_us: tuple[tuple[Shape, float], ...] = ()
    reference: Reference | None = None  #: what it must agree with; plain attention for None

    def run(self, bench: Bench) -> Outcome:
        """See `Judge.judge`."""
        return bench.judge_of(self.reference, self.problem).judge(
            self.problem, self.source, self.image, self.shapes, self.seed, dict(self.best_us)
        )


@dataclass(frozen=True, slots=True)
class KernelCanary:
    """Run a kernel that was judged right before: whether the machinery still works."""

    problem: Problem
    source: KernelSource
    image: bytes
    limit_s: float = 30.0
    reference: Reference | None = None

    def run(self, bench: Bench) -> bool:
        """Return whether it is right now."""
        return bench.judge_of(self.reference, self.problem).canary(
            self.problem, self.source, self.image
        )


@dataclass(frozen=True, slots=True)
class DeviceCanary:
    """Let the device add some numbers: what can be asked before any kernel was right."""

    limit_s: float = 30.0

    def run(self, bench: Bench) -> bool:
        """Return whether the sum is right."""
        return bench.sum_of_ones() == 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """A trial in the final timing, with the shapes it competes on."""

    trial: int
    source: KernelSource
    image: bytes
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Absent:
    """A peer that is not in the table of a shape, and why."""

    shape: Shape
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of the card while one shape was in the final timing."""

    shape: Shape
    sm_clock_mhz: int
    memory_clock_mhz: int
    temperature_c: int
    power_w: float
    throttle: str  #: the reasons that held the clocks down, or ""
    redone: int  #: times that the shape was timed again because the card was too hot


@dataclass(frozen=True, slots=True)
class FinalsResult:
    """All that the final timing found; nothing is chosen yet."""

    finalists: tuple[Finalist, ...]
    absent: tuple[Absent, ...] = ()
    #: trials that failed the harder checks, with the evidence
    rejected: tuple[tuple[int, Rejected], ...] = ()
    #: clocks, temperature, power and throttle flags after the timing
    conditions: str = ""
    #: the same while each shape was timed; empty where NVML is silent
    readings: tuple[Reading, ...] = ()


@dataclass(frozen=True, slots=True)
class FinalsJob:
    """Time the best trials of a problem and the peers, interleaved. No entries: peers only."""

    problem: Problem
    entries: tuple[Entry, ...]
    shapes: tuple[Shape, ...]
    seed: int
    rounds: int = 25
    with_peers: bool = True
    limit_s: float = 240.0
    reference: Reference | None = None

    def run(self, bench: Bench) -> FinalsResult:
        """See `run_finals`."""
        from tuner.evaluate.finals import run_finals
        from tuner.evaluate.peers import peers

        chosen = peers() if self.with_peers else {}
        judge = bench.judge_of(self.reference, self.problem)
        result = run_finals(
            judge, self.problem, self.entries, self.shapes, self.seed, chosen, self.rounds,
            bench.meter,
        )  # fmt: skip
        return replace(result, conditions=str(bench.meter.read() or ""))


@dataclass(frozen=True, slots=True)
class PeerKernelsJob:
    """Ask the profiler which device kernels the peers run on a shape.

    For the end of a run: the profiler stays attached to the worker and may slow its launches.
    """

    problem: Problem
    shape: Shape
    seed: int
    limit_s: float = 120.0

    def run(self, bench: Bench) -> tuple[tuple[str, str], ...]:
        """Return (peer, kernel) of those that run the shape; a kernel is "" when not told."""
        from tuner.evaluate.peers import kernel_names

        arena = bench.judge.arena((self.shape,), self.problem.dtype, self.seed, self.problem.page)
        return kernel_names(arena.bay(self.shape).slots[0])


@dataclass(frozen=True, slots=True)
class FactsJob:
    """Ask for versions, clocks and the measuring protocol."""

    limit_s: float = 60.0

    def run(self, bench: Bench) -> tuple[Note, ...]:
        """See `Bench.facts`."""
        return bench.facts()


@dataclass(frozen=True, slots=True)
class CompileJob:
    """Take one point of a sketch from text to cubin."""

    sketch_text: str
    problem: Problem
    point: Point
    gpu_name: str
    arch: str  #: what to compile for: `sm_89`, or `sm_90a` to run older code on a Hopper card
    cache: Path | None = None
    limit_s: float = 60.0
    answers: Path | None = None  #: of the run's reference, for the interpreter's gate


@dataclass(frozen=True, slots=True)
class Built:
    """A translated and compiled candidate."""

    source: KernelSource
    cubin: Cubin
