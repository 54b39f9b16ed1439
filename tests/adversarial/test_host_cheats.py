"""Cheats of the host's side get their class: on a CPU with a scripted clock, on a GPU for real."""

from __future__ import annotations

import pytest
import torch
from cheats import KeptByContent, PersistentInputs, Remembers, SecondStream, Wrapped
from naive import naive

from codegen.kernel import KernelSource
from codegen.nvrtc import compile_source
from runs.record import Measured, Outcome, Rejected, Stage, TrialClass
from space.gpu import gpu_named, gpu_of_device_name
from space.variant import DType, Problem, Shape
from tests.tuner.evaluate import fakes
from tests.tuner.evaluate.scripted_clock import ScriptedClock
from tuner.devices import device_names
from tuner.evaluate.judge import Judge, Kernel
from tuner.evaluate.launch import Launcher, Prepare
from tuner.evaluate.timing import check_stream

T = torch.Tensor
CPU = torch.device("cpu")
PROBLEM = Problem("gqa", DType.FP16, 32, 32, True)
SHAPE = Shape(2, 4, 2, 64, 64, 32, 32, True)
SOURCE = KernelSource("", "sm_80", (), ())
H200 = gpu_named("h200")


class Scripted:
    """A kernel in torch that tells the clock how long it takes, and how long beside its stream."""

    def __init__(
        self, body: fakes.Body, clock: ScriptedClock, us: float, aside_us: float = 0.0
    ) -> None:
        self._inner = fakes.kernel(body, True)
        self._clock, self._us, self._aside_us = clock, us, aside_us

    @property
    def prepare(self) -> Prepare:
        def prepare(q: T, k: T, v: T, out: T, scale: float) -> Launcher:
            launch = self._inner(q, k, v, out, scale)
            return self._clock.call("kernel", self._us, launch, self._aside_us)

        return prepare

    def unload(self) -> None:
        pass


def judged(
    body: fakes.Body, us: float = 5000.0, aside_us: float = 0.0, wrap: type[Wrapped] | None = None
) -> Outcome:
    clock = ScriptedClock(default_us=us)
    kernel: Kernel = Scripted(body, clock, us, aside_us)
    judge = Judge(CPU, clock, lambda *_: wrap(kernel) if wrap else kernel, H200)
    return judge.judge(PROBLEM, SOURCE, b"", (SHAPE,), 1, {})


def test_honest_kernel_is_measured() -> None:
    assert isinstance(judged(fakes.right), Measured)


def test_work_beside_the_stream_is_an_invalid_time() -> None:
    outcome = judged(fakes.right, us=5.0, aside_us=2000.0)
    assert isinstance(outcome, Rejected)
    assert (outcome.trial_class, outcome.stage) == (TrialClass.TIMING_INVALID, Stage.TIME)
    assert (
        "16 launch(es) took 80 us between events and 32120 us by the wall clock" in outcome.reason
    )


