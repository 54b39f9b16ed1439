"""The model's part in a search: proposals into lanes, sketches as lanes, more when it stalls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from codegen.errors import TLError
from llm_proposer.advisor import Advice, Seed, Sketch
from llm_proposer.describe import Subject
from llm_proposer.prompt import Task
from llm_proposer.session import BATCH, Session
from runs.files import safe_name
from runs.record import Finalist, History, Note, Rejected, RunSpec, TrialClass
from space.gpu import GpuSpec
from space.variant import Problem, SpaceError
from tuner.errors import UsageError
from tuner.lanes import Lane, drop_weak, lanes_of
from tuner.loop import Journal
from tuner.reference import function_text
from tuner.reference_sketches import completed
from tuner.sketches import sketched_spaces

STALL = 12  #: trials of a lane without a better one before the model is asked again
MEND_AFTER = 3  #: trials of a model's sketch, none right, before it is to be mended
BATCH_PATIENCE_S = 8.0  #: how long a search with nothing to do waits for replies in a folder
#: Failures that a change of the program may mend; the others are the point's or the machine's.
_OF_THE_PROGRAM = (
    TrialClass.WRONG_OUTPUT, TrialClass.PRECISION, TrialClass.INVALID_PROPOSAL,
    TrialClass.COMPILE_ERROR, TrialClass.NONDETERMINISTIC,
)  # fmt: skip


class ModelGuide:
    """Stands between an advisor and a search; every method returns at once."""

    def __init__(
        self,
        spec: RunSpec,
        gpu: GpuSpec,
        model: Session,
        journal: Journal,
        say: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._gpu = gpu
        self._model = model
        self._advisor = model.advisor
        self._journal = journal
        self._say = say
        self._function = "" if spec.reference is None else function_text(spec.reference)
        self.peers: tuple[Finalist, ...] = ()
        self._asked_at: dict[tuple[str, str], int] = {}
        self._mended: set[str] = set()
        self._taken: set[tuple[str, str, str]] = set()
        self._news_at = time.monotonic()

    def begin(self, lanes: Sequence[Lane], history: History, sketches: bool) -> None:
        """Ask for the first seeds, and for programs with `sketches`; take up what still waits."""
        by_mask = {lane.problem.causal: lane.problem for lane in reversed(lanes)}
        tasks = [self._task(p) for p in by_mask.values()] if sketches else []
        self._advisor.start(tasks, [self._subject(lane) for lane in lanes], history=history)
        self._advisor.recall(self._model.waiting, history)

    def look(self, lanes: list[Lane], history: History) -> None:
        """Take in what came, drop weak lanes, ask again where the search stalls."""
        if advice := self._advisor.poll():
            self._news_at = time.monotonic()
            self._take(advice, lanes, history)
        for line in drop_weak(lanes):
            self._tell(line)
        stalled = [lane for lane in lanes if self._is_stalled(lane)]
        if stalled and not self._advisor.waiting:
            for lane in stalled:
                self._asked_at[_key(lane)] = lane.settled
            self._advisor.tell(history, self.peers, [self._subject(lane) for lane in stalled])
            self._news_at = time.monotonic()
        self._mend(lanes, history)

    def await_first(self, lanes: list[Lane], history: History, seconds: float) -> bool:
        """Wait before a search for first proposals to every lane; return whether any came.

        Only for a comparison, whose arms would otherwise be named for proposals they never had.
        """
        deadline = time.monotonic() + seconds
        while True:
            waiting = self._advisor.waiting
            self.look(lanes, history)
            if not waiting or all(lane.proposed for lane in lanes) or time.monotonic() > deadline:
                return any(lane.proposed for lane in lanes)
            time.sleep(0.05)

    @property
    def awaited(self) -> bool:
        """Whether a run of proposals alone may still get some."""
        if self._spec.arm != "llm":
            return False
        patient = time.monotonic() - self._news_at < BATCH_PATIENCE_S
        return self._advisor.waiting and (patient or not self._spec.proposer.startswith(BATCH))

    def close(self) -> None:
        """Stop asking, and say what was still to come."""
        for text in self._advisor.poll().notes:
            self._tell(text)
        if self._advisor.waiting:
            later = self._spec.proposer.startswith(BATCH)
            more = "; --resume takes in replies that come later" if later else ""
            self._tell(f"the search ended before the model had answered everything{more}")
        self._advisor.close()

    def _subject(self, lane: Lane) -> Subject:
        task = self._task(lane.problem)
        space, start = lane.legal.space, lane.seeds[0][0] if lane.seeds else None
        return Subject(lane.sketch, lane.text, lane.problem, self._gpu, space, task.shapes, start)

    def _task(self, problem: Problem) -> Task:
        shapes = self._spec.shapes_of(problem)
        return Task(problem, self._gpu, shapes, reference=self._function)

    def _is_stalled(self, lane: Lane) -> bool:
        since = max(lane.improved_at, self._asked_at.get(_key(lane), 0))
        if lane.dropped or lane.settled <= since:
            return False
        if not lane.sampled:  # proposals are all it has: ask when they have all ended
            return lane.settled == len(lane.taken) and lane.used_up
        return lane.settled - since >= STALL

    # ---- taking in -------------------------------------------------------------------------------

    def _take(self, advice: Advice, lanes: list[Lane], history: History) -> None:
        for text in advice.notes:
            self._tell(text)
        for sketch in advice.sketches:
            self._take_sketch(sketch, lanes)
        for seed in advice.seeds:
            self._take_seed(seed, lanes)
        self._note("model", trials=len(history), **dict(self._model.ledger.spent.facts))

    def _take_seed(self, seed: Seed, lanes: Sequence[Lane]) -> None:
        p = seed.proposal
        key = (seed.sketch, seed.problem.key, p.remark)
        if key in self._taken:
            return  # a reply to what was asked before a resume, and asked again since
        self._taken.add(key)
        self._note(
            "proposal", sketch=seed.sketch, problem=seed.problem.key, given=p.given[:500],
            verdict=str(p.verdict), reason=p.reason[:500],
            point="" if p.point is None else p.point.key,
        )  # fmt: skip
        if p.reason:
            self._say(f"seed of the model for {seed.problem.key}: {p.remark}")
        for lane in lanes:
            if p.point is not None and (lane.sketch, lane.problem) == (seed.sketch, seed.problem):
                lane.offer(p.point)

    def _take_sketch(self, sketch: Sketch, lanes: list[Lane]) -> None:
        """Add a lane of the sketch for every problem under its mask."""
        text, name = sketch.text, sketch.name
        try:
            if self._spec.reference is not None:
                text = completed(text, self._spec, self._spec.reference)
            if any((lane.sketch, lane.text) == (name, text) for lane in lanes):
                return  # an earlier part of the run took it in
            while any(lane.sketch == name for lane in lanes):
                name += "-mended"
            spec = replace(self._spec, sketches=((name, text),))
            found = lanes_of(spec, self._gpu, sketched_spaces(spec, self._gpu))
        except (UsageError, SpaceError, TLError) as error:
            self._tell(f"{name} of the model is not searched: {error}")
            return
        new = [lane for lane in found if len(lane.legal)]
        if not new:
            self._tell(f"{name} of the model is not searched: no configuration of it is legal")
            return
        self._note("sketch", name=name, text=text)
        self._say(f"{name} of the model is searched too, for {len(new)} problems")
        lanes += new

    def _mend(self, lanes: Sequence[Lane], history: History) -> None:
        """Have a sketch of the model mended, once, when it fails again and again."""
        for lane in lanes:
            of_model = lane.sketch not in dict(self._spec.sketches)
            if not of_model or lane.sketch in self._mended or lane.best is not None:
                continue
            failed = [
                r.outcome
                for r in history
                if (r.sketch, r.problem) == (lane.sketch, lane.problem)
                and isinstance(r.outcome, Rejected)
                and r.outcome.trial_class in _OF_THE_PROGRAM
            ]
            if len(failed) >= MEND_AFTER:
                self._mended.add(lane.sketch)
                lane.dropped = True
                self._tell(f"{lane.sketch} of the model fails: it is asked to mend it")
                task = self._task(lane.problem)
                self._advisor.mend(lane.sketch, task, lane.text, failed[0])

    def _tell(self, text: str) -> None:
        self._say(text)
        self._note("model_said", text=text[:2000])

    def _note(self, topic: str, **values: str | int | float | None) -> None:
        """Note it; half a surrogate pair in what a model said becomes a question mark."""
        clean = ((k, _encodable(v) if isinstance(v, str) else v) for k, v in values.items())
        self._journal.append(Note(topic, tuple(clean)))


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


def model_sketches(notes: Sequence[Note]) -> tuple[tuple[str, str], ...]:
    """Return the sketches that a model gave to an earlier part of the run: name and text.

    Raises StoreError when the journal calls one by what cannot be a file's name.
    """
    told = [n.as_dict() for n in notes if n.topic == "sketch"]
    return tuple((safe_name(str(v.get("name")), "sketch name"), str(v.get("text"))) for v in told)


def _key(lane: Lane) -> tuple[str, str]:
    return lane.sketch, lane.problem.key
