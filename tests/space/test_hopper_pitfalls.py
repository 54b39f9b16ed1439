"""Hopper configurations that the GPU showed to hang or to be wrong are not legal."""

from __future__ import annotations

import pytest

from space.constraints import Backend, space_for
from space.gpu import gpu_named
from space.hopper import HOPPER_CONSTRAINTS
from space.variant import DType, Problem

GPU = gpu_named("h200")
HUNG = {
    "BM": 128, "BN": 64, "consumer_warpgroups": 2, "stages": 1, "q_stages": 1, "out_buffer": 1,
    "q_in_registers": 0, "exp2_fma": 0, "overlap": 1, "pingpong": 1, "rescale_threshold": 8,
    "late_wait": 1, "integer_max": 1, "persistent": 2, "head_group": 32, "skip": 1,
    "causal_longest_first": 1, "swizzle": 128, "cluster": 1, "pack_heads": 1,
}  # fmt: skip
LOST_Q = {
    **HUNG, "stages": 3, "q_stages": 2, "q_in_registers": 1, "overlap": 0, "late_wait": 0,
    "persistent": 1, "head_group": 4, "skip": 0, "causal_longest_first": 0,
}  # fmt: skip


def refused_by(head_dim: int, causal: bool, numbers: dict[str, int]) -> str | None:
    problem = Problem("mha", DType.BF16, head_dim, head_dim, causal)
    space = space_for(problem, GPU, Backend.WGMMA)
    point = space.point({name: numbers[name] for name in space.names})
    broken = (c.name for c in HOPPER_CONSTRAINTS if c.reason(problem, point, GPU) is not None)
    return next(broken, None)


def test_turns_that_never_end_are_pruned() -> None:
    assert refused_by(128, True, HUNG) == "turns_end"


@pytest.mark.parametrize("name,number", [("stages", 2), ("skip", 0), ("pingpong", 0)])
def test_turns_that_end_are_not(name: str, number: int) -> None:
    assert refused_by(128, True, {**HUNG, name: number}) is None


def test_q_that_ptxas_loses_is_pruned() -> None:
    assert refused_by(64, False, LOST_Q) == "rows_stay"


@pytest.mark.parametrize("name,number", [("BN", 48), ("overlap", 1), ("q_in_registers", 0)])
def test_q_that_ptxas_keeps_is_not(name: str, number: int) -> None:
    assert refused_by(64, False, {**LOST_Q, name: number}) is None
