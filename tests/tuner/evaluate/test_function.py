"""The user's function: what is found out about it, and kernels judged by it on CPU tensors."""

from __future__ import annotations

import hashlib
from pathlib import Path

import fakes
import pytest
import torch
from scripted_clock import ScriptedClock

from codegen.kernel import KernelSource
from runs.record import Measured, Reference, Rejected, TrialClass
from space.variant import DType, Problem, Shape
from tuner.evaluate import reference as references
from tuner.evaluate.checks import small_shape, trial_checks
from tuner.evaluate.function import Function, FunctionRefused, Rows
from tuner.evaluate.inputs import Check, Data, Inputs, make
from tuner.evaluate.judge import Judge
from tuner.evaluate.launch import Launcher, Prepare
from tuner.evaluate.reference import expect, whole

EXAMPLES = Path(__file__).parents[3] / "examples"
CPU = torch.device("cpu")
CAUSAL = Problem("gqa", DType.FP16, 32, 32, True)
FULL = Problem("gqa", DType.FP16, 32, 32, False)
T = torch.Tensor


def referred(path: Path, function: str, **scalars: float) -> Reference:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Reference(str(path), function, digest, tuple(sorted(scalars.items())))


def example(name: str, function: str, **scalars: float) -> Reference:
    return referred(EXAMPLES / f"{name}.py", function, **scalars)


SOFTCAP = example("softcap", "softcap_attention", softcap=5.0)
SINKS = example("sink_tokens", "sink_attention", window_left=9, sinks=3)


@pytest.mark.parametrize(
    ("reference", "rows"),
    [
        (SOFTCAP, Rows.PREFIX),
        (example("sliding_window", "window_attention", window_left=1023), Rows.PREFIX),
        (example("alibi", "alibi_attention"), Rows.PREFIX),
        (SINKS, Rows.PREFIX),
        (example("sigmoid", "sigmoid_attention", bias=-6.0), Rows.ANY),
    ],
)
def test_an_example_is_understood(reference: Reference, rows: Rows) -> None:
    function = Function.load(reference, FULL)
    assert (function.exact_dtype, function.rows) == (torch.float64, rows)
    assert function.unequal and function.more_queries and function.accepts == {"scale"}


PREAMBLE = "import torch\n"
SDPA = "torch.einsum('bmhd,bnhd->bhmn', q, k.repeat_interleave(3, 2)).softmax(-1)"
PLAIN = f"torch.einsum('bhmn,bnhd->bmhd', {SDPA}, v.repeat_interleave(3, 2))"


def written(folder: Path, body: str, signature: str = "q, k, v") -> Reference:
    path = folder / "mine.py"
    path.write_text(f"{PREAMBLE}def f({signature}):\n    {body}\n")
    return referred(path, "f")


