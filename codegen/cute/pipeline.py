"""When a loop's tiles are fetched and waited for, settled before any text is emitted.

A `Copy global -> shared` in a loop says from where on the tile is resident. At that place all
warps wait for it and meet at a barrier. After a barrier every statement before it is finished in
all warps, so buffers that were last read before it may be filled again: each tile is issued at the
barrier that gives it the longest lead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TileUse:
    """A tile that a loop copies: statement positions of its Copy and of its last reader."""

    name: str
    copy_at: int
    last_use: int
    stages: int


@dataclass(frozen=True, slots=True)
class Issue:
    """At barrier `point` of iteration i, start the copy of iteration i + distance."""

    name: str
    point: int
    distance: int


@dataclass(frozen=True, slots=True)
class Point:
    """A barrier before statement `at`: tiles that must be resident, and copies started after it."""

    at: int
    ready: tuple[str, ...]
    issues: tuple[Issue, ...]
    #: commit groups that may still be in flight when the wait at this point ends
    pending: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The schedule of one loop. `prologue` lists (name, iteration) groups issued before it."""

    points: tuple[Point, ...]
    prologue: tuple[tuple[tuple[str, int], ...], ...]
    tiles: tuple[TileUse, ...]

    def distance(self, name: str) -> int:
        """How many iterations ahead `name` is fetched."""
        return next(i.distance for p in self.points for i in p.issues if i.name == name)


def _candidates(tile: TileUse, ats: list[int]) -> list[tuple[int, int, int]]:
    """(lead, point, distance) of every barrier at which `tile` may be issued."""
    ready = max(k for k, at in enumerate(ats) if at <= tile.copy_at)
    found = []
    for point, at in enumerate(ats):
        read = at > tile.last_use  # this iteration's readers are done
        distance = tile.stages if read else tile.stages - 1
        lead = distance * len(ats) + ready - point
        if lead > 0:
            found.append((lead, point, distance))
    return found


def schedule(tiles: tuple[TileUse, ...]) -> Pipeline:
    """Return the schedule of a loop over `tiles`; adds a barrier where a buffer needs one."""
    ats: list[int] = []
    for tile in sorted(tiles, key=lambda t: t.copy_at):
        # copies with no reader between them share one barrier
        if (
            ats
            and not any(ats[-1] <= t.last_use < tile.copy_at for t in tiles)
            and _adjacent(tiles, ats[-1], tile.copy_at)
        ):
            continue
        ats.append(tile.copy_at)
    for tile in tiles:
        if not _candidates(tile, ats):
            ats = sorted({*ats, tile.last_use + 1})
    chosen: dict[int, list[Issue]] = {k: [] for k in range(len(ats))}
    for tile in tiles:
        _, point, distance = max(_candidates(tile, ats), key=lambda c: (c[0], -c[1]))
        chosen[point].append(Issue(tile.name, point, distance))
    return _with_waits(tiles, ats, chosen)


def _adjacent(tiles: tuple[TileUse, ...], first: int, second: int) -> bool:
    """Whether every statement from `first` up to `second` is itself a Copy of a tile."""
    copies = {t.copy_at for t in tiles}
    return all(at in copies for at in range(first, second))


def _with_waits(
    tiles: tuple[TileUse, ...], ats: list[int], chosen: dict[int, list[Issue]]
) -> Pipeline:
    issuing = [k for k in chosen if chosen[k]]
    points = []
    for k, at in enumerate(ats):
        ready = tuple(
            t.name for t in tiles if max(j for j, a in enumerate(ats) if a <= t.copy_at) == k
        )
        pending = min(
            (
                i.distance * len(issuing)
                + sum(p < k for p in issuing)
                - sum(p <= i.point for p in issuing)
                for name in ready
                for p_issues in chosen.values()
                for i in p_issues
                if i.name == name
            ),
            default=0,
        )
        points.append(Point(at, ready, tuple(chosen[k]), pending))
    farthest = max(i.distance for issues in chosen.values() for i in issues)
    prologue: list[tuple[tuple[str, int], ...]] = []
    for iteration in range(-farthest, 0):
        for k in issuing:
            group = tuple(
                (i.name, iteration + i.distance) for i in chosen[k] if iteration + i.distance >= 0
            )
            if group or prologue:
                prologue.append(group)
    return Pipeline(tuple(points), tuple(prologue), tiles)
