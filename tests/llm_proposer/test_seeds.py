"""Seeds: legal everywhere, deterministic, the first one conservative."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm_proposer.seeds import nearest_legal, seeds
from runs.record import Measured
from runs.store import RunStore
from space.constraints import Backend, space_for, violated
from space.gpu import GPUS, GpuSpec
from space.params import Point
from space.variant import DType, Problem, Shape


def problem(head_dim: int, head_dim_v: int, causal: bool = False) -> Problem:
    return Problem("mha", DType.FP16, head_dim, head_dim_v, causal)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda g: g.name)
def test_every_head_dim_has_a_legal_first_trial(gpu: GpuSpec) -> None:
    for head_dim in range(16, 257, 8):
        for causal in (False, True):
            p = problem(head_dim, head_dim, causal)
            space = space_for(p, gpu)
            found = seeds(p, gpu, space)
            assert found, f"no seed for head dim {head_dim} on {gpu.name}"
            for point in found:
                assert violated(p, point, gpu) is None
                assert space.point(point.as_dict()) == point


@pytest.mark.parametrize("dims", [(192, 128), (256, 16), (16, 256), (72, 40)])
@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda g: g.name)
def test_unequal_head_dims_have_one_too(gpu: GpuSpec, dims: tuple[int, int]) -> None:
    p = problem(*dims)
    assert seeds(p, gpu, space_for(p, gpu))


def test_the_first_seed_takes_no_risks() -> None:
    for gpu in GPUS.values():
        p = problem(128, 128)
        first = seeds(p, gpu, space_for(p, gpu, Backend.MMA_SYNC))[0]
        assert first["rescale_threshold"] == first["q_in_registers"] == 0
        assert first["blocks_per_sm"] == first["stages"] == 1


def test_causal_seeds_start_the_longest_blocks_over_several_heads() -> None:
    gpu = GPUS["h200"]
    for causal in (False, True):
        p = problem(128, 128, causal)
        first = seeds(p, gpu, space_for(p, gpu))[0]
        assert first["persistent"] == (2 if causal else 1)
        assert first["head_group"] == (16 if causal else 1)


@pytest.mark.parametrize("dims", [64, 128])
def test_seeds_pack_heads_where_heads_share_behind_the_known_good_one(dims: int) -> None:
    gpu = GPUS["h200"]
    wide = {8} if dims == 128 else set()
    for variant, packs in (("mha", {1}), ("gqa", {1, 4}), ("mqa", {1, 4} | wide)):
        p = Problem(variant, DType.BF16, dims, dims, True)
        found = [s["pack_heads"] for s in seeds(p, gpu, space_for(p, gpu))]
        assert set(found) == packs and found[:2] == ([1, 1] if packs == {1} else [1, 4])


PUBLISHED = Path(__file__).parents[2] / "runs/published"
RUNS = [p.parent for p in PUBLISHED.glob("*/spec.json")]
FIRST_WITHIN = 0.85  #: of the best time on record, in the worst cell


def on_record(where: Problem) -> dict[Point, dict[Shape, float]]:
    """Times of the right trials of the published runs, by the point without later parameters."""
    found: dict[Point, dict[Shape, float]] = {}
    for run in RUNS:
        for record in RunStore.open(run).replay().sound:
            if record.problem == where and isinstance(record.outcome, Measured):
                times = found.setdefault(record.point, {})
                times |= {t.shape: t.median_us for t in record.outcome.timings}
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("variant", "dims"),
    [("mha", 64), ("mha", 128), ("mha", 256), ("gqa", 128), ("mqa", 128), ("mla", 192)],
)
def test_the_first_trial_is_near_the_best_of_the_published_runs(
    variant: str, dims: int, causal: bool
) -> None:
    p = Problem(variant, DType.BF16, dims, 128 if variant == "mla" else dims, causal)
    first = seeds(p, GPUS["h200"], space_for(p, GPUS["h200"]))[0]
    times = on_record(p)
    own = next(t for point, t in times.items() if point.items == first.items[: len(point.items)])
    best = {shape: min(t.get(shape, us) for t in times.values()) for shape, us in own.items()}
    assert min(best[s] / own[s] for s in own) >= FIRST_WITHIN


def test_seeds_are_distinct_and_the_same_each_time() -> None:
    gpu = GPUS["l40s"]
    p = problem(192, 128, causal=True)
    found = seeds(p, gpu, space_for(p, gpu))
    assert len({s.key for s in found}) == len(found) > 3
    assert found == seeds(p, gpu, space_for(p, gpu))


def test_a_wish_that_is_legal_is_kept() -> None:
    gpu = GPUS["h200"]
    p = problem(128, 128)
    space = space_for(p, gpu)
    wanted = seeds(p, gpu, space)[1]
    assert nearest_legal(p, gpu, space, wanted.as_dict()) == wanted


def test_too_many_stages_are_given_up_before_the_tile() -> None:
    p, gpu = problem(128, 128), GPUS["l40s"]
    space = space_for(p, gpu)
    wish = seeds(p, gpu, space)[0].as_dict() | {"stages": 3, "BM": 128, "BN": 64}
    found = nearest_legal(p, gpu, space, wish)
    assert found is not None
    assert (found["BM"], found["BN"]) == (128, 64)
    assert found["stages"] < 3


def test_a_space_without_a_legal_point_gives_none() -> None:
    p, gpu = problem(256, 256), GPUS["t4"]
    space = space_for(p, gpu).restrict({"BM": (256,), "BN": (192,)})
    assert seeds(p, gpu, space) == ()