def test_output_that_comes_after_its_turn_is_an_invalid_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late: list[tuple[T, T]] = []

    def settle(_: torch.device) -> None:
        for out, right in late:
            out.copy_(right)
        late.clear()

    def on_a_side_stream(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
        right = torch.empty_like(out)
        fakes.right(q, k, v, right, scale, causal)
        late.append((out, right))

    monkeypatch.setattr("tuner.evaluate.verify.synchronize", settle)
    outcome = judged(on_a_side_stream)
    assert isinstance(outcome, Rejected)
    assert (outcome.trial_class, outcome.stage) == (TrialClass.TIMING_INVALID, Stage.VERIFY)
    assert "not complete in stream order" in outcome.reason


@pytest.mark.parametrize("when", ["checked", "timed"])
def test_l2_set_aside_is_an_invalid_time(when: str) -> None:
    clock = ScriptedClock()

    def sets_l2_aside(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
        fakes.right(q, k, v, out, scale, causal)
        if when == "checked" or q.shape[2] == SHAPE.heads:
            clock.left = "16777216 bytes of L2 were set aside for data that persists"

    judge = Judge(CPU, clock, lambda *_: Scripted(sets_l2_aside, clock, 5000.0), None)
    outcome = judge.judge(PROBLEM, SOURCE, b"", (SHAPE,), 1, {})
    assert isinstance(outcome, Rejected)
    assert outcome.trial_class is TrialClass.TIMING_INVALID
    assert "16777216 bytes of L2" in outcome.reason


def test_what_another_kernel_left_is_not_held_against_this_one() -> None:
    clock = ScriptedClock()
    clock.left = "16777216 bytes of L2 were set aside for data that persists"
    judge = Judge(CPU, clock, lambda *_: Scripted(fakes.right, clock, 5000.0), None)
    assert isinstance(judge.judge(PROBLEM, SOURCE, b"", (SHAPE,), 1, {}), Measured)


def test_results_kept_as_long_as_nothing_is_written_are_right_but_too_fast() -> None:
    assert judged(fakes.right, us=0.001, wrap=Remembers).trial_class is TrialClass.IMPOSSIBLE_TIME


class KeptByFirstBytes:
    """Gives the last result again when the first 64 bytes of Q, K and V are what they were."""

    def __init__(self) -> None:
        self.seen: tuple[bytes, ...] = ()
        self.kept: T | None = None

    def __call__(self, q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
        key = tuple(bytes(t[0, 0, 0, :32].clone().view(torch.uint8).numpy()) for t in (q, k, v))
        if key != self.seen or self.kept is None or self.kept.shape != out.shape:
            fakes.right(q, k, v, out, scale, causal)
            self.seen, self.kept = key, out.clone()
        out.copy_(self.kept)


class RightForTheFirstInputs:
    """Wrong for every other Q than the first it saw."""

    def __init__(self) -> None:
        self.first: T | None = None

    def __call__(self, q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
        fakes.right(q, k, v, out, scale, causal)
        now = q[0, 0, 0, :8].clone()
        self.first = now if self.first is None else self.first
        if not torch.equal(now, self.first):
            out[0, 0, 0, 0] = 9.0


def wrong_one_past_the_tuned_length(
    q: T, k: T, v: T, out: T, scale: float, causal: bool
) -> None:  # fmt: skip
    """Right on 64 by 64 and everywhere but on 65 by 65."""
    fakes.right(q, k, v, out, scale, causal)
    if (q.shape[1], k.shape[1]) == (65, 65):
        out[0, 0, 0, 0] = 9.0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (KeptByFirstBytes(), "timed shape"),
        (RightForTheFirstInputs(), "large logits"),
        (wrong_one_past_the_tuned_length, "one past a tuned shape: Sq=65 Sk=65"),
        (fakes.numbers_for_nan, "queries that are NaN"),
    ],
)
def test_wrong_output_where_it_shows(body: fakes.Body, said: str) -> None:
    outcome = judged(body)
    assert isinstance(outcome, Rejected)
    assert outcome.trial_class is TrialClass.WRONG_OUTPUT
    assert outcome.reason.startswith(said), outcome.reason


# ---- on a GPU ----------------------------------------------------------------------------------

TIMED = Shape(2, 4, 2, 1024, 1024, 64, 32, True)
LONG = Shape(1, 8, 8, 4096, 4096, 128, 128)


@pytest.mark.gpu
@pytest.mark.skipif(not device_names(), reason="no CUDA device")
class TestOnDevice:
    @staticmethod
    def judge(wrap: object) -> tuple[Judge, str]:
        from tuner.evaluate.clock import CudaClock
        from tuner.evaluate.launch import LoadedKernel

        assert callable(wrap)
        device = torch.device("cuda", 0)
        major, minor = torch.cuda.get_device_capability(device)
        gpu = gpu_of_device_name(torch.cuda.get_device_name(device))

        def load(source: KernelSource, image: bytes, on: torch.device) -> Kernel:
            kernel: Kernel = wrap(LoadedKernel(source, image, on))
            return kernel

        arch = f"sm_{major}{minor}" + ("a" if major == 9 else "")
        return Judge(device, CudaClock(device), load, gpu), arch

    def judged(self, wrap: object, problem: Problem, shape: Shape) -> Outcome:
        judge, arch = self.judge(wrap)
        source = naive(problem)
        image = compile_source(source, arch).image
        return judge.judge(problem, source, image, (shape,), 1, {})

    def test_honest_kernel_is_measured(self) -> None:
        problem = Problem("gqa", DType.FP16, 64, 32, True)
        assert isinstance(self.judged(lambda k: k, problem, TIMED), Measured)

    def test_second_stream(self) -> None:
        problem = Problem("gqa", DType.FP16, 64, 32, True)
        outcome = self.judged(SecondStream, problem, TIMED)
        assert isinstance(outcome, Rejected)
        assert outcome.trial_class is TrialClass.TIMING_INVALID, outcome.reason

    def test_second_stream_shows_in_the_wall_clock_alone(self) -> None:
        from tuner.evaluate.clock import CudaClock
        from tuner.evaluate.launch import LoadedKernel

        _, arch = self.judge(lambda k: k)
        problem = Problem("gqa", DType.FP16, 64, 32, True)
        source = naive(problem)
        device = torch.device("cuda", 0)
        honest = LoadedKernel(source, compile_source(source, arch).image, device)
        q = torch.randn(2, 1024, 4, 64, device=device).half()
        k = torch.randn(2, 1024, 2, 64, device=device).half()
        v = torch.randn(2, 1024, 2, 32, device=device).half()
        out = torch.empty(2, 1024, 4, 32, device=device).half()
        clock = CudaClock(device)
        assert check_stream(honest.prepare(q, k, v, out, 0.125), clock, "honest") is None
        cheat = SecondStream(honest).prepare(q, k, v, out, 0.125)
        found = check_stream(cheat, clock, "cheat")
        torch.cuda.synchronize()
        assert found is not None and found.trial_class is TrialClass.TIMING_INVALID

    def test_persisting_l2(self) -> None:
        from cuda.bindings import driver

        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE
        torch.cuda.init()
        status, most = driver.cuDeviceGetAttribute(attribute, 0)
        if int(status) or not most:
            pytest.skip("this device sets no L2 aside")
        problem = Problem("gqa", DType.FP16, 64, 32, True)
        outcome = self.judged(lambda k: PersistentInputs(k, driver, most // 2), problem, TIMED)
        assert isinstance(outcome, Rejected)
        assert outcome.trial_class is TrialClass.TIMING_INVALID, outcome.reason
        assert "of L2 were set aside" in outcome.reason
        assert isinstance(self.judged(lambda k: k, problem, TIMED), Measured)

    def test_faster_than_the_roofline(self) -> None:
        if gpu_of_device_name(torch.cuda.get_device_name(0)) is None:
            pytest.skip("no roofline is known for this device")
        problem = Problem("mha", DType.FP16, 128, 128, False)
        outcome = self.judged(Remembers, problem, LONG)
        assert isinstance(outcome, Rejected)
        assert outcome.trial_class is TrialClass.IMPOSSIBLE_TIME, outcome.reason

    def test_results_kept_by_content_are_right_but_slow_on_new_data(self) -> None:
        problem = Problem("mha", DType.FP16, 128, 128, False)
        kept: dict[tuple[float, ...], T] = {}
        for _ in range(2):  # by the second trial it has met all that trials time
            outcome = self.judged(lambda k: KeptByContent(k, kept), problem, LONG)
        assert kept
        assert isinstance(outcome, Rejected)
        assert outcome.trial_class is TrialClass.TIMING_INVALID, outcome.reason
        assert "results are kept by their inputs" in outcome.reason
        assert isinstance(self.judged(lambda k: k, problem, LONG), Measured)

    def test_one_launch_runs_its_own_kernels_and_no_other(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        from tuner.evaluate.launch import LoadedKernel

        _, arch = self.judge(lambda k: k)
        problem = Problem("gqa", DType.FP16, 64, 32, True)
        source = naive(problem)
        device = torch.device("cuda", 0)
        kernel = LoadedKernel(source, compile_source(source, arch).image, device)
        q = torch.randn(1, 64, 4, 64, device=device).half()
        k = torch.randn(1, 64, 2, 64, device=device).half()
        v = torch.randn(1, 64, 2, 32, device=device).half()
        launch = kernel.prepare(q, k, v, torch.empty(1, 64, 4, 32, device=device).half(), 0.125)
        launch()
        torch.cuda.synchronize()
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                launch()
                torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.skip(f"no right to the profiler here: {error}")
        names = {e.key for e in profiler.key_averages() if e.device_time_total > 0}
        if not names:
            pytest.skip("the profiler tells no kernel names here")
        assert names == {launch.entry for launch in source.launches}
