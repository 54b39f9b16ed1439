"""A whole trial on CPU tensors: fake kernels, a scripted clock, every class in its place."""

from __future__ import annotations

import math

import fakes
import pytest
import torch
from scripted_clock import ScriptedClock

from codegen.kernel import KernelSource
from runs.record import Measured, Outcome, Rejected, Stage, TrialClass
from space.gpu import GpuSpec, gpu_named
from space.variant import DType, Problem, Shape
from tuner.evaluate.conditions import Conditions
from tuner.evaluate.finals import interleave, run_finals
from tuner.evaluate.inputs import Inputs
from tuner.evaluate.judge import Judge
from tuner.evaluate.launch import Launcher, LaunchError, Prepare
from tuner.evaluate.peers import PeerAbsent, Run
from tuner.job import Entry, Reading

CPU = torch.device("cpu")
PROBLEM = Problem("gqa", DType.FP16, 32, 32, True)
SHAPES = (Shape(2, 4, 2, 64, 64, 32, 32, True), Shape(1, 4, 2, 130, 130, 32, 32, True))
SOURCE = KernelSource("", "sm_80", (), ())

T = torch.Tensor


class Loaded:
    """A fake kernel that a Judge can load; counts what is still loaded."""

    alive = 0

    def __init__(self, body: fakes.Body, us: float, clock: ScriptedClock) -> None:
        self._inner = fakes.kernel(body, True)
        self._us = us
        self._clock = clock
        type(self).alive += 1

    @property
    def prepare(self) -> Prepare:
        def prepare(q: T, k: T, v: T, out: T, scale: float) -> Launcher:
            launch = self._inner(q, k, v, out, scale)
            call = self._clock.call("kernel", self._us, launch)
            return lambda: (call(), None)[1]

        return prepare

    def unload(self) -> None:
        type(self).alive -= 1


def judge_of(body: fakes.Body, us: float = 5000.0, gpu: GpuSpec | None = None) -> Judge:
    clock = ScriptedClock()
    Loaded.alive = 0
    return Judge(CPU, clock, lambda *_: Loaded(body, us, clock), gpu)


def judged(body: fakes.Body, us: float = 5000.0, gpu: GpuSpec | None = None) -> Outcome:
    outcome = judge_of(body, us, gpu).judge(PROBLEM, SOURCE, b"", SHAPES, 1, {})
    assert Loaded.alive == 0
    return outcome


def test_right_kernel_is_measured_on_every_shape() -> None:
    outcome = judged(fakes.right)
    assert isinstance(outcome, Measured)
    assert [t.shape for t in outcome.timings] == list(SHAPES)
    assert all(t.median_us == 5000.0 for t in outcome.timings)
    assert 0.0 < outcome.error_ratio <= 2.0


@pytest.mark.parametrize(
    ("body", "trial_class"),
    [
        (fakes.writes_nothing, TrialClass.WRONG_OUTPUT),
        (fakes.half_written, TrialClass.WRONG_OUTPUT),
        (fakes.even_heads, TrialClass.WRONG_OUTPUT),
        (fakes.zeros, TrialClass.WRONG_OUTPUT),
        (fakes.mean_of_v, TrialClass.WRONG_OUTPUT),
        (fakes.wrong_heads, TrialClass.WRONG_OUTPUT),
        (fakes.sees_one_key_more, TrialClass.WRONG_OUTPUT),
        (fakes.misses_last_key, TrialClass.WRONG_OUTPUT),
        (fakes.top_left_causal, TrialClass.WRONG_OUTPUT),
        (fakes.finite_sentinel, TrialClass.WRONG_OUTPUT),
        (fakes.padded_keys_score_zero, TrialClass.WRONG_OUTPUT),
        (fakes.nan_for_empty_rows, TrialClass.WRONG_OUTPUT),
        (fakes.writes_past_the_end, TrialClass.WRONG_OUTPUT),
        (fakes.modifies_k, TrialClass.INPUT_MODIFIED),
        (fakes.half_precision_sums, TrialClass.PRECISION),
    ],
)
def test_each_fake_gets_its_class(body: fakes.Body, trial_class: TrialClass) -> None:
    outcome = judged(body)
    assert isinstance(outcome, Rejected)
    assert outcome.trial_class is trial_class, outcome.reason


@pytest.mark.parametrize("cheat", [fakes.PreviousOutput, fakes.CachedByPointer])
def test_replay_is_wrong(cheat: type[fakes.PreviousOutput] | type[fakes.CachedByPointer]) -> None:
    assert judged(cheat()).trial_class is TrialClass.WRONG_OUTPUT


def test_one_in_twenty_is_nondeterministic() -> None:
    assert judged(fakes.WrongSometimes(20)).trial_class is TrialClass.NONDETERMINISTIC


