"""Hand-written kernels in a real GPU worker: the right one passes, each spoiled one is named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from naive import LARGE_ONLY, SPOILED, naive

from codegen.kernel import KernelSource
from codegen.nvrtc import compile_source
from runs.record import Measured, Outcome, Rejected, TrialClass
from space.variant import DType, Problem, Shape
from tuner.devices import device_names
from tuner.job import Entry, EvalJob, FactsJob, FinalsJob
from tuner.worker import Supervisor, Worker

PROBLEM = Problem("gqa", DType.FP16, 64, 32, True)
SHAPES = (Shape(1, 4, 2, 256, 256, 64, 32, True),)

EXPECTED = {
    **dict.fromkeys(SPOILED, TrialClass.WRONG_OUTPUT),
    "changes K": TrialClass.INPUT_MODIFIED,
    "right 19 times of 20": TrialClass.NONDETERMINISTIC,
    "scores summed in 16 bits": TrialClass.PRECISION,
    "output summed in 16 bits": TrialClass.PRECISION,
    "endless loop": TrialClass.TIMEOUT,
    "barrier that never ends": TrialClass.TIMEOUT,
    "misaligned address": TrialClass.CRASHED,
    "trap": TrialClass.CRASHED,
    "illegal address": TrialClass.CRASHED,
}


@pytest.mark.parametrize("spoil", ["", *SPOILED, *LARGE_ONLY])
@pytest.mark.parametrize("dtype", list(DType))
def test_every_kernel_compiles(spoil: str, dtype: DType) -> None:
    problem = Problem("mla", dtype, 192, 128, False)
    cubin = compile_source(naive(problem, spoil), "sm_90a")
    assert cubin.resources[0].entry == "attention"


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not device_names(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Supervisor]:
    worker = Worker(0)
    yield Supervisor(worker)
    worker.close()


@pytest.fixture(scope="module")
def arch(supervisor: Supervisor) -> str:
    sm = next(n for n in supervisor.worker.run(FactsJob()) if n.topic == "environment")
    number = sm.as_dict()["sm"]
    return "sm_90a" if number == 90 else f"sm_{number}"


def judge(
    supervisor: Supervisor, source: KernelSource, arch: str, problem: Problem = PROBLEM,
    shapes: tuple[Shape, ...] = SHAPES, limit_s: float = 20.0,
) -> Outcome:  # fmt: skip
    image = compile_source(source, arch).image
    return supervisor.judge(EvalJob(problem, source, image, shapes, 1, limit_s))


class TestOnDevice:
    pytestmark = gpu

    @pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "mla"])
    @pytest.mark.parametrize("dtype", list(DType))
    @pytest.mark.parametrize("causal", [False, True])
    def test_right_kernel_is_measured(
        self, supervisor: Supervisor, arch: str, variant: str, dtype: DType, causal: bool
    ) -> None:
        problem = Problem(variant, dtype, 64, 32, causal)
        heads = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1), "mla": (4, 4)}[variant]
        shapes = (Shape(1, *heads, 200, 300, 64, 32, causal),)
        outcome = judge(supervisor, naive(problem), arch, problem, shapes)
        assert isinstance(outcome, Measured), outcome
        assert outcome.error_ratio <= 2.0
        assert outcome.timings[0].median_us > 1.0

    @pytest.mark.parametrize("spoil", list(SPOILED))
    def test_spoiled_kernel_gets_its_class_and_the_next_trial_works(
        self, supervisor: Supervisor, arch: str, spoil: str
    ) -> None:
        limit_s = 10.0 if EXPECTED[spoil] is TrialClass.TIMEOUT else 30.0
        outcome = judge(supervisor, naive(PROBLEM, spoil), arch, limit_s=limit_s)
        assert isinstance(outcome, Rejected), outcome
        assert outcome.trial_class is EXPECTED[spoil], outcome.reason
        assert isinstance(judge(supervisor, naive(PROBLEM), arch), Measured)

    def test_too_much_shared_memory_is_a_failed_launch(
        self, supervisor: Supervisor, arch: str
    ) -> None:
        outcome = judge(supervisor, naive(PROBLEM, smem_bytes=300_000), arch)
        assert isinstance(outcome, Rejected)
        assert outcome.trial_class is TrialClass.LAUNCH_FAILED
        assert "300000 bytes" in outcome.reason

    def test_code_for_another_card_is_a_failed_launch(self, supervisor: Supervisor) -> None:
        source = naive(PROBLEM)
        image = compile_source(source, "sm_75").image[:-64]
        outcome = supervisor.judge(EvalJob(PROBLEM, source, image, SHAPES, 1))
        assert isinstance(outcome, Rejected)
        assert outcome.trial_class is TrialClass.LAUNCH_FAILED

    def test_finals_look_at_every_element(self, supervisor: Supervisor, arch: str) -> None:
        shapes = (Shape(1, 8, 4, 4096, 4096, 64, 32, True),)
        (spoil,) = LARGE_ONLY
        entries = tuple(
            Entry(n, source, compile_source(source, arch).image, shapes)
            for n, source in enumerate((naive(PROBLEM), naive(PROBLEM, spoil)))
        )
        job = FinalsJob(PROBLEM, entries, shapes, 1, rounds=3, with_peers=False)
        result = supervisor.finals(job)
        assert [f.trial for f in result.finalists] == [0]
        assert [(t, r.trial_class) for t, r in result.rejected] == [(1, TrialClass.WRONG_OUTPUT)]
        assert "[b, s, h, d] (0, " in result.rejected[0][1].reason

    def test_finals_leave_a_crashing_trial_out(self, supervisor: Supervisor, arch: str) -> None:
        right, bad = naive(PROBLEM), naive(PROBLEM, "illegal address")
        entries = tuple(
            Entry(n, source, compile_source(source, arch).image, SHAPES)
            for n, source in enumerate((right, bad))
        )
        result = supervisor.finals(FinalsJob(PROBLEM, entries, SHAPES, 1, rounds=5))
        assert [f.name for f in result.finalists if f.trial is not None] == ["trial 0"]
        assert [(t, r.trial_class) for t, r in result.rejected] == [(1, TrialClass.CRASHED)]
        assert {a.name for a in result.absent} | {f.name for f in result.finalists} >= {
            "fa2", "cudnn", "efficient", "fa3", "fa4", "trial 0",
        }  # fmt: skip
