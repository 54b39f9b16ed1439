"""What the runs of a comparison say: curves, how soon they are near the best, a plain verdict."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runs.record import History, Measured, Note, RunSpec
from space.variant import Shape

NEAR = (0.95, 0.99)  #: of the speed of the best known
LEVEL = 0.10  #: least p-value that three seeds an arm can give: all of one arm before the other's
WORTH = 0.005  #: a smaller difference in speed is none to a user
MOST_SPLITS = 20_000  #: regroupings that are all tried; of more, so many are drawn


@dataclass(frozen=True, slots=True)
class Mark:
    """A run after one more trial. `speed` is relative to the best known, over all shapes."""

    programs: int
    seconds: float  #: of compiling and judging, added up, as if nothing had been compiled before
    tokens: int
    speed: float


@dataclass(frozen=True, slots=True)
class Proposals:
    """What became of what the proposer said."""

    proposed: int = 0
    valid: int = 0  #: accepted as they stood
    repaired: int = 0
    rejected: int = 0
    correct: int = 0  #: right kernels among those tried
    best: int = 0  #: shapes whose best kernel of the run was proposed


@dataclass(frozen=True, slots=True)
class Course:
    """One run of the comparison."""

    arm: str
    seed: int
    marks: tuple[Mark, ...]
    programs: int
    seconds: float
    tokens: int
    proposals: Proposals

    @property
    def final(self) -> float:
        """Speed at the end, relative to the best known; 0 when a shape has no right kernel."""
        return self.marks[-1].speed if self.marks else 0.0

    def first(self, near: float) -> Mark | None:
        """Return the first mark within `near` of the best known, or None."""
        return next((m for m in self.marks if m.speed >= near), None)

    def speed_at(self, programs: int) -> float | None:
        """Return the speed after so many programs; None while a shape has no time."""
        before = [m.speed for m in self.marks if m.programs <= programs]
        return before[-1] if before else None

    def mean_log(self, budget: int) -> float:
        """Return the mean log speed over the budget: how good the run was on its way."""
        first = self.marks[0].speed if self.marks else 1e-3
        speeds = [self.speed_at(n) or first for n in range(1, budget + 1)]
        return statistics.fmean(math.log(s) for s in speeds)


@dataclass(frozen=True, slots=True)
class Contrast:
    """One arm against another in one respect: the difference of means and its p-value."""

    arm: str
    against: str
    what: str  #: "end" or "way"
    ratio: float  #: speed of `arm` over speed of `against`
    p: float | None  #: None with one seed

    @property
    def differs(self) -> bool:
        """Whether it is more than noise and worth a user's notice."""
        return self.p is not None and self.p <= LEVEL + 1e-9 and abs(self.ratio - 1) >= WORTH


def best_known(histories: Sequence[History], shapes: Sequence[Shape]) -> dict[Shape, float]:
    """Return the least time of each shape over all runs, in microseconds."""
    best: dict[Shape, float] = {}
    for shape in shapes:
        found = [b[1].median_us for h in histories if (b := h.best(shape)) is not None]
        if found:
            best[shape] = min(found)
    return best


def course_of(
    spec: RunSpec, history: History, notes: Sequence[Note], best: Mapping[Shape, float]
) -> Course:
    """Read one run. Its speed is a geometric mean over the shapes that any run has solved."""
    tokens = _tokens_by_trial(notes)
    so_far: dict[Shape, float] = {}
    marks: list[Mark] = []
    seconds = 0.0
    for n, record in enumerate(history, start=1):
        seconds += record.compile_s + record.judge_s
        if isinstance(record.outcome, Measured):
            for t in record.outcome.timings:
                so_far[t.shape] = min(t.median_us, so_far.get(t.shape, math.inf))
        if best and all(s in so_far for s in best):
            logs = [math.log(best[s] / so_far[s]) for s in best]
            programs = History(history.records[:n]).spent()
            spent = max((t for at, t in tokens if at < n), default=0)
            marks.append(Mark(programs, seconds, spent, math.exp(statistics.fmean(logs))))
    proposals = _proposals(spec, history, notes)
    used = max((t for _, t in tokens), default=0)
    return Course(spec.arm, spec.seed, tuple(marks), history.spent(), seconds, used, proposals)


