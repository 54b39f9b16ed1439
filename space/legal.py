"""The legal points of a space, enumerated by the parameters that decide legality."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from space.constraints import CONSTRAINTS, Census, violated
from space.gpu import GpuSpec
from space.params import Param, Point, Space
from space.variant import Problem

#: The parameters that some constraint reads; the others are legal at every choice.
DECISIVE = frozenset(
    {
        "BM",
        "BN",
        "warps",
        "stages",
        "swizzle",
        "q_in_registers",
        "p_in_registers",
        "blocks_per_sm",
    }
)


@dataclass(frozen=True, slots=True)
class LegalPoints:
    """The legal points: `cores` fixes the decisive parameters, every filling of the rest goes."""

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
                yield core.replace(**filling)

    def draw(self, rng: random.Random) -> Point:
        """Return one legal point, each as likely as any other. There must be one."""
        free = _fillings(self.space).params
        return rng.choice(self.cores).replace(**{p.name: rng.choice(p.choices) for p in free})


def legal_points(problem: Problem, gpu: GpuSpec, space: Space) -> LegalPoints:
    """Judge every choice of the decisive parameters once, and count the points by verdict."""
    rest = _fillings(space).size()
    cores = []
    pruned = {c.name: 0 for c in CONSTRAINTS}
    for core in _decisive(space).points():
        found = violated(problem, core, gpu)
        if found is None:
            cores.append(core)
        else:
            pruned[found[0]] += rest
    counts = tuple((name, n) for name, n in pruned.items() if n)
    census = Census(len(cores) * rest, space.size(), counts)
    return LegalPoints(problem, gpu, space, tuple(cores), census)


def _decisive(space: Space) -> Space:
    """The space with every parameter that decides nothing held at its first choice."""
    return Space(
        tuple(
            p if p.name in DECISIVE else Param(p.name, p.choices[:1], p.meaning)
            for p in space.params
        )
    )


def _fillings(space: Space) -> Space:
    return Space(tuple(p for p in space.params if p.name not in DECISIVE))
