"""A run's lanes: one study for each sketch and problem, and where its next point comes from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llm_proposer.seeds import seeds
from runs.errors import StoreError
from runs.record import Broken, History, Rejected, RunSpec, TrialClass, TrialRecord
from space.gpu import GpuSpec
from space.legal import LegalPoints, legal_points
from space.params import Point, Space
from space.variant import Problem
from tuner.sampler import Sampler
from tuner.score import focus_count, focus_losses

TRYOUT = 10  #: trials before a sketch can be dropped for another of its problem
WEAK = 0.03  #: how much slower than the best sketch it may be and stay


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point to be built and judged, and who proposed it."""

    sketch: str
    text: str
    problem: Problem
    point: Point
    origin: str


@dataclass(slots=True)
class Lane:
    """One sketch searched for one problem. `taken` holds the points tried or in flight."""

    sketch: str
    text: str
    problem: Problem
    gpu: GpuSpec
    legal: LegalPoints
    seeds: tuple[tuple[Point, str], ...]  #: with their origin
    sampler: Sampler
    taken: set[str] = field(default_factory=set)
    best: tuple[float, Point] | None = None
    #: source → loss of each focus
    digests: dict[str, tuple[float, ...] | None] = field(default_factory=dict)
    used_up: bool = False
    proposed: list[Point] = field(default_factory=list)  #: by the model, best first
    sampled: bool = True  #: whether the sampler is asked
    siblings: bool = True  #: whether what proved best under the other mask is tried
    settled: int = 0
    improved_at: int = 0  #: trials settled when the best was found
    dropped: bool = False

    def offer(self, point: Point) -> None:
        """Queue a point that the model proposes."""
        self.proposed.append(point)
        self.used_up = False

    def candidate(self, point: Point, origin: str) -> Candidate:
        """Return `point` as a candidate of this lane."""
        return Candidate(self.sketch, self.text, self.problem, point, origin)

    def offers(self, point: Point) -> bool:
        """Whether a point has the parameters of this lane's space, each with one of its choices."""
        params = self.legal.space.params
        values = point.as_dict()
        known = len(point.items) == len(params) == len(values)
        return known and all(values.get(p.name) in p.choices for p in params)

    def settle(self, record: TrialRecord) -> None:
        """Tell the sampler how a point ended; it must have been opened."""
        self.settled += 1
        outcome = record.outcome
        losses = focus_losses(outcome, self.problem.dtype, self.gpu, self.sampler.foci)
        if isinstance(outcome, Rejected) and outcome.trial_class is TrialClass.DUPLICATE:
            if record.source_digest not in self.digests:
                self.sampler.drop(record.point)
                return
            losses = self.digests[record.source_digest]
        elif isinstance(outcome, Broken):
            self.sampler.drop(record.point)
            return
        if record.source_digest:
            self.digests.setdefault(record.source_digest, losses)
        if losses is not None and (self.best is None or losses[0] < self.best[0]):
            self.best = (losses[0], record.point)
            self.improved_at = self.settled
        self.sampler.tell(record.point, losses)


def lanes_of(
    spec: RunSpec,
    gpu: GpuSpec,
    sketches: Sequence[tuple[str, str, Problem, Space]],
    shortlist: Iterable[tuple[Problem, Point]] = (),
) -> tuple[Lane, ...]:
    """Make the lanes of a run. `shortlist` points go before the built-in seeds."""
    early = tuple(shortlist)
    lanes = []
    for name, text, problem, space in sketches:
        legal = legal_points(problem, gpu, space)
        first = [
            (p, "first" if n == 0 else "seed") for n, p in enumerate(seeds(problem, gpu, space))
        ]
        listed = [(p, "shortlist") for of, p in early if of == problem and p in legal]
        # the known-good point stays first: it tells a broken machine from a bad kernel
        ordered = (*first[:1], *listed, *(first[1:] if _is_seeded(spec) else ()))
        served = sum(problem.serves(s) for s in spec.shapes)
        guided = spec.arm != "random"
        sampler = Sampler(legal, f"{spec.seed}/{name}/{problem.key}", focus_count(served), guided)
        lane = Lane(name, text, problem, gpu, legal, ordered, sampler)
        lane.sampled = spec.arm != "llm"
        lane.siblings = lane.sampled and guided
        lanes.append(lane)
    return tuple(lanes)


