"""Finalists and verified kernels are looked at in every element, also of large outputs."""

from __future__ import annotations

import fakes
import pytest
import torch
from scripted_clock import ScriptedClock

from codegen.kernel import KernelSource
from runs.record import Measured, Rejected, TrialClass
from space.variant import DType, Problem, Shape
from tuner.evaluate.finals import run_finals
from tuner.evaluate.judge import Judge
from tuner.evaluate.last_exam import examine
from tuner.evaluate.launch import Prepare
from tuner.job import Entry

PROBLEM = Problem("gqa", DType.FP16, 32, 32, True)
SHAPE = Shape(1, 8, 2, 300, 333, 32, 32, True)
SOURCE = KernelSource("", "sm_80", (), ())
CPU = torch.device("cpu")

T = torch.Tensor


def wrong_in_head_1(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Right on small problems; on the timed shape one head is off, which no sample has."""
    fakes.right(q, k, v, out, scale, causal)
    if q.shape[1:3] == (SHAPE.seqlen_q, SHAPE.heads):
        out[:, 200, 1] += 0.25


class Loaded:
    def __init__(self, body: fakes.Body) -> None:
        self.prepare: Prepare = fakes.kernel(body, True)

    def unload(self) -> None:
        pass


@pytest.fixture(autouse=True)
def samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape of 8 heads counts as large."""
    monkeypatch.setattr("tuner.evaluate.reference.WHOLE_SCORES", 1 << 18)


def judge(body: fakes.Body) -> Judge:
    return Judge(CPU, ScriptedClock(), lambda *_: Loaded(body), None)


def test_trial_sees_a_sample() -> None:
    outcome = judge(wrong_in_head_1).judge(PROBLEM, SOURCE, b"", (SHAPE,), 1, {})
    assert isinstance(outcome, Measured)  # a search may be led astray by this; its end is not


def test_finals_see_all() -> None:
    entries = (Entry(3, SOURCE, b"", (SHAPE,)),)
    result = run_finals(judge(wrong_in_head_1), PROBLEM, entries, (SHAPE,), 1, {}, rounds=3)
    ((trial, why),) = result.rejected
    assert (trial, why.trial_class) == (3, TrialClass.WRONG_OUTPUT)
    assert "at [b, s, h, d] (0, 200, 1, " in why.reason
    right = run_finals(judge(fakes.right), PROBLEM, entries, (SHAPE,), 1, {}, rounds=3)
    assert not right.rejected and len(right.finalists) == 1


def test_verify_sees_all() -> None:
    found = examine(judge(fakes.right), fakes.kernel(wrong_in_head_1, True), PROBLEM, (SHAPE,), 1)
    assert isinstance(found, Rejected)
    assert found.reason.startswith("timed shape")