REFUSED = {
    "raises": ("raise KeyError('heads')", r"mine.py:f failed on q \[2, 64, 3, 32\].*KeyError"),
    "shape": ("return q[:, :1]", r"returned shape \[2, 1, 3, 32\] .*\[2, 64, 3, 32\] is wanted"),
    "dtype": (f"return ({PLAIN}).float()", r"returned float32 for .*float16; float16 is wanted"),
    "nan": ("return q * float('nan')", r"returned 12288 NaN or Inf of 12288 numbers"),
    "no tensor": ("return None", "returned NoneType; a tensor is wanted"),
    "in place": (f"q *= 1.0001\n    return {PLAIN}", "changes q in place"),
    "random": (f"return {PLAIN} * torch.rand(())", "something else on the same tensors"),
    "batch": (f"return ({PLAIN}) + v.mean()", "mixes the elements of a batch"),
    "even in v": (f"return ({PLAIN}).abs()", r"mine.py:f\(q, k, -v\) is not -mine.py:f\(q, k, v\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_cannot_be_compared_with_is_refused(name: str, tmp_path: Path) -> None:
    body, said = REFUSED[name]
    with pytest.raises(FunctionRefused, match=said):
        Function.load(written(tmp_path, body), FULL)


def test_a_function_that_wants_more_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FunctionRefused, match=r"missing a required argument: 'mask'"):
        Function.load(written(tmp_path, "return q", "q, k, v, mask"), FULL)


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    reference = written(tmp_path, f"return {PLAIN}")
    (tmp_path / "mine.py").write_text("def f(q, k, v): return q\n")
    with pytest.raises(FunctionRefused, match="was changed since the run began"):
        Function.load(reference, FULL)


def test_float32_is_taken_where_float64_fails(tmp_path: Path) -> None:
    body = f"assert q.dtype != torch.float64\n    return {PLAIN}"
    assert Function.load(written(tmp_path, body), FULL).exact_dtype is torch.float32


def test_equal_lengths_only_leaves_out_the_other_problems(tmp_path: Path) -> None:
    body = f"assert q.shape[1] == k.shape[1]\n    return {PLAIN}"
    function = Function.load(written(tmp_path, body), FULL)
    assert (function.unequal, function.more_queries) == (False, False)
    taken = [c for c in trial_checks(FULL) if function.takes(c)]
    assert taken and all(c.shape.seqlen_q == c.shape.seqlen_k for c in taken)
    assert not any(c.data is Data.NAN_QUERIES or c.scale for c in taken)


# ---- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", [SOFTCAP, SINKS, example("sigmoid", "sigmoid_attention")])
def test_rows_of_a_large_problem_are_those_of_all(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = Function.load(reference, FULL)
    check = Check("large", small_shape(FULL, 2, 700, 900), Data.NORMAL)
    inputs = make(check, DType.FP16, CPU, function)
    (everything,) = expect(inputs)
    monkeypatch.setattr(references, "WHOLE_SCORES", 1 << 10)
    parts = expect(inputs)
    assert len(parts) >= 6 and all(p.yardstick == function.name for p in parts)
    for part in parts:
        assert torch.allclose(part.exact, everything.exact[part.index], rtol=1e-9, atol=1e-12)
    covered = torch.zeros(everything.exact.shape, dtype=torch.int)
    for part in whole(inputs, 1e-3):
        covered[part.index] += 1
        assert torch.allclose(part.exact, everything.exact[part.index], atol=1e-5)
    assert bool((covered == 1).all())


def test_every_batch_of_a_function_whose_rows_do_not_stand_alone_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large problem the first and the last in a trial, every element in the finals."""
    function = Function.load(written(tmp_path, f"return ({PLAIN}) / q.shape[1]"), FULL)
    assert function.rows is Rows.NONE
    monkeypatch.setattr(references, "WHOLE_SCORES", 1)
    check = Check("large", small_shape(FULL, 4, 90, 130))
    inputs = make(check, FULL.dtype, CPU, function)

    assert [p.index[0].start for p in expect(inputs)] == [0, 3]
    seen = list(whole(inputs, 1e-3))
    assert [p.index[0].start for p in seen] == [0, 1, 2, 3]
    assert all(p.exact.shape == (1, *inputs.q.shape[1:]) for p in seen)


def test_rows_that_see_nothing_are_zero() -> None:
    function = Function.load(SOFTCAP, CAUSAL)
    check = Check("more rows than keys", small_shape(CAUSAL, 1, 200, 72), Data.NORMAL)
    (part,) = expect(make(check, DType.FP16, CPU, function))
    assert bool((part.exact[:, :128] == 0).all()) and bool((part.exact[:, 128:] != 0).any())
    assert 0 < part.own_error < 0.02


# ---- the judge -----------------------------------------------------------------------------------


def judged(body: fakes.Body, reference: Reference, problem: Problem) -> object:
    clock = ScriptedClock()

    class Loaded:
        @property
        def prepare(self) -> Prepare:
            def prepare(q: T, k: T, v: T, out: T, scale: float) -> Launcher:
                call = clock.call("kernel", 5000.0, lambda: body(q, k, v, out, scale, True))
                return lambda: (call(), None)[1]

            return prepare

        def unload(self) -> None:
            return None

    function = Function.load(reference, problem)
    judge = Judge(CPU, clock, lambda *_: Loaded(), None, function=function)
    shapes = (Shape(2, 6, 2, 130, 130, 32, 32, problem.causal),)
    return judge.judge(problem, KernelSource("", "sm_80", (), ()), b"", shapes, 1, {})


def right_softcap(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    s = fakes.scores(q, k, scale, False)
    capped = 5.0 * torch.tanh(s / 5.0)
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1)
    capped = capped.masked_fill(hidden, float("-inf"))
    out.copy_(fakes.weigh(capped, v, q.shape[2] // k.shape[2], q.dtype))


def test_a_kernel_of_the_function_is_right() -> None:
    outcome = judged(right_softcap, SOFTCAP, CAUSAL)
    assert isinstance(outcome, Measured), outcome
    assert outcome.error_ratio is not None and outcome.error_ratio <= 2.0


def test_plain_attention_is_wrong_where_the_function_is_another() -> None:
    outcome = judged(fakes.right, SOFTCAP, CAUSAL)
    assert isinstance(outcome, Rejected) and outcome.trial_class is TrialClass.WRONG_OUTPUT
    assert "softcap.py:softcap_attention's own" in outcome.reason


def test_inputs_know_their_function() -> None:
    function = Function.load(SOFTCAP, CAUSAL)
    made = make(Check("a", small_shape(CAUSAL, 1, 8, 8)), DType.FP16, CPU, function)
    assert isinstance(made, Inputs) and made.function is function
