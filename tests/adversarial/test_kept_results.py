"""Results that are kept by the content of their inputs are found out on data that is new."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from codegen.kernel import KernelSource
from runs.record import Measured, Outcome, Rejected, Stage, TrialClass
from space.variant import DType, Problem, Shape
from tests.tuner.evaluate import fakes
from tests.tuner.evaluate.scripted_clock import ScriptedClock
from tuner.evaluate.arena import Arena
from tuner.evaluate.finals import run_finals
from tuner.evaluate.freshness import FRESH_TRIES, check_fresh, renew
from tuner.evaluate.inputs import Inputs
from tuner.evaluate.judge import Judge
from tuner.evaluate.launch import Launcher, Prepare
from tuner.evaluate.output import flip_signs
from tuner.evaluate.reference import expect
from tuner.evaluate.timing import Sample
from tuner.job import Entry

T = torch.Tensor
CPU = torch.device("cpu")
PROBLEM = Problem("gqa", DType.FP16, 32, 32, True)
SHAPE = Shape(2, 4, 2, 64, 64, 32, 32, True)
SOURCE = KernelSource("", "sm_80", (), ())


class Kept:
    """Keeps every result by all the bytes of its inputs; what it met before costs a copy.

    `whose` says which inputs the hash is taken of: who hashes fewer also gives wrong outputs.
    """

    def __init__(self, clock: ScriptedClock, us: float, replay_us: float, whose: str = "QKV"):
        self.clock, self.us, self.replay_us, self.whose = clock, us, replay_us, whose
        self.kept: dict[tuple[object, ...], T] = {}

    @property
    def prepare(self) -> Prepare:
        def prepare(q: T, k: T, v: T, out: T, scale: float) -> Launcher:
            def launch() -> None:
                content = (
                    t for name, t in zip("QKV", (q, k, v), strict=True) if name in self.whose
                )
                key = (out.shape, scale, *(t.contiguous().numpy().tobytes() for t in content))
                met = key in self.kept
                if not met:
                    fakes.right(q, k, v, out, scale, True)
                    self.kept[key] = out.clone()
                out.copy_(self.kept[key])
                self.clock.call("kernel", self.replay_us if met else self.us)()

            return launch

        return prepare

    def unload(self) -> None:
        pass


class Honest(Kept):
    """Takes its time for everything."""

    @property
    def prepare(self) -> Prepare:
        self.kept.clear()
        inner = fakes.kernel(fakes.right, True)

        def prepare(q: T, k: T, v: T, out: T, scale: float) -> Launcher:
            return self.clock.call("kernel", self.us, inner(q, k, v, out, scale))

        return prepare


Make = Callable[[ScriptedClock], Kept]


def judged(make: Make, trials: int = 1) -> Outcome:
    """Judge the same kernel, which may remember across trials; return the last outcome."""
    clock = ScriptedClock()
    kernel = make(clock)
    judge = Judge(CPU, clock, lambda *_: kernel, None)
    for _ in range(trials):
        outcome = judge.judge(PROBLEM, SOURCE, b"", (SHAPE,), 1, {})
    return outcome


# a long kernel is launched so few times in a trial that each slot's first launch weighs in the
# median: what it saves shows in the next trial, on the same data
@pytest.mark.parametrize(
    ("us", "replay_us", "trials"),
    [
        (5000.0, 1000.0, 2),
        (5000.0, 4000.0, 2),
        (300.0, 160.0, 2),
        (100.0, 60.0, 2),
        (400.0, 40.0, 2),
        (400.0, 5.0, 1),
        (400.0, 5.0, 2),
        (80.0, 5.0, 1),
    ],
)
def test_kept_results_are_an_invalid_time(us: float, replay_us: float, trials: int) -> None:
    outcome = judged(lambda clock: Kept(clock, us, replay_us), trials)
    assert isinstance(outcome, Rejected)
    assert (outcome.trial_class, outcome.stage) == (TrialClass.TIMING_INVALID, Stage.TIME)
    assert "results are kept by their inputs" in outcome.reason


class NoGraphs(ScriptedClock):
    """A clock on which nothing can be captured."""

    def graphed(self, calls: object) -> Launcher:
        """See `Clock.graphed`."""
        raise RuntimeError("operation not permitted when stream is capturing")


def test_kernel_that_cannot_be_captured_is_asked_alone() -> None:
    clock = NoGraphs()
    bay, calls = bay_of(Honest(clock, 100.0, 100.0), 3)
    assert check_fresh(calls, bay, clock, Sample(100.0, 100.0, 100.0, 5)) is None
    bay, calls = bay_of(Kept(clock, 200.0, 100.0), 3)
    found = check_fresh(calls, bay, clock, Sample(100.0, 100.0, 100.0, 5))
    assert found is not None and "1 launch(es) on data that is new took 200 us" in found.reason


@pytest.mark.parametrize("us", [5000.0, 400.0, 5.0])
def test_honest_kernel_is_measured(us: float) -> None:
    outcome = judged(lambda clock: Honest(clock, us, us))
    assert isinstance(outcome, Measured)
    assert outcome.timings[0].median_us == pytest.approx(us)


@pytest.mark.parametrize(("us", "replay_us"), [(5000.0, 1000.0), (400.0, 5.0)])
def test_finals_ask_for_new_data_too(us: float, replay_us: float) -> None:
    clock = ScriptedClock()
    kernels = {0: Honest(clock, us, us), 1: Kept(clock, us, replay_us)}
    judge = Judge(CPU, clock, lambda source, *_: kernels[len(source.text)], None)
    entries = tuple(
        Entry(n, KernelSource("x" * n, "sm_80", (), ()), b"", (SHAPE,)) for n in kernels
    )
    result = run_finals(judge, PROBLEM, entries, (SHAPE,), 1, {}, rounds=3)
    assert [f.trial for f in result.finalists] == [0]
    ((trial, why),) = result.rejected
    assert (trial, why.trial_class) == (1, TrialClass.TIMING_INVALID)


def bay_of(kernel: Kept, count: int = 1) -> tuple[object, list[Launcher]]:
    bay = Arena((SHAPE,), DType.FP16, 1, CPU).bay(SHAPE)
    calls = [kernel.prepare(*s.tensors, bay.output.tensor, s.scale) for s in bay.slots[:count]]
    return bay, calls


def test_output_on_new_data_is_judged() -> None:
    clock = ScriptedClock()
    kernel = Kept(clock, 5000.0, 1000.0, whose="QK")  # V may change as it likes
    bay, calls = bay_of(kernel)
    calls[0]()
    moved = check_fresh(calls, bay, clock, Sample(1000.0, 1000.0, 1000.0, 5), lambda: 3)
    assert moved is None  # Q and K are new as well
    again = check_fresh(calls, bay, clock, Sample(1000.0, 1000.0, 1000.0, 5), lambda: 3)
    assert again is None  # the same draw: what was kept is right for it
    stale = Kept(clock, 5000.0, 1000.0, whose="")
    bay, calls = bay_of(stale)
    calls[0]()
    found = check_fresh(calls, bay, clock, Sample(1000.0, 1000.0, 1000.0, 5))
    assert found is not None
    assert (found.trial_class, found.stage) == (TrialClass.WRONG_OUTPUT, Stage.TIME)
    assert "columns drawn from" in found.reason


class Delayed(ScriptedClock):
    """Another process delays the first windows by milliseconds."""

    delayed = 0

    def windows_us(self, calls, during=None, before=None):  # type: ignore[no-untyped-def]
        """See `Clock.windows_us`."""
        self.delayed -= 1
        times = super().windows_us(calls, during, before)
        return [us + (4000.0 if self.delayed >= 0 else 0.0) for us in times]


@pytest.mark.parametrize("us", [5.0, 400.0])
def test_busy_card_makes_no_honest_kernel_invalid(us: float) -> None:
    clock = Delayed()
    bay, calls = bay_of(Honest(clock, us, us), 3)
    clock.delayed = FRESH_TRIES - 1
    assert check_fresh(calls, bay, clock, Sample(us, us, us, 5)) is None
    clock.delayed = FRESH_TRIES
    found = check_fresh(calls, bay, clock, Sample(us, us, us, 5))
    assert found is not None and found.trial_class is TrialClass.TIMING_INVALID


@pytest.mark.parametrize("dtype", list(DType))
def test_answer_for_moved_columns_is_the_exact_one(dtype: DType) -> None:
    shape = Shape(1, 4, 2, 40, 70, 48, 24, True)
    bay = Arena((shape,), dtype, 1, CPU).bay(shape)
    first = renew(bay, 5)
    kept = [t.clone() for t in first.inputs.tensors]
    for name, fresh, old in zip("QKV", kept, bay.exams[-1].pristine, strict=True):
        assert not torch.equal(fresh, old), name
    (part,) = first.expected
    (right,) = expect(Inputs(*first.inputs.tensors, first.inputs.scale, True))
    torch.testing.assert_close(part.exact, right.exact, rtol=0, atol=1e-12)
    assert part.own_error == pytest.approx(right.own_error, rel=0.5)
    second = renew(bay, 6)
    assert not torch.equal(second.inputs.v, kept[2])
    renew(bay, 5)
    assert all(torch.equal(a, b) for a, b in zip(bay.exams[-1].inputs.tensors, kept, strict=True))


def test_every_slot_is_new() -> None:
    bay = Arena((SHAPE,), DType.FP16, 1, CPU).bay(SHAPE)
    before = [[t.clone() for t in slot.tensors] for slot in bay.slots]
    renew(bay, 5)
    assert len(bay.slots) > 1
    for slot, old in zip(bay.slots, before, strict=True):
        assert not any(torch.equal(a, b) for a, b in zip(slot.tensors, old, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_signs_flipped_twice_are_the_first_bits(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    once = flip_signs(every.clone())
    assert (once.view(torch.int16) == every.view(torch.int16) ^ -0x8000).all()
    assert (flip_signs(once).view(torch.int16) == every.view(torch.int16)).all()


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("causal", [False, True])
def test_moved_columns_of_a_latent_cache_stay_one(page: int, causal: bool) -> None:
    """V is the first columns of K: they move together, and the answer with them."""
    shape = Shape(2, 16, 1, 2, 70, 576, 512, causal)
    assert shape.latent
    bay = Arena((shape,), DType.BF16, 1, CPU, page).bay(shape)
    exam = renew(bay, 5)
    _, k, v = exam.inputs.tensors
    assert v.data_ptr() == k.data_ptr() and torch.equal(v, k[..., :512])
    assert not torch.equal(k, bay.exams[-1].pristine[1])
    for part, right in zip(exam.expected, expect(exam.inputs), strict=True):
        torch.testing.assert_close(part.exact, right.exact, rtol=0, atol=1e-12)
