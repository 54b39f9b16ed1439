"""`tune list`: what works where, from the predicates that prune the search itself."""

from __future__ import annotations

from dataclasses import dataclass

from space.constraints import space_for
from space.gpu import GPUS, GpuSpec
from space.legal import legal_points
from space.variant import VARIANTS, DType, Phase, Problem, SpaceError, Variant
from tuner.phases import usual_head_dims


@dataclass(frozen=True, slots=True)
class Cell:
    """One variant and head layout on one GPU."""

    variant: str
    head_dim: int
    head_dim_v: int
    gpu: str
    dtypes: tuple[DType, ...]
    legal_full: int
    legal_causal: int
    phase: Phase = Phase.PREFILL


def catalog() -> tuple[Cell, ...]:
    """Count the legal configurations of every variant's usual head dims on every GPU."""
    return tuple(
        _cell(variant, dims, gpu, phase)
        for phase in Phase
        for variant in VARIANTS.values()
        for dims in usual_head_dims(variant, phase)
        for gpu in GPUS.values()
    )


def _cell(variant: Variant, dims: tuple[int, int], gpu: GpuSpec, phase: Phase) -> Cell:
    counts = []
    for causal in (False, True):
        # the 16-bit types have the same tiles, so one stands for all
        problem = Problem(variant.name, gpu.dtypes[0], *dims, causal, phase)
        counts.append(_legal(problem, gpu))
    return Cell(variant.name, *dims, gpu.name, gpu.dtypes, counts[0], counts[1], phase)


def _legal(problem: Problem, gpu: GpuSpec) -> int:
    try:
        space = space_for(problem, gpu)
    except SpaceError:  # no back end of the card has kernels for it
        return 0
    return len(legal_points(problem, gpu, space))
