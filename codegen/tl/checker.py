"""Sketch × Problem → diagnostics, all at once, each with its line and a remedy."""

from __future__ import annotations

from codegen.tl.ast import Sketch
from codegen.tl.source import Diagnostic
from space.gpu import GpuSpec
from space.params import Point
from space.variant import Problem


def check(
    sketch: Sketch,
    problem: Problem | None = None,
    gpu: GpuSpec | None = None,
    point: Point | None = None,
) -> tuple[Diagnostic, ...]:
    """Return everything that is wrong with `sketch`."""
    return ()
