"""Emitted decode kernels before the judge on a GPU: right, timed as replays, beside peers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest
from gpu_here import NEEDS_GPU

from llm_proposer.builtin import sketches
from llm_proposer.seeds import seeds
from runs.record import Measured
from space.constraints import Backend, space_for
from space.gpu import GpuSpec
from space.variant import LATENT_DIMS, Phase, Problem, Shape
from tuner.build import build
from tuner.job import Built, CompileJob, Entry, EvalJob, FinalsJob
from tuner.pools import GpuPool

HEADS = {"mha": (4, 4), "gqa": (28, 4), "mqa": (71, 1), "mla": (128, 1)}

pytestmark = NEEDS_GPU


def problem_of(variant: str, gpu: GpuSpec, causal: bool = False, page: int = 0) -> Problem:
    dims = LATENT_DIMS if variant == "mla" else (128, 128)
    return Problem(variant, gpu.dtypes[-1], *dims, causal, Phase.DECODE, page)


def built(
    problem: Problem, gpu: GpuSpec, backend: Backend = Backend.AUTO,
    choices: Mapping[str, int] = MappingProxyType({}),
) -> Built:  # fmt: skip
    point = seeds(problem, gpu, space_for(problem, gpu, backend))[0].replace(**choices)
    text = sketches(problem.variant, problem.causal, Phase.DECODE)["decode"]
    found = build(CompileJob(text, problem, point, gpu.name, gpu.arch))
    assert isinstance(found, Built), found
    return found


def shape_of(problem: Problem, batch: int = 2, keys: int = 4096) -> Shape:
    queries = 4 if problem.causal else 1
    return Shape(
        batch, *HEADS[problem.variant], queries, keys, problem.head_dim, problem.head_dim_v,
        problem.causal,
    )  # fmt: skip


@pytest.mark.parametrize("backend", [Backend.AUTO, Backend.MMA_SYNC])
@pytest.mark.parametrize("page", [0, 64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", list(HEADS))
def test_known_good_point_is_right(
    pool: GpuPool, gpu: GpuSpec, variant: str, causal: bool, page: int, backend: Backend
) -> None:
    problem = problem_of(variant, gpu, causal, page)
    kernel = built(problem, gpu, backend)
    shapes = (shape_of(problem), shape_of(problem, 1, 1000))
    job = EvalJob(problem, kernel.source, kernel.cubin.image, shapes, 1)
    outcome = pool.submit(job).result()
    assert isinstance(outcome, Measured), outcome
    assert outcome.error_ratio is not None and outcome.error_ratio <= 2.0
    assert all(t.low_us <= t.median_us <= t.high_us for t in outcome.timings)
    assert outcome.timings[0].splits > 1  # so few planes do not fill a card


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize(
    ("variant", "sharing"), [(v, "split_cluster") for v in HEADS] + [("mla", "column_blocks")]
)
def test_blocks_that_share_a_split_are_right(
    pool: GpuPool, gpu: GpuSpec, variant: str, sharing: str, page: int
) -> None:
    problem = problem_of(variant, gpu, causal=page > 0, page=page)
    if sharing not in space_for(problem, gpu).names:
        pytest.skip(f"blocks have splits of their own on {gpu.title}")
    kernel = built(problem, gpu, choices={sharing: 2})
    shapes = (shape_of(problem), shape_of(problem, 1, 1000))
    outcome = pool.submit(EvalJob(problem, kernel.source, kernel.cubin.image, shapes, 2)).result()
    assert isinstance(outcome, Measured), outcome


@pytest.mark.parametrize("variant", ["gqa", "mla"])
def test_finals_rank_it_beside_peers(pool: GpuPool, gpu: GpuSpec, variant: str) -> None:
    problem = problem_of(variant, gpu)
    kernel = built(problem, gpu)
    shape = shape_of(problem)
    entry = Entry(0, kernel.source, kernel.cubin.image, (shape,))
    result = pool.finals(FinalsJob(problem, (entry,), (shape,), 1, rounds=5)).result()
    assert not result.rejected, result.rejected
    ours = [f for f in result.finalists if f.trial == 0]
    assert len(ours) == 1 and ours[0].timing.splits > 1
    assert {f.name for f in result.finalists if f.trial is None} | {
        a.name for a in result.absent
    } >= {"fa2", "cudnn", "fa3"}
