"""The barrier protocol of a Hopper kernel, played before any text is emitted.

Producer and consumers are lists of waits and arrivals in the order in which the emitted loops do
them. Playing them to the end for a few tile counts shows that none can wait for ever, and that no
slot is filled before all its readers have let go of it. The consumers' turns at the tensor cores
are waits too. Blocks of a cluster are played together: each fills a part of a key tile's slot in
all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from codegen.errors import PlanError

#: key tiles of successive blocks of rows: empty, shorter than, equal to and longer than the rings
BLOCKS = (3, 0, 1, 5, 2)
#: key tiles that a warpgroup sees less than the one below it: of 64 keys and more, and of 32
HIDDEN_TILES = (1, 2)
#: rings whose tiles the blocks of a cluster load together
SHARED = ("keys", "values")


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
    """One block's ring. `own` are the arrivals on `empty` of this block's consumers."""

    stages: int
    consumers: int
    loaders: int  #: blocks that each fill a part of a slot
    full: dict[int, int] = field(default_factory=dict)  #: use -> parts that are filled
    empty: dict[int, int] = field(default_factory=dict)  #: use -> consumers that let go of it
    own: dict[int, int] = field(default_factory=dict)

    def filled(self, index: int) -> bool:
        """Whether use `index` may be read: all parts of it have come."""
        return self.full.get(index, 0) == self.loaders

    def released(self, index: int) -> bool:
        """Whether the barrier says that use `index` may be filled."""
        last, expected = index - self.stages, self.consumers * self.loaders
        return last < 0 or self.empty.get(last, 0) == expected

    def read(self, index: int) -> bool:
        """Whether this block's consumers still read the slot that use `index` will fill."""
        last = index - self.stages
        return last >= 0 and self.own.get(last, 0) < self.consumers


@dataclass(slots=True)
class _Block:
    rings: dict[str, _Ring]
    turns: dict[str, int]


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


def reached(ring: str, block: int, cluster: int) -> tuple[int, ...]:
    """Return the blocks in which an arrival of `block` on a ring's barrier counts."""
    return tuple(range(cluster)) if ring in SHARED else (block,)


def check_protocol(
    row_stages: int,
    stages: int,
    consumers: int,
    overlap: bool,
    skip: bool,
    late_rows: bool,
    pingpong: bool,
    cluster: int = 1,
) -> None:
    """Play the protocol. Raises PlanError naming the barrier on which everybody waits."""
    for hidden in HIDDEN_TILES if skip else (0,):
        for slow in range(cluster):
            _play(
                row_stages, stages, consumers, overlap, hidden, late_rows, pingpong, cluster, slow
            )  # fmt: skip


def _play(
    row_stages: int,
    stages: int,
    consumers: int,
    overlap: bool,
    hidden: int,
    late_rows: bool,
    pingpong: bool,
    cluster: int,
    slow: int,
) -> None:
    """Play to the end, the consumers of block `slow` taking a step only when nobody else can."""
    blocks: list[_Block] = []
    actors: list[tuple[int, Iterator[Step]]] = []
    for block in range(cluster):
        rings = {name: _Ring(stages, consumers, cluster) for name in SHARED}
        rings["rows"] = _Ring(row_stages, consumers, 1)
        turns = {str(k): 0 for k in range(consumers)}
        turns["0"] = 1  # which the last consumer passes before its first tile
        blocks.append(_Block(rings, turns))
        actors.append((block, producer_steps(overlap)))
        for k in range(consumers):
            order = (str(k), str((k + 1) % consumers)) if pingpong else None
            later = (cluster - block) * consumers - 1 - k  # warpgroups with later rows
            actors.append((block, consumer_steps(overlap, later * hidden, late_rows, order)))
    first = slow * (consumers + 1) + 1
    actors += [actors.pop(first) for _ in range(consumers)]
    current = [next(steps, None) for _, steps in actors]
    while any(step is not None for step in current):
        for k, (block, steps) in enumerate(actors):
            if (step := current[k]) is not None and _do(blocks, block, step):
                current[k] = next(steps, None)
                break
        else:
            stuck = ", ".join(f"{s.side} {s.ring} {s.index}" for s in current if s is not None)
            raise PlanError(f"the barriers deadlock: everybody waits ({stuck})")


def _do(blocks: list[_Block], block: int, step: Step) -> bool:
    """Do a step of a block if it can be done now."""
    here, index = blocks[block], step.index
    if step.side == "turn":
        if step.action == "wait":
            return here.turns[step.ring] > index
        here.turns[step.ring] += 1
        return True
    own = here.rings[step.ring]
    if step.action == "wait":
        return own.released(index) if step.side == "empty" else own.filled(index)
    if step.side == "empty":
        own.own[index] = own.own.get(index, 0) + 1
    for other in reached(step.ring, block, len(blocks)):
        ring = blocks[other].rings[step.ring]
        if step.side == "full" and ring.read(index):
            raise PlanError(f"the barriers let {step.ring} {index} overwrite a slot that is read")
        arrivals = ring.full if step.side == "full" else ring.empty
        arrivals[index] = arrivals.get(index, 0) + 1
    return True
