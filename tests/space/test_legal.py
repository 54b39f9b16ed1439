"""Legal points: the same verdicts as judging every point by itself."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from space.constraints import census, space_for, violated
from space.gpu import GPUS
from space.legal import DECISIVE, legal_points
from space.params import Param, Space
from space.variant import DType, Problem

PROBLEM = Problem("mla", DType.BF16, 192, 128, True)
GPU = GPUS["l40s"]
SPACE = space_for(PROBLEM, GPU)
BOTH = st.sampled_from([GPU, GPUS["h200"]])  # one card of each back end


def small() -> Space:
    """A part of the space that can be counted point by point."""
    kept = {"BM": (64, 128, 256), "BN": (32, 64, 128), "warps": (4, 8), "swizzle": (128, 0)}
    return Space(
        tuple(Param(p.name, kept.get(p.name, p.choices[:2]), p.meaning) for p in SPACE.params)
    )


def test_agrees_with_the_census_of_every_point() -> None:
    space = small()
    legal = legal_points(PROBLEM, GPU, space)
    assert legal.census == census(PROBLEM, GPU, space)
    every = [p for p in space.points() if violated(PROBLEM, p, GPU) is None]
    assert sorted(p.key for p in legal) == sorted(p.key for p in every)
    assert len(legal) == len(every)


@given(st.data())
def test_no_constraint_reads_another_parameter(data: st.DataObject) -> None:
    gpu = data.draw(BOTH)
    space = space_for(PROBLEM, gpu)
    draw = {p.name: data.draw(st.sampled_from(p.choices)) for p in space.params}
    other = {
        p.name: draw[p.name] if p.name in DECISIVE else data.draw(st.sampled_from(p.choices))
        for p in space.params
    }
    one, two = space.point(draw), space.point(other)
    assert violated(PROBLEM, one, gpu) == violated(PROBLEM, two, gpu)


@given(st.data())
def test_variant_mask_and_dtype_do_not_decide(data: st.DataObject) -> None:
    gpu = data.draw(BOTH)
    space = space_for(PROBLEM, gpu)
    point = space.point({p.name: data.draw(st.sampled_from(p.choices)) for p in space.params})
    plain = Problem("mha", DType.FP16, PROBLEM.head_dim, PROBLEM.head_dim_v, False)
    assert violated(PROBLEM, point, gpu) == violated(plain, point, gpu)


def test_draws_are_legal_points_of_the_space() -> None:
    legal = legal_points(PROBLEM, GPU, SPACE)
    rng = random.Random(1)
    for _ in range(200):
        point = legal.draw(rng)
        assert point in legal
        assert SPACE.point(point.as_dict()) == point


def test_a_choice_that_the_space_does_not_offer_is_not_in_it() -> None:
    legal = legal_points(PROBLEM, GPU, SPACE.restrict({"BN": (32,)}))
    point = next(iter(legal))
    assert point in legal
    assert point.replace(BN=16) not in legal
