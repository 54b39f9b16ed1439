"""The user's function in decode: sequences of a cache, answers for the gate, data drawn anew."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from decode_fakes import Decoder
from scripted_clock import ScriptedClock

from codegen.kernel import KernelSource
from codegen.tl.ast import Program
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import sketches
from runs.record import Measured, Reference, Rejected, TrialClass
from space.params import Point
from space.variant import LATENT_DIMS, DType, Phase, Problem, Shape
from tuner.evaluate import gate
from tuner.evaluate.arena import Arena
from tuner.evaluate.checks import checks_of_function
from tuner.evaluate.decode_checks import trial_checks
from tuner.evaluate.freshness import Draw, renew
from tuner.evaluate.function import Function, FunctionRefused
from tuner.evaluate.function_cases import cases_of
from tuner.evaluate.inputs import Check, make
from tuner.evaluate.judge import Judge
from tuner.evaluate.reference import expect, whole
from tuner.evaluate.timing import Plan

CPU = torch.device("cpu")
BODY = """\
import torch

def f(q, k, v, *, scale, causal, factor=1.0):
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    s = torch.einsum("bmhd,bnhd->bhmn", {q}, k) * scale
    if causal:
        m, n = s.shape[-2:]
        s = s.masked_fill(torch.ones(m, n, dtype=torch.bool).triu(n - m + 1), float("-inf"))
    return factor * torch.einsum("bhmn,bnhd->bmhd", s.softmax(-1), v)