def _tokens_by_trial(notes: Sequence[Note]) -> list[tuple[int, int]]:
    found = []
    for values in (n.as_dict() for n in notes if n.topic == "model"):
        numbers = [v if isinstance(v := values.get(k), int) else 0 for k in
                   ("trials", "tokens_in", "tokens_out")]  # fmt: skip
        found.append((numbers[0], numbers[1] + numbers[2]))
    return found


def _proposals(spec: RunSpec, history: History, notes: Sequence[Note]) -> Proposals:
    if spec.arm not in ("llm", "assisted"):
        return Proposals()
    origin = "seed" if spec.proposer == "builtin" else "model"
    tried = [r for r in history if r.origin == origin]
    correct = sum(isinstance(r.outcome, Measured) for r in tried)
    best = [b[0].origin for s in spec.shapes if (b := history.best(s)) is not None]
    if origin == "seed":  # the built-in seeds are moved to what is legal before they are proposed
        return Proposals(len(tried), len(tried), 0, 0, correct, best.count(origin))
    said = [str(n.as_dict().get("verdict")) for n in notes if n.topic == "proposal"]
    return Proposals(
        len(said), said.count("accepted"), said.count("repaired"), said.count("rejected"),
        correct, best.count(origin),
    )  # fmt: skip


def contrasts(courses: Sequence[Course], arms: Sequence[str], budget: int) -> tuple[Contrast, ...]:
    """Compare every arm with `search`, or with the first arm where there is no search."""
    against = "search" if "search" in arms else arms[0]
    found = []
    for arm in arms:
        if arm != against:
            for what in ("end", "way"):
                mine = [_value(c, what, budget) for c in courses if c.arm == arm]
                theirs = [_value(c, what, budget) for c in courses if c.arm == against]
                if mine and theirs:
                    gap = statistics.fmean(mine) - statistics.fmean(theirs)
                    p = permutation_p(mine, theirs)
                    found.append(Contrast(arm, against, what, math.exp(gap), p))
    return tuple(found)


def _value(course: Course, what: str, budget: int) -> float:
    return course.mean_log(budget) if what == "way" else math.log(max(course.final, 1e-3))


def permutation_p(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return the two-sided p-value of the difference of means under regrouping the seeds.

    Exact while the regroupings are few; None when either side has fewer than two.
    """
    if min(len(one), len(other)) < 2:
        return None
    values = [*one, *other]
    total, size = sum(values), len(one)

    def gap(chosen: Sequence[int]) -> float:
        part = sum(values[i] for i in chosen)
        return abs(part / size - (total - part) / len(other))

    observed = gap(range(size)) - 1e-12
    if math.comb(len(values), size) <= MOST_SPLITS:
        splits = [gap(c) >= observed for c in itertools.combinations(range(len(values)), size)]
        return statistics.fmean(splits)
    rng = random.Random(0)
    drawn = [gap(rng.sample(range(len(values)), size)) >= observed for _ in range(MOST_SPLITS)]
    return (sum(drawn) + 1) / (MOST_SPLITS + 1)


def verdicts(found: Sequence[Contrast], seeds: int) -> tuple[str, ...]:
    """Return the verdict in plain lines, with what the test can and cannot say."""
    lines = []
    for pair in (found[i : i + 2] for i in range(0, len(found), 2)):
        end, way = pair
        parts = [_said(end, "at the end"), _said(way, "on the way there")]
        lines.append(f"{end.arm} against {end.against}: {'; '.join(parts)}")
    least = 2 / math.comb(2 * seeds, seeds) if seeds > 1 else 1.0
    if seeds < 2:
        lines.append("one seed an arm: differences are not told from chance")
    elif least > LEVEL:
        lines.append(
            f"{seeds} seeds an arm cannot give a p-value below {least:.2f}: no difference can be "
            f"told from chance; use --seeds 3 or more"
        )
    else:
        lines.append(
            f"test: exact permutation of the seeds, two-sided; a difference is one with p at most "
            f"{LEVEL:g} and of {WORTH:.1%} or more ({seeds} seeds cannot give less "
            f"than {least:.2g})"
        )
    return tuple(lines)


def _said(c: Contrast, when: str) -> str:
    chance = "" if c.p is None else f", p = {c.p:.2f}"
    size = f"{c.ratio - 1:+.1%}{chance}"
    if abs(c.ratio - 1) < WORTH:
        return f"no difference {when} ({size})"
    if not c.differs:
        return f"no difference shown {when} ({size})"
    return f"{'faster' if c.ratio > 1 else 'slower'} {when} ({size})"
