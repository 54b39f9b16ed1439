"""Tuning parameters: one name, its choices, and points with a stable key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from space.variant import SpaceError


@dataclass(frozen=True, slots=True)
class Param:
    """One dimension of the search: a name and the whole numbers it may take."""

    name: str
    choices: tuple[int, ...]
    meaning: str


@dataclass(frozen=True, slots=True)
class Point:
    """A value for every parameter, in the order of the space."""

    items: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, values: Mapping[str, int]) -> Point:
        """Build a point from a mapping, keeping its order."""
        return cls(tuple(values.items()))

    def __getitem__(self, name: str) -> int:
        for key, value in self.items:
            if key == name:
                return value
        raise KeyError(name)

    def get(self, name: str, default: int) -> int:
        """Return the value of `name`, or `default` when the point does not have it."""
        for key, value in self.items:
            if key == name:
                return value
        return default

    def as_dict(self) -> dict[str, int]:
        """Return a new mapping from name to value."""
        return dict(self.items)

    def replace(self, **changes: int) -> Point:
        """Return the point with some values changed. Raises SpaceError on an unknown name."""
        values = self.as_dict()
        if unknown := sorted(changes.keys() - values.keys()):
            raise SpaceError(f"unknown parameter {unknown[0]!r}; known: {', '.join(values)}")
        return Point.of(values | changes)

    @property
    def key(self) -> str:
        """Stable text form: `BM=128 BN=64 ...`, sorted by name."""
        return " ".join(f"{k}={v}" for k, v in sorted(self.items))


@dataclass(frozen=True, slots=True)
class Space:
    """The parameters of one search."""

    params: tuple[Param, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Parameter names in order."""
        return tuple(p.name for p in self.params)

    def param(self, name: str) -> Param:
        """Return the parameter called `name`. Raises SpaceError naming the known ones."""
        for p in self.params:
            if p.name == name:
                return p
        raise SpaceError(f"unknown parameter {name!r}; known: {', '.join(self.names)}")

    def point(self, values: Mapping[str, int]) -> Point:
        """Build a checked point. Raises SpaceError on a missing, unknown or illegal value."""
        for name, value in values.items():
            param = self.param(name)
            if value not in param.choices:
                choices = ", ".join(str(c) for c in param.choices)
                raise SpaceError(f"{name}={value} is not one of {choices}")
        if missing := [n for n in self.names if n not in values]:
            raise SpaceError(f"no value for parameter {', '.join(missing)}")
        return Point(tuple((n, values[n]) for n in self.names))

    def restrict(self, choices: Mapping[str, tuple[int, ...]]) -> Space:
        """Return the space with some parameters limited to the given choices."""
        return Space(
            tuple(Param(p.name, choices.get(p.name, p.choices), p.meaning) for p in self.params)
        )

    def size(self) -> int:
        """Number of points, legal or not."""
        total = 1
        for p in self.params:
            total *= len(p.choices)
        return total

    def points(self) -> Iterator[Point]:
        """Yield every point, legal or not, in a fixed order."""

        def extend(prefix: tuple[tuple[str, int], ...], rest: tuple[Param, ...]) -> Iterator[Point]:
            if not rest:
                yield Point(prefix)
                return
            for choice in rest[0].choices:
                yield from extend((*prefix, (rest[0].name, choice)), rest[1:])

        yield from extend((), self.params)
