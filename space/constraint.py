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


def over_block_smem(wanted: int, gpu: GpuSpec) -> str | None:
    """Why a block cannot have `wanted` bytes of dynamic shared memory, or None when it can."""
    if wanted > gpu.smem_per_block_bytes:
        return f"{wanted} bytes of shared memory wanted, {gpu.smem_per_block_bytes} there"
    return None


def over_sm_smem(wanted: int, blocks: int, gpu: GpuSpec) -> str | None:
    """Why an SM cannot hold `blocks` blocks of `wanted` bytes each, or None when it can."""
    smem = blocks * (wanted + gpu.smem_reserved_bytes)
    if smem > gpu.smem_per_sm_bytes:
        return (
            f"{blocks} blocks an SM want {smem} bytes of shared memory, "
            f"{gpu.smem_per_sm_bytes} there"
        )
    return None
