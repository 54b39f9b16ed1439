"""The model beside the search: one background thread asks, the search looks in and never waits.

advisor = Advisor(client)
advisor.start([task], subjects)          # first sketches and seeds, while first trials run
...
advice = advisor.poll()                  # at once: what came since the last look
advisor.tell(history, peers)             # ask again with what was learnt
advisor.close()
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from codegen.errors import TLError
from codegen.tl.parser import parse
from codegen.tl.printer import to_text
from llm_proposer.client import Client, Kind
from llm_proposer.describe import Subject, base_of
from llm_proposer.errors import (
    BadReply,
    ProposerError,
    RateLimited,
    Refused,
    Stopped,
    Unreachable,
)
from llm_proposer.exchange import Exchange
from llm_proposer.prompt import PROPOSALS, Question, Task
from llm_proposer.proposer import (
    REPAIRS,
    Programmed,
    Seeded,
    Way,
    mend_program,
    propose_program,
    propose_seeds,
    take_seeds,
)
from llm_proposer.seed_reply import Proposal, Verdict
from llm_proposer.seeds import seeds
from runs.record import Finalist, History, Rejected
from space.params import Point
from space.variant import Problem, SpaceError

POLL_S = 5.0  #: between two looks for a reply that somebody brings
REMARKS = 12  #: refused proposals that the next request is told about
PATIENCE = 2  #: failures, or replies with nothing new, in a row before the model is left alone


@dataclass(frozen=True, slots=True)
class Sketch:
    """A TL program of the model, checked and without faults."""

    name: str
    text: str
    problem: Problem


@dataclass(frozen=True, slots=True)
class Seed:
    """A proposal for one search; its `proposal.point` is None when it was rejected."""

    sketch: str
    problem: Problem
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class Advice:
    """What came since the last look."""

    sketches: tuple[Sketch, ...] = ()
    seeds: tuple[Seed, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def points(self) -> tuple[tuple[str, Problem, Point], ...]:
        """The points to try, with the search that each is for."""
        return tuple(
            (s.sketch, s.problem, s.proposal.point)
            for s in self.seeds
            if s.proposal.point is not None
        )

    def __bool__(self) -> bool:
        return bool(self.sketches or self.seeds or self.notes)


@dataclass(frozen=True, slots=True)
class _Job:
    """Something to ask. Of two jobs with one key the later replaces the one that still waits."""

    key: str
    ask: Callable[[], Programmed | Seeded]
    take: Callable[[Programmed | Seeded], None]


@dataclass(slots=True)
class _Box:
    """What the thread found and nobody has fetched yet."""

    sketches: list[Sketch] = field(default_factory=list)
    seeds: list[Seed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Advisor:
    """Asks a model in one background thread. Every method but `close` returns at once.

    `stop` may be the event on which the client's retries wait, so that closing ends them too.
    When the model cannot be reached, or has nothing new to say, it is left alone and a note says
    so; the search goes on.
    """

    def __init__(
        self,
        client: Client,
        *,
        stop: threading.Event | None = None,
        repairs: int = REPAIRS,
        poll_s: float = POLL_S,
        count: int = PROPOSALS,
    ) -> None:
        self._client = client
        self._stop = stop or threading.Event()
        self._repairs = repairs
        self._poll_s = poll_s
        self._count = count
        self._turn = threading.Condition()
        self._jobs: dict[str, _Job] = {}
        self._pending: dict[str, _Job] = {}
        self._busy = False
        self._box = _Box()
        self._subjects: tuple[Subject, ...] = ()
        self._programs: dict[str, str] = {}  # canonical text of each program to its name
        self._remarks: dict[str, list[str]] = {}
        self._nothing_new: dict[str, int] = {}
        self._failures = 0
        self._off = False
        self._thread = threading.Thread(target=self._run, name="advisor", daemon=True)
        self._thread.start()

    # ---- for the search --------------------------------------------------------------------------

    def start(
        self,
        tasks: Sequence[Task] = (),
        subjects: Sequence[Subject] = (),
        way: Way = Way.SKETCH,
        samples: int = 1,
        history: History | None = None,
    ) -> None:
        """Ask for `samples` programs of each task, and for seeds of `subjects`.

        A program that is a subject's own, or was proposed before, is noted and not brought again.
        """
        self._subjects = tuple(subjects)
        with self._turn:
            for subject in subjects:
                self._programs.setdefault(_canonical(subject.text), subject.sketch)
        for task in tasks:
            for sample in range(samples):
                self._ask_program(task, way, sample)
        self.tell(history or History())

    def tell(
        self,
        history: History,
        peers: Sequence[Finalist] = (),
        subjects: Collection[Subject] | None = None,
    ) -> None:
        """Ask for seeds with what was learnt, for `subjects` or for those of the start.

        A search that still waits for a reply is not asked about again.
        """
        chosen = self._subjects if subjects is None else tuple(subjects)
        for subject in chosen:
            if self._nothing_new.get(_key(subject), 0) < PATIENCE:
                self._ask_seeds(subject, history, tuple(peers))

    def mend(self, name: str, task: Task, text: str, judged: Rejected) -> None:
        """Ask for a program mended that was built and failed; it comes as the sketch `name`."""

        def take(found: Programmed | Seeded) -> None:
            assert isinstance(found, Programmed)
            self._take_program(name, task, found)

        self._add(
            _Job(
                f"mend {name}",
                lambda: mend_program(self._client, task, text, judged, self._repairs),
                take,
            )
        )

    def recall(self, waiting: Sequence[Exchange], history: History) -> None:
        """Look for the replies to what an earlier part of the run asked about these subjects.

        Call it after `start`. Requests for programs need no recalling: `start` asks the same.
        """
        for exchange in waiting:
            about = dict(exchange.about)
            for subject in self._subjects:
                named = (about.get("sketch"), about.get("problem"))
                if exchange.kind == Kind.SEEDS and named == (subject.sketch, subject.problem.key):
                    self._recall(exchange, subject, about.get("base", ""), history)

    def poll(self) -> Advice:
        """Return what came since the last look. Never waits."""
        with self._turn:
            box, self._box = self._box, _Box()
        return Advice(tuple(box.sketches), tuple(box.seeds), tuple(box.notes))

    @property
    def waiting(self) -> bool:
        """Whether something is asked and not answered yet."""
        with self._turn:
            return self._busy or bool(self._jobs or self._pending)

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop asking. A request that is under way is left to end by itself."""
        self._stop.set()
        with self._turn:
            self._turn.notify_all()
        self._thread.join(timeout_s)

    # ---- asking ----------------------------------------------------------------------------------

    def _ask_program(self, task: Task, way: Way, sample: int) -> None:
        name = f"model-{sample + 1}" + ("-causal" if task.problem.causal else "")

        def take(found: Programmed | Seeded) -> None:
            assert isinstance(found, Programmed)
            self._take_program(name, task, found)

        self._add(
            _Job(
                f"{way} {task.problem.key} {sample}",
                lambda: propose_program(self._client, task, way, self._repairs, sample),
                take,
            )
        )

    def _ask_seeds(self, subject: Subject, history: History, peers: tuple[Finalist, ...]) -> None:
        first = seeds(subject.problem, subject.gpu, subject.space)
        default = subject.start or next(iter(first), None)
        if default is None:
            return  # no point of this space is legal
        question = Question(
            subject,
            base_of(subject, history, default),
            history,
            peers,
            tuple(self._remarks.get(_key(subject), ())),
            self._count,
        )
        self._add(
            _Job(
                _key(subject),
                lambda: propose_seeds(self._client, question),
                lambda found: self._take_seeds(subject, found),
            )
        )

    def _recall(self, exchange: Exchange, subject: Subject, base: str, history: History) -> None:
        try:
            point = subject.space.point({str(k): int(v) for k, v in json.loads(base).items()})
        except (ValueError, TypeError, AttributeError, SpaceError):
            return  # the space has changed since; a new request will be asked
        question = Question(subject, point, history)
        self._add(
            _Job(
                f"recalled {exchange.digest}",
                lambda: take_seeds(self._client, exchange.prompt, question),
                lambda found: self._take_seeds(subject, found),
            )
        )

    def _add(self, job: _Job) -> None:
        with self._turn:
            if not self._off and job.key not in self._pending:
                self._jobs[job.key] = job
                self._turn.notify_all()

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        looked = 0.0
        while not self._stop.is_set():
            with self._turn:
                if not self._jobs:
                    self._turn.wait(self._poll_s if self._pending else None)
                if self._stop.is_set():
                    return
                if self._pending and time.monotonic() - looked >= self._poll_s:
                    looked = time.monotonic()
                    for key in list(self._pending):
                        self._jobs.setdefault(key, self._pending.pop(key))
                if not self._jobs:
                    continue
                job = self._jobs.pop(next(iter(self._jobs)))
                self._busy = True
            self._work(job)

    def _work(self, job: _Job) -> None:
        """Do one job. This is the thread's outermost line: an error ends here, as a note."""
        try:
            found = job.ask()
            with self._turn:
                if found.pending:
                    self._pending[job.key] = job
                else:
                    job.take(found)
                    self._weigh(found.failure)
        except Exception as error:
            with self._turn:
                self._box.notes.append(f"the model is left out: {type(error).__name__}: {error}")
                self._leave_off()
        finally:
            with self._turn:
                self._busy = False

    def _take_program(self, name: str, task: Task, found: Programmed) -> None:
        self._box.notes += found.notes
        if not found.text:
            return
        twin = self._programs.setdefault(_canonical(found.text), name)
        if twin == name:
            self._box.sketches.append(Sketch(name, found.text, task.problem))
        else:
            self._box.notes.append(f"the model's program {name} is the same as {twin}")

    def _take_seeds(self, subject: Subject, found: Programmed | Seeded) -> None:
        assert isinstance(found, Seeded)
        key = _key(subject)
        self._box.notes += found.notes
        self._box.seeds += [Seed(subject.sketch, subject.problem, p) for p in found.proposals]
        faulty = [p.remark for p in found.proposals if p.verdict is not Verdict.ACCEPTED]
        self._remarks[key] = [*self._remarks.get(key, ()), *faulty][-REMARKS:]
        if found.failure is not None:
            return
        fresh = any(p.point is not None for p in found.proposals)
        self._nothing_new[key] = 0 if fresh else self._nothing_new.get(key, 0) + 1
        if self._nothing_new[key] == PATIENCE:
            self._box.notes.append(
                f"the model has nothing new for {subject.sketch} of {subject.problem.key}: "
                f"it is not asked about it again"
            )

    def _weigh(self, failure: ProposerError | None) -> None:
        """Leave the model alone when it will not answer: at once, or after some patience."""
        if failure is None:
            self._failures = 0
            return
        self._failures += 1
        passing = isinstance(failure, Refused | BadReply) or (
            isinstance(failure, Unreachable | RateLimited) and failure.retryable
        )
        if not passing or self._failures >= PATIENCE:
            self._leave_off()
            if not isinstance(failure, Stopped):
                self._box.notes.append(f"the run goes on without the model: {failure}")

    def _leave_off(self) -> None:
        self._off = True
        self._jobs.clear()
        self._pending.clear()


def _canonical(text: str) -> str:
    """A program as the printer writes it, comments and layout gone; the text when it is not TL."""
    try:
        return to_text(parse(text))
    except TLError:
        return text


def _key(subject: Subject) -> str:
    return f"{subject.sketch} {subject.problem.key}"