def _is_seeded(spec: RunSpec) -> bool:
    """Whether the built-in seeds are tried: they are the proposals of the builtin proposer."""
    return not spec.arm or (spec.arm in ("llm", "assisted") and spec.proposer == "builtin")


def replay(lanes: Sequence[Lane], history: History) -> None:
    """Bring fresh lanes to where `history` left them.

    Raises StoreError on a trial that cannot be one of this run.
    """
    by_key = {(lane.sketch, lane.problem): lane for lane in lanes}
    for position, record in enumerate(history):
        lane = by_key.get((record.sketch, record.problem))
        if lane is None or not lane.offers(record.point) or record.index != position:
            raise StoreError(
                f"the journal's trial number {position} ({record.sketch[:80]!a}, "
                f"{record.problem.key}, index {record.index}) is none of this run's space"
            )
        if record.point.key not in lane.taken:
            lane.taken.add(record.point.key)
            lane.sampler.open(record.point)
            lane.settle(record)


def propose(lanes: Sequence[Lane]) -> Candidate | None:
    """Return the next candidate; None when all lanes are used up.

    It is for the problem that has had fewest, and there from the lane that has had fewest.
    """
    had: dict[Problem, int] = {}
    for lane in lanes:
        had[lane.problem] = had.get(lane.problem, 0) + len(lane.taken)
    for lane in sorted(lanes, key=lambda x: (had[x.problem], len(x.taken))):
        if lane.used_up or lane.dropped:
            continue
        found = _next_point(lane, lanes)
        if found is not None:
            point, origin = found
            lane.taken.add(point.key)
            return lane.candidate(point, origin)
        lane.used_up = True
    return None


def drop_weak(lanes: Sequence[Lane]) -> list[str]:
    """Take lanes out that lose against another of their problem; return a line for each.

    A lane is judged after `TRYOUT` trials of its own, against one that had as many.
    """
    said = []
    for lane in lanes:
        rivals = [
            (o.best[0], o.sketch)
            for o in lanes
            if o is not lane and o.problem == lane.problem
            if not o.dropped and o.best is not None and o.settled >= TRYOUT
        ]
        if lane.dropped or lane.settled < TRYOUT or not rivals:
            continue
        best, rival = min(rivals)
        behind = None if lane.best is None else math.exp(lane.best[0] - best) - 1
        if behind is None or behind > WEAK:
            lane.dropped = True
            how = "it has no right kernel" if behind is None else f"{behind:.0%} behind {rival}"
            said.append(
                f"sketch {lane.sketch} of {lane.problem.key} is dropped after "
                f"{lane.settled} trials: {how}"
            )
    return said


def _next_point(lane: Lane, lanes: Sequence[Lane]) -> tuple[Point, str] | None:
    """The known-good point, then proposals, seeds, the other mask's best, the sampler."""

    def taken(point: Point) -> bool:
        return point.key in lane.taken

    proposed = [(p, "model") for p in lane.proposed]
    siblings = _from_siblings(lane, lanes) if lane.siblings else []
    for point, origin in (*lane.seeds[:1], *proposed, *lane.seeds[1:], *siblings):
        if point in lane.legal and not taken(point):
            lane.sampler.open(point)
            return point, origin
    asked = lane.sampler.ask(taken) if lane.sampled else None
    return None if asked is None else (asked, "sampler")


def _from_siblings(lane: Lane, lanes: Sequence[Lane]) -> list[tuple[Point, str]]:
    """The best points of lanes with the same head dims, moved into this lane's choices."""
    dims = (lane.problem.head_dim, lane.problem.head_dim_v)
    points = []
    for other in lanes:
        if other is lane or other.best is None:
            continue
        if (other.problem.head_dim, other.problem.head_dim_v) == dims:
            values = other.best[1].as_dict()
            moved = tuple(
                (p.name, v if (v := values.get(p.name)) in p.choices else p.choices[0])
                for p in lane.legal.space.params
            )
            points.append((Point(tuple((n, int(v)) for n, v in moved)), "sibling"))
    return points
