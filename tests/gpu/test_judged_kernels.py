"""Emitted kernels in the real worker: each variant is judged right, timed and ranked."""

from __future__ import annotations

import pytest
from gpu_here import DEVICES, NEEDS_GPU

from llm_proposer.builtin import sketches
from llm_proposer.seeds import seeds
from runs.record import Basis, Measured, Note
from space.constraints import space_for, violated
from space.gpu import GpuSpec
from space.variant import DType, Problem, Shape
from tuner.build import build
from tuner.drift import DriftWatch
from tuner.job import Built, CompileJob, Entry, EvalJob, FinalsJob, PeerKernelsJob
from tuner.pools import GpuPool

HEADS = {"mha": (4, 4), "gqa": (6, 2), "mqa": (4, 1), "mla": (4, 4)}

pytestmark = NEEDS_GPU


def built(problem: Problem, gpu: GpuSpec, nth: int = 0, **changes: int) -> Built:
    point = seeds(problem, gpu, space_for(problem, gpu))[nth].replace(**changes)
    assert violated(problem, point, gpu) is None
    text = next(iter(sketches(problem.variant, problem.causal).values()))
    found = build(CompileJob(text, problem, point, gpu.name, gpu.arch))
    assert isinstance(found, Built), found
    return found


def problem_of(variant: str, dtype: DType, causal: bool) -> Problem:
    dims = (192, 128) if variant == "mla" else (128, 128)
    return Problem(variant, dtype, *dims, causal)


@pytest.mark.parametrize("variant", list(HEADS))
@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("causal", [False, True])
def test_known_good_point_is_right(
    pool: GpuPool, gpu: GpuSpec, variant: str, dtype: DType, causal: bool
) -> None:
    if dtype not in gpu.dtypes:
        pytest.skip(f"{gpu.name} has no {dtype}")
    problem = problem_of(variant, dtype, causal)
    kernel = built(problem, gpu)
    shape = Shape(
        2, *HEADS[variant], 1024, 1024, problem.head_dim, problem.head_dim_v, causal
    )  # fmt: skip
    outcome = pool.submit(EvalJob(problem, kernel.source, kernel.cubin.image, (shape,), 1)).result()
    assert isinstance(outcome, Measured), outcome
    (timing,) = outcome.timings
    assert timing.basis is Basis.MEASURED
    assert timing.low_us <= timing.median_us <= timing.high_us
    assert outcome.error_ratio is not None and outcome.error_ratio <= 2.0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "changes"),
    [
        (128, {"cluster": 2}),
        (128, {"cluster": 2, "BM": 192, "BN": 80, "consumer_warpgroups": 3, "q_stages": 1}),
        (96, {"swizzle": 64}),
        (80, {"swizzle": 32, "cluster": 2}),
        (128, {"cluster": 2, "out_buffer": 2}),
        (72, {"swizzle": 64, "q_in_registers": 1, "BN": 64}),
    ],
    ids=str,
)
def test_blocks_that_load_together_and_narrow_panels_are_right(
    pool: GpuPool, gpu: GpuSpec, head_dim: int, changes: dict[str, int], causal: bool
) -> None:
    if gpu.sm != 90:
        pytest.skip(f"{gpu.name} has no wgmma")
    problem = Problem("gqa", DType.BF16, head_dim, head_dim, causal)
    kernel = built(problem, gpu, 0, persistent=1, **changes)
    shape = Shape(2, 6, 2, 1100, 1300, head_dim, head_dim, causal)
    outcome = pool.submit(EvalJob(problem, kernel.source, kernel.cubin.image, (shape,), 1)).result()
    assert isinstance(outcome, Measured), outcome
    assert outcome.error_ratio is not None and outcome.error_ratio <= 2.0


@pytest.mark.parametrize("causal", [False, True])
def test_finals_rank_trials_and_peers(pool: GpuPool, gpu: GpuSpec, causal: bool) -> None:
    problem = Problem("mha", DType.FP16, 128, 128, causal)
    shapes = (
        Shape(8, 16, 16, 2048, 2048, 128, 128, causal),
        Shape(2, 16, 16, 1, 4096, 128, 128, causal),
    )
    points = range(min(2, len(seeds(problem, gpu, space_for(problem, gpu)))))
    entries = tuple(
        Entry(n, k.source, k.cubin.image, shapes)
        for n, k in ((n, built(problem, gpu, n)) for n in points)
    )
    result = pool.finals(FinalsJob(problem, entries, shapes, 1)).result()
    assert not result.rejected, result.rejected
    for shape in shapes:
        names = {f.name for f in result.finalists if f.shape == shape}
        absent = {a.name for a in result.absent if a.shape == shape}
        assert names >= {f"trial {n}" for n in points} | {"fa2"}
        assert names | absent >= {"fa2", "cudnn", "efficient", "fa3", "fa4"}
    assert all(f.timing.samples == 25 for f in result.finalists)
    assert [r.shape for r in result.readings] in ([], list(shapes))  # none where NVML is silent
    for reading in result.readings:
        assert reading.sm_clock_mhz > 100 and 10 < reading.temperature_c < 110
        assert reading.power_w > 10 and reading.redone >= 0


def test_kernel_that_was_timed_again_tells_the_drift(pool: GpuPool, gpu: GpuSpec) -> None:
    problem = Problem("mha", DType.FP16, 128, 128, False)
    kernel = built(problem, gpu)
    shape = Shape(4, 16, 16, 4096, 4096, 128, 128)
    job = EvalJob(problem, kernel.source, kernel.cubin.image, (shape,), 1)
    watch = DriftWatch(pool.submit, every=2)
    for _ in range(4):
        future = pool.submit(job)
        watch.saw(job, future)
        assert isinstance(future.result(), Measured)
    ratios = [n.as_dict()["median_ratio"] for n in watch.notes()]
    assert len(ratios) in (1, 2)  # the first may be known only after the second was asked for
    assert all(isinstance(r, float) and 0.9 < r < 1.1 for r in ratios), ratios


def test_facts_name_the_card(pool: GpuPool) -> None:
    notes: dict[str, Note] = {n.topic: n for n in pool.facts().result()}
    assert notes["environment"].as_dict()["device"] == DEVICES[0]
    assert notes["protocol"].as_dict()["l2_flush_bytes"] == 256 << 20


def test_causal_kernel_is_not_right_for_a_full_problem(pool: GpuPool, gpu: GpuSpec) -> None:
    full = Problem("mha", DType.FP16, 128, 128, False)
    causal = built(Problem("mha", DType.FP16, 128, 128, True), gpu)
    outcome = pool.submit(EvalJob(full, causal.source, causal.cubin.image, (), 1)).result()
    assert not isinstance(outcome, Measured)


def test_peers_run_the_kernels_they_are_named_for(pool: GpuPool) -> None:
    problem = Problem("mha", DType.FP16, 128, 128, False)
    shape = Shape(2, 16, 16, 1024, 1024, 128, 128)
    names = dict(pool.peer_kernels(PeerKernelsJob(problem, shape, 1)).result())
    assert "fa2" in names
    assert names["fa2"] == "" or "flash" in names["fa2"].lower()
    assert names.get("cudnn", "") == "" or "cudnn" in names["cudnn"].lower()
