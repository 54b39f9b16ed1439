"""The legal points of a space, enumerated by the parameters that decide legality."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from space.constraints import Census, violated
from space.gpu import GpuSpec
from space.hopper import WARPGROUP_ROWS
from space.params import Point, Space
from space.variant import DType, Phase, Problem

#: The parameters that some constraint reads; the others are legal at every choice.
DECISIVE = frozenset(
    {
        "BM",
        "BN",
        "warps",
        "column_warps",
        "stages",
        "swizzle",
        "q_in_registers",
        "p_in_registers",
        "blocks_per_sm",
        "epilogue_smem",
        "consumer_warpgroups",
        "q_stages",
        "out_buffer",
        "overlap",
        "pingpong",
        "skip",
        "late_wait",
        "integer_max",
        "rescale_threshold",
        "persistent",
        "combine_groups",
        "cluster",
        "q_panels",
        "split_cluster",
        "column_blocks",
    }
)


#: The parameter whose further choices only forbid more, by the last constraints: what is illegal at
#: its first choice is so, for the same reason, at all.
ASKED_LAST = "cluster"


@dataclass(frozen=True, slots=True)
class LegalPoints:
    """The legal points: `cores` holds the decisive parameters, every filling of the rest goes."""

    problem: Problem
    gpu: GpuSpec
    space: Space
    cores: tuple[Point, ...]
    census: Census

    def __len__(self) -> int:
        return self.census.legal

    def __contains__(self, point: Point) -> bool:
        offered = all(point[p.name] in p.choices for p in self.space.params)
        return offered and violated(self.problem, point, self.gpu) is None

    def __iter__(self) -> Iterator[Point]:
        fillings = [p.as_dict() for p in _fillings(self.space).points()]
        for core in self.cores:
            for filling in fillings:
                yield self._point(core.as_dict() | filling)

    def draw(self, rng: random.Random) -> Point:
        """Return one legal point, each as likely as any other. There must be one."""
        free = _fillings(self.space).params
        filling = {p.name: rng.choice(p.choices) for p in free}
        return self._point(rng.choice(self.cores).as_dict() | filling)

    def mended(self, point: Point) -> Point | None:
        """Return `point` if it is legal, or with its warpgroups set to its rows, or None."""
        if point in self:
            return point
        values = point.as_dict()
        if "consumer_warpgroups" in values and "split_blocks" not in values:
            # follows from BM in prefill: a draw need not guess both right
            values["consumer_warpgroups"] = values["BM"] // WARPGROUP_ROWS
            if (mended := self._point(values)) in self:
                return mended
        return None

    def _point(self, values: Mapping[str, int]) -> Point:
        return Point(tuple((name, values[name]) for name in self.space.names))


def legal_points(problem: Problem, gpu: GpuSpec, space: Space) -> LegalPoints:
    """Judge every choice of the decisive parameters once, and count the points by verdict."""
    rest = _fillings(space).size()
    cores, pruned = _judged(
        problem.head_dim, problem.head_dim_v, problem.phase, problem.page, _limits(gpu),
        _decisive(space),
    )  # fmt: skip
    counts = tuple((name, n * rest) for name, n in pruned)
    return LegalPoints(problem, gpu, space, cores, Census(len(cores) * rest, space.size(), counts))


@functools.lru_cache(maxsize=64)
def _judged(
    head_dim: int, head_dim_v: int, phase: Phase, page: int, gpu: GpuSpec, decisive: Space
) -> tuple[tuple[Point, ...], tuple[tuple[str, int], ...]]:
    """Return the legal points of the decisive parameters and counts of the others by reason.

    Legality follows from head dims, tiles and the card's limits; variant, mask, which 16-bit type
    and the card's rates do not matter.
    """
    problem = Problem("", DType.FP16, head_dim, head_dim_v, False, phase, page)
    cores = []
    pruned: dict[str, int] = {}
    first, further = _asked_last(decisive)
    parts = _parts(first)
    if (torn := first.size() - sum(p.size() for p in parts)) > 0:
        pruned["rows_per_warpgroup"] = torn * (1 + len(further))
    for core in (core for part in parts for core in part.points()):
        found = violated(problem, core, gpu)
        if found is not None:
            pruned[found[0]] = pruned.get(found[0], 0) + 1 + len(further)
            continue
        cores.append(core)
        for other in (core.replace(**{ASKED_LAST: choice}) for choice in further):
            if (found := violated(problem, other, gpu)) is None:
                cores.append(other)
            else:
                pruned[found[0]] = pruned.get(found[0], 0) + 1
    return tuple(cores), tuple(pruned.items())


def _limits(gpu: GpuSpec) -> GpuSpec:
    """The card without what does not decide legality, so that cards with equal limits are one."""
    return replace(
        gpu, name="", title="", num_sms=0, tensor_tflops=0.0, bandwidth_gbs=0.0, l2_bytes=0,
        clock_ghz=0.0,
    )  # fmt: skip


def _asked_last(space: Space) -> tuple[Space, tuple[int, ...]]:
    """Split a space into that of the first choice of ASKED_LAST and the further choices."""
    if ASKED_LAST not in space.names:
        return space, ()
    first, *further = space.param(ASKED_LAST).choices
    return space.restrict({ASKED_LAST: (first,)}), tuple(further)


def _parts(space: Space) -> tuple[Space, ...]:
    """Split a Hopper space by its rows, each with the warpgroups that follow from them.

    What is left out breaks `rows_per_warpgroup`, the constraint that is asked first.
    """
    if "consumer_warpgroups" not in space.names or "combine_groups" in space.names:
        return (space,)
    offered = space.param("consumer_warpgroups").choices
    return tuple(
        space.restrict({"BM": (rows,), "consumer_warpgroups": (rows // WARPGROUP_ROWS,)})
        for rows in space.param("BM").choices
        if rows // WARPGROUP_ROWS in offered
    )


def _decisive(space: Space) -> Space:
    return Space(tuple(p for p in space.params if p.name in DECISIVE))


def _fillings(space: Space) -> Space:
    return Space(tuple(p for p in space.params if p.name not in DECISIVE))
