"""What a run remembers: its specification, its trials and how each ended."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

from codegen.kernel import Resources
from space.params import Point
from space.variant import DType, Phase, Problem, Shape, problems_of


class TrialClass(StrEnum):
    """How a trial ended. Exactly one for each."""

    OK = "ok"
    WRONG_OUTPUT = "wrong_output"
    PRECISION = "precision"
    NONDETERMINISTIC = "nondeterministic"
    INPUT_MODIFIED = "input_modified"
    LAUNCH_FAILED = "launch_failed"
    TOO_LARGE = "too_large"
    COMPILE_ERROR = "compile_error"
    COMPILE_TIMEOUT = "compile_timeout"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    TIMING_INVALID = "timing_invalid"
    IMPOSSIBLE_TIME = "impossible_time"
    DUPLICATE = "duplicate"
    INVALID_PROPOSAL = "invalid_proposal"
    BROKEN = "broken"  # the machinery, not the kernel


class Stage(StrEnum):
    """The step at which something was decided."""

    PARSE = "parse"
    CHECK = "check"
    BIND = "bind"
    PLAN = "plan"
    EMIT = "emit"
    COMPILE = "compile"
    LAUNCH = "launch"
    VERIFY = "verify"
    TIME = "time"


class Basis(StrEnum):
    """Whether a time was measured on the named GPU or predicted by the analytic model."""

    MEASURED = "measured"
    PREDICTED = "predicted"


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one kernel on one shape: median and its interval, in microseconds."""

    shape: Shape
    median_us: float
    low_us: float
    high_us: float
    samples: int
    basis: Basis
    #: how many splits of the keys a decode kernel ran with on this shape
    splits: int = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """A right kernel with a time for each shape it was timed on."""

    timings: tuple[Timing, ...]
    #: worst error against fp64 over that of plain attention at the same dtype; None when the
    #: kernel did not run on a device (its program was right in the interpreter)
    error_ratio: float | None

    @property
    def trial_class(self) -> TrialClass:
        """Always OK."""
        return TrialClass.OK


@dataclass(frozen=True, slots=True)
class Rejected:
    """The kernel's or the proposal's fault: where it was found and the evidence."""

    trial_class: TrialClass
    stage: Stage
    reason: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The machinery failed; says nothing about the kernel."""

    stage: Stage
    reason: str

    @property
    def trial_class(self) -> TrialClass:
        """Always BROKEN."""
        return TrialClass.BROKEN


Outcome = Measured | Rejected | Broken


@dataclass(frozen=True, slots=True)
class Reference:
    """The user's PyTorch function that a run's kernels must agree with, not plain attention."""

    path: str  #: of its file, absolute
    function: str
    digest: str  #: SHA-256 of the file, hex
    #: numbers that the function takes by keyword and the sketches by Param, by name
    scalars: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        """What messages call it: FILE.py:function."""
        return f"{self.path.rpartition('/')[2]}:{self.function}"


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What the user asked for, complete: a run can be repeated from it."""

    run_id: str
    variant: str
    gpu: str
    dtype: DType
    shapes: tuple[Shape, ...]
    budget: int
    seed: int
    measure: Basis
    proposer: str = "builtin"
    #: which kind of kernel is written: auto, mma_sync or wgmma
    backend: str = "auto"
    minutes: float | None = None
    #: name -> TL text of the sketches this run searches, by key
    sketches: tuple[tuple[str, str], ...] = ()
    #: the model that the proposer asks, where it asks one
    model: str = ""
    #: which proposers a comparison allows this run: llm, search, assisted, random; all when empty
    arm: str = ""
    #: what kernels are checked against; plain attention for None
    reference: Reference | None = None
    phase: Phase = Phase.PREFILL
    #: keys in a page of the cache of a decode run, 0 for a cache in one piece
    page: int = 0

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The run's problems, in order of its shapes."""
        return problems_of(self.variant, self.dtype, self.shapes, self.phase, self.page)

    def shapes_of(self, problem: Problem) -> tuple[Shape, ...]:
        """Return the run's shapes that kernels of a problem compute."""
        return tuple(s for s in self.shapes if problem.serves(s))


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One trial: what was tried, who proposed it, how it ended and what it cost."""

    index: int
    problem: Problem
    sketch: str
    point: Point
    origin: str  #: "first", "seed", "model", "shortlist", "sibling" or "sampler"
    outcome: Outcome
    source_digest: str = ""
    cubin_key: str = ""
    resources: tuple[Resources, ...] = ()
    smem_bytes: int = 0
    compile_s: float = 0.0
    judge_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Finalist:
    """A kernel of the final, interleaved timing: the trial it came from, or a peer's name."""

    shape: Shape
    #: index of the trial, or None for a peer
    trial: int | None
    name: str  #: "trial 17" or "fa2", "cudnn", ...
    timing: Timing
    chosen: bool = False


#: What a note may hold.
Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Note:
    """Facts about a run that are not trials: protocol, versions, clocks, environment."""

    topic: str
    values: tuple[tuple[str, Scalar], ...]

    def as_dict(self) -> dict[str, Scalar]:
        """Return a new mapping from name to value."""
        return dict(self.values)


#: Topic of the note that a trial failed the final checks: `trial`, `class`, `reason`.
REJECTED_IN_FINAL = "rejected_in_final"


@dataclass(frozen=True, slots=True)
class Resumed:
    """The run went on after a stop; `trials` were done by then."""

    trials: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The run ended by itself: budget spent, minutes over, space exhausted or interrupted."""

    reason: str
    trials: int


Event = TrialRecord | Finalist | Note | Resumed | Finished


@dataclass(frozen=True, slots=True)
class History:
    """All trials of a run so far, in order. Immutable; `with_record` gives a new one."""

    records: tuple[TrialRecord, ...] = ()

    def __iter__(self) -> Iterator[TrialRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def with_record(self, record: TrialRecord) -> History:
        """Return the history with one more record."""
        return History((*self.records, record))

    def without(self, indices: Collection[int]) -> History:
        """Return the history without some trials; the others keep their index."""
        return History(tuple(r for r in self.records if r.index not in indices))

    def find(self, problem: Problem, sketch: str, point: Point) -> TrialRecord | None:
        """Return the first trial of this exact program, or None."""
        key = point.key
        for r in self.records:
            if (r.problem, r.sketch, r.point.key) == (problem, sketch, key):
                return r
        return None

    def spent(self) -> int:
        """Budget used: distinct programs that were compiled and judged."""
        free = (TrialClass.DUPLICATE, TrialClass.INVALID_PROPOSAL, TrialClass.BROKEN)
        return sum(
            r.outcome.trial_class not in free and r.outcome.trial_class != TrialClass.TOO_LARGE
            for r in self.records
        )

    def best(self, shape: Shape) -> tuple[TrialRecord, Timing] | None:
        """Return the fastest right trial on `shape`; ties go to the earlier trial."""
        found = [
            (t.median_us, r.index, r, t)
            for r in self.records
            if isinstance(r.outcome, Measured)
            for t in r.outcome.timings
            if t.shape == shape
        ]
        if not found:
            return None
        _, _, record, timing = min(found, key=lambda f: f[:2])
        return record, timing
