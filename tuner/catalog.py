"""`tune list`: what works where, from the predicates that prune the search itself."""

from __future__ import annotations

from dataclasses import dataclass

from space.constraints import space_for
from space.gpu import GPUS, GpuSpec
from space.legal import legal_points
from space.variant import VARIANTS, DType, Problem, Variant


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


def catalog() -> tuple[Cell, ...]:
    """Count the legal configurations of every variant's usual head dims on every GPU."""
    return tuple(
        _cell(variant, head_dim, head_dim_v, gpu)
        for variant in VARIANTS.values()
        for head_dim, head_dim_v in dict.fromkeys(h[2:] for h in variant.paper_heads)
        for gpu in GPUS.values()
    )


def _cell(variant: Variant, head_dim: int, head_dim_v: int, gpu: GpuSpec) -> Cell:
    counts = []
    for causal in (False, True):
        # the 16-bit types have the same tiles, so one stands for all
        problem = Problem(variant.name, gpu.dtypes[0], head_dim, head_dim_v, causal)
        counts.append(len(legal_points(problem, gpu, space_for(problem, gpu))))
    return Cell(variant.name, head_dim, head_dim_v, gpu.name, gpu.dtypes, counts[0], counts[1])
