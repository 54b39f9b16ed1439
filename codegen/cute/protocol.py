"""The barrier protocol of a Hopper kernel, played before any text is emitted.

Producer and consumers are lists of waits and arrivals in the order in which the emitted loops do
them. Playing them to the end for a few tile counts shows that none can wait for ever, and that no
slot is filled before all its readers have let go of it. The consumers' turns at the tensor cores
are waits too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from codegen.errors import PlanError

#: key tiles of successive blocks of rows: empty, shorter than, equal to and longer than the rings
BLOCKS = (3, 0, 1, 5, 2)
#: key tiles that a warpgroup sees less than the one below it: of 64 keys and more, and of 32
HIDDEN_TILES = (1, 2)


@dataclass(frozen=True, slots=True)
class Step:
    """`wait` for or `arrive` on the full or empty barrier of use `index` of a ring.

    With side "turn" the ring is a consumer's number, and `index` counts its turns.
    """

    action: str  #: "wait" or "arrive"
    side: str  #: "full", "empty" or "turn"
    ring: str
    index: int


@dataclass(slots=True)
class _Ring:
    stages: int
    consumers: int
    full: int = 0  #: uses that are filled
    empty: dict[int, int] = field(default_factory=dict)  #: use -> consumers that let go of it

    def released(self, index: int) -> bool:
        """Whether use `index` may be filled: all consumers let go of its slot's last use."""
        return index < self.stages or self.empty.get(index - self.stages, 0) == self.consumers


def producer_steps(overlap: bool) -> Iterator[Step]:
    """Yield what the producer does: rows, then keys and values in their order of use."""
    counts = {"rows": 0, "keys": 0, "values": 0}

    def load(ring: str) -> Iterator[Step]:
        yield Step("wait", "empty", ring, counts[ring])
        yield Step("arrive", "full", ring, counts[ring])
        counts[ring] += 1

    for tiles in BLOCKS:
        yield from load("rows")
        for i in range(tiles + 1 if overlap else tiles):
            if i < tiles:
                yield from load("keys")
            if not overlap or i > 0:
                yield from load("values")


def consumer_steps(
    overlap: bool, passed_over: int, late_rows: bool, turns: tuple[str, str] | None = None
) -> Iterator[Step]:
    """Yield what a consumer does that passes over the last `passed_over` key tiles of a block.

    `late_rows` says that the row tile is let go only after the output was stored from it, `turns`
    names this consumer and the one that has the next turn, if they take turns.
    """
    counts = {"rows": 0, "keys": 0, "values": 0, "turns": 0}

    def take_turn() -> Iterator[Step]:
        if turns is not None:
            yield Step("wait", "turn", turns[0], counts["turns"])

    def pass_turn() -> Iterator[Step]:
        if turns is not None:
            yield Step("arrive", "turn", turns[1], counts["turns"])
            counts["turns"] += 1

    def use(ring: str) -> Iterator[Step]:
        yield Step("wait", "full", ring, counts[ring])

    def release(ring: str) -> Iterator[Step]:
        yield Step("arrive", "empty", ring, counts[ring])
        counts[ring] += 1

    for tiles in BLOCKS:
        own = max(tiles - passed_over, 0)
        yield from use("rows")
        for i in range(own):
            yield from use("keys")
            yield from take_turn()
            if overlap and i > 0:
                yield from use("values")
            yield from pass_turn()
            yield from release("keys")
            if overlap and i > 0:
                yield from release("values")
            if not overlap:
                yield from use("values")
                yield from release("values")
        if overlap and own:
            yield from use("values")
        if not late_rows:
            yield Step("arrive", "empty", "rows", counts["rows"])
        if overlap and own:
            yield from release("values")
        for _ in range(tiles - own):
            for ring in ("keys", "values"):
                yield from use(ring)
                yield from release(ring)
            yield from take_turn()
            yield from pass_turn()
        if late_rows:
            yield Step("arrive", "empty", "rows", counts["rows"])
        counts["rows"] += 1


def check_protocol(
    row_stages: int,
    stages: int,
    consumers: int,
    overlap: bool,
    skip: bool,
    late_rows: bool,
    pingpong: bool,
) -> None:
    """Play the protocol. Raises PlanError naming the barrier on which everybody waits."""
    for hidden in HIDDEN_TILES if skip else (0,):
        _play(row_stages, stages, consumers, overlap, hidden, late_rows, pingpong)


def _play(
    row_stages: int,
    stages: int,
    consumers: int,
    overlap: bool,
    hidden: int,
    late_rows: bool,
    pingpong: bool,
) -> None:
    rings = {
        "rows": _Ring(row_stages, consumers),
        "keys": _Ring(stages, consumers),
        "values": _Ring(stages, consumers),
    }
    turns = {str(k): 0 for k in range(consumers)}
    turns["0"] = 1  # which the last consumer passes before its first tile
    actors = [producer_steps(overlap)]
    for k in range(consumers):
        order = (str(k), str((k + 1) % consumers)) if pingpong else None
        actors.append(consumer_steps(overlap, (consumers - 1 - k) * hidden, late_rows, order))
    current = [next(a, None) for a in actors]
    while any(step is not None for step in current):
        moved = False
        for k, actor in enumerate(actors):
            while (step := current[k]) is not None and _do(rings, turns, step):
                current[k] = next(actor, None)
                moved = True
        if not moved:
            stuck = ", ".join(f"{s.side} {s.ring} {s.index}" for s in current if s is not None)
            raise PlanError(f"the barriers deadlock: everybody waits ({stuck})")


def _do(rings: dict[str, _Ring], turns: dict[str, int], step: Step) -> bool:
    """Do a step if it can be done now."""
    if step.side == "turn":
        if step.action == "wait":
            return turns[step.ring] > step.index
        turns[step.ring] += 1
        return True
    ring = rings[step.ring]
    if step.action == "wait":
        return ring.released(step.index) if step.side == "empty" else ring.full > step.index
    if step.side == "full":
        ring.full = step.index + 1
    else:
        ring.empty[step.index] = ring.empty.get(step.index, 0) + 1
    return True