class OnlyWhenTimed:
    """Right on small problems; misbehaves on the timed shapes in one way."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.calls = 0

    def __call__(self, q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
        fakes.right(q, k, v, out, scale, causal)
        if q.shape[2] != SHAPES[0].heads:
            return
        self.calls += 1
        if self.how == "late input" and self.calls == 3:
            k.mul_(0.5)
        elif self.how == "late bits" and self.calls > 3:
            out[0, 0, 0, 0] += 0.25
        elif self.how == "at once":
            out[0, 1, 0, 0] += 0.25


@pytest.mark.parametrize(
    ("how", "trial_class"),
    [
        ("late input", TrialClass.NONDETERMINISTIC),
        ("late bits", TrialClass.NONDETERMINISTIC),
        ("at once", TrialClass.WRONG_OUTPUT),
    ],
)
def test_timed_launches_are_checked_too(how: str, trial_class: TrialClass) -> None:
    assert judged(OnlyWhenTimed(how)).trial_class is trial_class


def test_input_changed_on_the_last_timed_launch() -> None:
    class Last:
        calls = 0

        def __call__(self, q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
            fakes.right(q, k, v, out, scale, causal)
            if q.shape[2] == SHAPES[0].heads:
                self.calls += 1
                if self.calls > 8:
                    k[0, 0, 0, 0] += 1

    assert judged(Last()).trial_class in (
        TrialClass.INPUT_MODIFIED,
        TrialClass.NONDETERMINISTIC,
    )


def test_faster_than_the_card_allows() -> None:
    outcome = judged(fakes.right, us=1e-3, gpu=gpu_named("h200"))
    assert outcome.trial_class is TrialClass.IMPOSSIBLE_TIME


def test_cubin_that_does_not_load() -> None:
    def load(*_: object) -> Loaded:
        raise LaunchError("load cubin: CUDA_ERROR_NO_BINARY_FOR_GPU")

    judge = Judge(CPU, ScriptedClock(), load, None)
    outcome = judge.judge(PROBLEM, SOURCE, b"", SHAPES, 1, {})
    assert outcome == Rejected(
        TrialClass.LAUNCH_FAILED, Stage.LAUNCH, "load cubin: CUDA_ERROR_NO_BINARY_FOR_GPU"
    )


def test_hopeless_candidate_is_sampled_less() -> None:
    judge = judge_of(fakes.right)
    best = {shape: 100.0 for shape in SHAPES}
    outcome = judge.judge(PROBLEM, SOURCE, b"", SHAPES, 1, best)
    assert isinstance(outcome, Measured)
    assert [t.samples for t in outcome.timings] == [2, 2]


def test_answers_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = judge_of(fakes.right)
    judge.judge(PROBLEM, SOURCE, b"", SHAPES, 1, {})

    def never(_: Inputs) -> None:
        raise AssertionError("the answer was worked out again")

    monkeypatch.setattr("tuner.evaluate.arena.expect", never)
    monkeypatch.setattr("tuner.evaluate.verify.expect", never)
    assert isinstance(judge.judge(PROBLEM, SOURCE, b"", SHAPES, 1, {}), Measured)


def test_other_shapes_make_a_larger_arena() -> None:
    judge = judge_of(fakes.right)
    larger = (*SHAPES, Shape(1, 4, 2, 300, 300, 32, 32, True))
    assert isinstance(judge.judge(PROBLEM, SOURCE, b"", SHAPES, 1, {}), Measured)
    assert isinstance(judge.judge(PROBLEM, SOURCE, b"", larger, 1, {}), Measured)


def test_canary() -> None:
    assert judge_of(fakes.right).canary(PROBLEM, SOURCE, b"")
    assert not judge_of(fakes.zeros).canary(PROBLEM, SOURCE, b"")


# ---- finals ------------------------------------------------------------------------------------


def peer(body: fakes.Body) -> object:
    def make(inputs: Inputs) -> Run:
        def run() -> T:
            out = torch.empty_like(inputs.q)
            body(*inputs.tensors, out, inputs.scale, inputs.causal)
            return out

        return run

    return make


def test_finals_time_entries_and_peers_and_say_who_is_absent() -> None:
    def missing(inputs: Inputs) -> Run:
        raise PeerAbsent("not installed")

    def raising(inputs: Inputs) -> Run:
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    judge = judge_of(fakes.right, us=1500.0)
    entries = (Entry(4, SOURCE, b"", SHAPES), Entry(9, SOURCE, b"", SHAPES[:1]))
    peers = {"good": peer(fakes.right), "bad": peer(fakes.zeros), "no": missing, "sdpa": raising}
    result = run_finals(judge, PROBLEM, entries, SHAPES, 1, peers, rounds=7)  # type: ignore[arg-type]
    assert Loaded.alive == 0
    table = [(f.shape, f.name, f.trial, f.timing.median_us) for f in result.finalists]
    assert table == [
        (SHAPES[0], "trial 4", 4, 1500.0),
        (SHAPES[0], "trial 9", 9, 1500.0),
        (SHAPES[0], "good", None, 1000.0),
        (SHAPES[1], "trial 4", 4, 1500.0),
        (SHAPES[1], "good", None, 1000.0),
    ]
    assert all(f.timing.samples == 7 and not f.chosen for f in result.finalists)
    reasons = {a.name: a.reason for a in result.absent if a.shape == SHAPES[0]}
    assert reasons["no"] == "not installed"
    assert reasons["sdpa"] == "No available kernel. Aborting execution."
    assert reasons["bad"].startswith("wrong on this shape: peer: 0 at")


def test_finalist_that_fails_hidden_problems_is_rejected() -> None:
    judge = judge_of(fakes.WrongSometimes(61))
    result = run_finals(judge, PROBLEM, (Entry(4, SOURCE, b"", SHAPES),), SHAPES, 1, {}, rounds=3)
    assert not result.finalists
    assert [(t, r.trial_class) for t, r in result.rejected] == [(4, TrialClass.NONDETERMINISTIC)]
    assert Loaded.alive == 0


def test_rounds_are_interleaved_and_start_with_another_each() -> None:
    clock = ScriptedClock()
    calls = {n: clock.call(n, us) for n, us in (("a", 3.0), ("b", 4.0), ("c", 5.0))}
    samples = interleave(calls, clock, rounds=3)
    assert {n: s.median_us for n, s in samples.items()} == {"a": 3.0, "b": 4.0, "c": 5.0}
    assert clock.log[:9] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert all(s.count == 3 for s in samples.values())
    assert interleave({}, clock, rounds=3) == {}


def test_finals_read_the_card_while_it_works_and_redo_what_was_too_hot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heats = [True, False]

    class Hot:
        def read(self) -> Conditions:
            return Conditions(1700, 2600, 61, 640.0, ("power cap",))

        def overheated(self) -> bool:
            return heats.pop(0)

    monkeypatch.setattr("tuner.evaluate.finals.COOL_S", 0.0)
    judge = judge_of(fakes.right, us=1500.0)
    entries = (Entry(4, SOURCE, b"", SHAPES[:1]),)
    result = run_finals(judge, PROBLEM, entries, SHAPES[:1], 1, {}, 3, Hot())
    assert [f.timing.samples for f in result.finalists] == [3]
    assert result.readings == (Reading(SHAPES[0], 1700, 2600, 61, 640.0, "power cap", 1),)


def test_sample_of_a_hot_card_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Meter:
        asked = 0

        def overheated(self) -> bool:
            self.asked += 1
            return self.asked <= 2

    monkeypatch.setattr("tuner.evaluate.judge.COOL_S", 0.0)
    judge = judge_of(fakes.right)
    judge.meter = meter = Meter()
    outcome = judge.judge(PROBLEM, SOURCE, b"", SHAPES[:1], 1, {})
    assert isinstance(outcome, Measured)
    assert meter.asked == 3


def test_a_kernel_with_a_scale_of_its_own_is_wrong() -> None:
    def body(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
        own = math.copysign(q.shape[3] ** -0.5, scale)
        fakes.right(q, k, v, out, own, causal)

    outcome = judged(body)
    assert isinstance(outcome, Rejected) and outcome.trial_class is TrialClass.WRONG_OUTPUT
    assert "negative scale" in outcome.reason


def test_a_kernel_that_takes_o_for_packed_is_wrong() -> None:
    def body(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
        whole = torch.empty(out.shape, dtype=out.dtype)
        fakes.right(q, k, v, whole, scale, causal)
        out.as_strided(whole.shape, whole.stride()).copy_(whole)

    outcome = judged(body)
    assert isinstance(outcome, Rejected) and outcome.trial_class is TrialClass.WRONG_OUTPUT


@pytest.mark.parametrize("strides_of", ["k", "v"])
def test_a_kernel_that_takes_k_and_v_for_laid_out_alike_is_wrong(strides_of: str) -> None:
    def body(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
        if k.shape == v.shape:
            alike = k.stride() if strides_of == "k" else v.stride()
            k, v = k.as_strided(k.shape, alike), v.as_strided(v.shape, alike)
        fakes.right(q, k, v, out, scale, causal)

    outcome = judged(body)
    assert isinstance(outcome, Rejected) and outcome.trial_class is TrialClass.WRONG_OUTPUT


def test_a_kernel_that_sees_no_key_tile_that_is_not_full_is_wrong() -> None:
    def body(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
        out.zero_() if k.shape[1] < 64 else fakes.right(q, k, v, out, scale, causal)

    outcome = judged(body)
    assert isinstance(outcome, Rejected) and outcome.trial_class is TrialClass.WRONG_OUTPUT
