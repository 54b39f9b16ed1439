"""A named predicate over points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from space.gpu import GpuSpec
from space.params import Point
from space.variant import Problem


@dataclass(frozen=True, slots=True)
class Constraint:
    """A predicate with a name; `reason` says why a point breaks it, or None when it does not."""

    name: str
    reason: Callable[[Problem, Point, GpuSpec], str | None]
