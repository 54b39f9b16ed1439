"""The barriers of a Hopper decode kernel, played before any text is emitted.

What loads, the owner and, of a latent tile, the follower are lists of waits and signals in the
order in which the emitted loops do them. Playing them to the end for a few tile counts shows that
none waits for ever, and that nothing is filled again before its last reader has let go of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from codegen.errors import PlanError

#: key tiles of a split: none, fewer than, as many as and more than any ring has stages
TILES = (0, 1, 2, 3, 5, 11)


@dataclass(frozen=True, slots=True)
class Step:
    """Go on when `signal` was given `count` times (0: at once), then give `gives` (if any)."""

    signal: str = ""
    count: int = 0
    gives: str = ""


@dataclass(frozen=True, slots=True)
class Rings:
    """What the protocol depends on: parts in the order of loading, and who does what."""

    parts: tuple[str, ...]  #: in the order of loading
    scores: tuple[str, ...]  #: parts that the scores read, in the order of waiting
    scores_only: str  #: the part that only the scores read
    values: tuple[str, ...]  #: the part of V of each consumer warpgroup
    stages: int
    overlap: bool


def producer_steps(rings: Rings, tiles: int) -> Iterator[Step]:
    """Yield what the loading warp does."""
    for tile in range(tiles):
        for part in rings.parts:
            yield Step(f"empty {part}", max(0, tile + 1 - rings.stages), f"full {part}")


def owner_steps(rings: Rings, tiles: int) -> Iterator[Step]:
    """Yield what the first consumer does."""
    shares = len(rings.values) > 1

    def score(tile: int) -> Iterator[Step]:
        for part in rings.scores:
            yield Step(f"full {part}", tile + 1)

    def publish(tile: int) -> Iterator[Step]:
        if shares:
            yield Step("P empty", tile, "P full")

    def multiply(tile: int) -> Iterator[Step]:
        yield Step(f"full {rings.values[0]}", tile + 1)

    scored = Step(gives=f"empty {rings.scores_only}")
    multiplied = Step(gives=f"empty {rings.values[0]}")
    for tile in range(tiles):
        yield from score(tile)
        if rings.overlap and tile:
            yield from multiply(tile - 1)
        yield scored
        if rings.overlap and tile:
            yield multiplied
        yield from publish(tile)
        if not rings.overlap:
            yield from multiply(tile)
            yield multiplied
    if rings.overlap and tiles:
        yield from multiply(tiles - 1)
        yield multiplied
    if shares:
        yield Step("P empty", tiles, "P full")  # the inverse of the sums


def follower_steps(rings: Rings, tiles: int) -> Iterator[Step]:
    """Yield what the second consumer of a latent tile does."""
    for tile in range(tiles):
        yield Step("P full", tile + 1, "P empty")
        yield Step(f"full {rings.values[1]}", tile + 1)
        yield Step(gives=f"empty {rings.values[1]}")
    yield Step("P full", tiles + 1)


def check_decode_protocol(rings: Rings) -> None:
    """Play the protocol. Raises PlanError naming what everybody waits for."""
    for tiles in TILES:
        actors = [producer_steps(rings, tiles), owner_steps(rings, tiles)]
        if len(rings.values) > 1:
            actors.append(follower_steps(rings, tiles))
        given = play(actors)
        for part in rings.parts:
            if given[f"full {part}"] != tiles or given[f"empty {part}"] != tiles:
                raise PlanError(f"{part} is not filled and let go of once for each tile")


def play(actors: Iterable[Iterator[Step]]) -> Counter[str]:
    """Run all actors to their ends and return the signals given.

    Raises PlanError when none can go on.
    """
    given: Counter[str] = Counter()
    running = [(actor, next(actor, None)) for actor in actors]
    while any(step is not None for _, step in running):
        moved = False
        for k, (actor, step) in enumerate(running):
            while step is not None and given[step.signal] >= step.count:
                if step.gives:
                    given[step.gives] += 1
                step = next(actor, None)
                moved = True
            running[k] = (actor, step)
        if not moved:
            stuck = ", ".join(f"{s.signal} {s.count}" for _, s in running if s is not None)
            raise PlanError(f"the barriers deadlock: everybody waits ({stuck})")
    return given