"""


def written(folder: Path, factor: float = 1.0, q: str = "q") -> Reference:
    path = folder / "mine.py"
    path.write_text(BODY.format(q=q))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Reference(str(path), "f", digest, (("factor", factor),))


def decode(variant: str, causal: bool = False, page: int = 0) -> Problem:
    dims = LATENT_DIMS if variant == "mla" else (32, 16)
    return Problem(variant, DType.FP16, *dims, causal, Phase.DECODE, page)


# ---- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", ["gqa", "mla"])
def test_each_sequence_has_the_answer_of_its_own_keys(
    variant: str, causal: bool, page: int, tmp_path: Path
) -> None:
    problem = decode(variant, causal, page)
    function = Function.load(written(tmp_path), problem)
    counts = (70, 0, 3, 33)
    heads = (4, 1) if variant == "mla" else (6, 2)
    shape = Shape(4, *heads, 5, 70, problem.head_dim, problem.head_dim_v, causal)
    check = Check("ragged", shape, counts=counts, page=page)
    (mine,) = expect(make(check, DType.FP16, CPU, function))
    (plain,) = expect(make(check, DType.FP16, CPU))
    torch.testing.assert_close(mine.exact, plain.exact, rtol=0, atol=1e-12)
    assert mine.yardstick == "mine.py:f" and 0 < mine.own_error < 4 * plain.own_error
    covered = torch.zeros(mine.exact.shape, dtype=torch.int)
    for part in whole(make(check, DType.FP16, CPU, function), 1e-3):
        covered[part.index] += 1
        torch.testing.assert_close(part.exact, plain.exact[part.index], rtol=0, atol=1e-5)
    assert bool((covered == 1).all())


def test_only_caches_that_the_function_takes_are_asked(tmp_path: Path) -> None:
    reference = written(tmp_path, q="(q if q.shape[1] <= k.shape[1] else None)")
    function = Function.load(reference, decode("gqa"))
    assert function.unequal and not function.more_queries
    taken = [c for c in trial_checks(decode("gqa")) if function.takes(c)]
    assert any(0 in c.counts for c in taken)  # an empty sequence needs no answer of it
    assert all(n == 0 or n >= c.shape.seqlen_q for c in taken for n in c.counts)


def test_a_function_of_equal_lengths_is_refused(tmp_path: Path) -> None:
    reference = written(tmp_path, q="(q if q.shape[1] == k.shape[1] else None)")
    with pytest.raises(FunctionRefused, match="takes no fewer queries than keys"):
        Function.load(reference, decode("gqa"))


def test_a_latent_function_must_turn_with_k(tmp_path: Path) -> None:
    """The judge negates Q and K there, since V is part of K."""
    Function.load(written(tmp_path, q="q.abs()"), decode("gqa"))
    with pytest.raises(FunctionRefused, match=r"f\(-q, -k, -v\) is not -mine.py:f\(q, k, v\)"):
        Function.load(written(tmp_path, q="q.abs()"), decode("mla"))


# ---- the gate ------------------------------------------------------------------------------------


def program(problem: Problem) -> Program:
    text = sketches(problem.variant, problem.causal, Phase.DECODE)["decode"]
    return bind(parse(text), problem, Point.of({"BM": 64, "BN": 64}))


@pytest.mark.parametrize("variant", ["gqa", "mla"])
@pytest.mark.parametrize("causal", [False, True])
def test_gate_compares_split_programs_with_the_function(
    variant: str, causal: bool, tmp_path: Path
) -> None:
    problem = decode(variant, causal)
    same, half = tmp_path / "same.npz", tmp_path / "half.npz"
    gate.save(same, cases_of(Function.load(written(tmp_path), problem), problem))
    gate.save(half, cases_of(Function.load(written(tmp_path, 0.5), problem), problem))
    assert {c.splits for c in gate.load(same)} > {1}
    assert gate.fault(program(problem), problem, same) is None
    said = gate.fault(program(problem), problem, half)
    assert said is not None and said.startswith("interpreter, N(0,1), Sq=2 Sk=555: ")


# ---- the judge -----------------------------------------------------------------------------------


class Loaded:
    """A decode kernel of torch."""

    prepare = staticmethod(Decoder(causal=True).prepare)

    def unload(self) -> None:
        """Nothing is loaded."""


@pytest.mark.parametrize(("factor", "page"), [(1.0, 0), (1.0, 16), (0.5, 16)])
def test_kernels_of_a_cache_are_judged_by_the_function(
    factor: float, page: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = decode("gqa", True, page)
    monkeypatch.setattr("tuner.evaluate.judge.trial_checks", lambda p: trial_checks(p)[1:3])
    monkeypatch.setattr("tuner.evaluate.judge.HIDDEN_CHECKS", 1)
    function = Function.load(written(tmp_path, factor), problem)
    judge = Judge(
        CPU, ScriptedClock(), lambda *_: Loaded(), None, Plan(max_samples=2, warmup_us=0),
        function=function,
    )  # fmt: skip
    shapes = (Shape(2, 6, 2, 2, 45, 32, 16, True),)
    outcome = judge.judge(problem, KernelSource("", "sm_80", (), ()), b"", shapes, 1, {})
    if factor == 1.0:
        assert isinstance(outcome, Measured), outcome
    else:
        assert isinstance(outcome, Rejected), outcome
        assert outcome.trial_class is TrialClass.WRONG_OUTPUT and "mine.py:f's" in outcome.reason


@pytest.mark.parametrize("page", [0, 16])
def test_long_keys_are_asked_in_one_split_and_in_several(page: int) -> None:
    checks = checks_of_function(decode("gqa", page=page))
    assert all(max(c.counts) > 2000 and c.page == page for c in checks)
    assert {c.splits for c in checks} > {1}


# ---- data drawn anew -----------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [decode("gqa"), decode("gqa", page=16)])
def test_a_function_that_tells_columns_apart_is_asked_again(
    problem: Problem, tmp_path: Path
) -> None:
    weights = "q * torch.linspace(0.2, 3.0, 32, dtype=q.dtype)"
    function = Function.load(written(tmp_path, q=weights), problem)
    shape = Shape(2, 6, 2, 4, 45, 32, 16, False)
    bay = Arena((shape,), DType.FP16, 1, CPU, problem.page, function).bay(shape)
    exam = renew(bay, 5)
    (right,) = expect(exam.inputs)
    (part,) = exam.expected
    assert exam.inputs.function is function and torch.equal(part.exact, right.exact)
    # the answer that would follow for plain attention is not this function's
    derived = Draw.new(shape, 5, CPU).answer(bay.exams[-1].expected[0].exact)
    assert (part.exact - derived).abs().max() > 0.01
