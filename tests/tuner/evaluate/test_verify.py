"""Every fake kernel gets its class; a right one passes every check in every layout."""

from __future__ import annotations

import math

import fakes
import pytest
import torch

from runs.record import Rejected, TrialClass
from space.variant import DType, Problem, Shape
from tuner.evaluate.checks import hidden_checks, trial_checks
from tuner.evaluate.inputs import Check, Data, Layout, make
from tuner.evaluate.launch import Launcher, LaunchError, check_alignment
from tuner.evaluate.reference import expect
from tuner.evaluate.verify import Exam, set_exam, verify

CPU = torch.device("cpu")
SQUARE = Shape(2, 4, 2, 96, 96, 32, 32)
CAUSAL = Shape(2, 4, 2, 40, 72, 32, 32, True)
TALL = Shape(1, 2, 2, 90, 40, 32, 32, True)


def exam(shape: Shape, data: Data = Data.NORMAL, dtype: DType = DType.FP16, **kw: object) -> Exam:
    check = Check("small", shape, data, seed=3, **kw)  # type: ignore[arg-type]
    return set_exam(check.name, make(check, dtype, CPU))


def ends(body: fakes.Body, on: Exam, repeats: int = 3) -> TrialClass:
    verdict = verify(fakes.kernel(body, on.inputs.causal), on, repeats)
    return verdict.trial_class if isinstance(verdict, Rejected) else TrialClass.OK


@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "mla"])
@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("causal", [False, True])
def test_right_kernel_passes_every_check(variant: str, dtype: DType, causal: bool) -> None:
    problem = Problem(variant, dtype, 48 if variant == "mla" else 32, 32, causal)
    for check in (*trial_checks(problem), *hidden_checks(problem, 7, 3)):
        on = set_exam(check.name, make(check, dtype, CPU))
        verdict = verify(fakes.kernel(fakes.right, causal), on)
        assert isinstance(verdict, float), verdict
        assert verdict <= 2.0


@pytest.mark.parametrize("layout", list(Layout))
def test_right_kernel_passes_every_layout(layout: Layout) -> None:
    assert ends(fakes.right, exam(SQUARE, layout=layout)) is TrialClass.OK


@pytest.mark.parametrize(
    "body",
    [
        fakes.writes_nothing, fakes.half_written, fakes.even_heads, fakes.zeros, fakes.mean_of_v,
        fakes.wrong_heads, fakes.misses_last_key, fakes.writes_past_the_end,
    ],
)  # fmt: skip
@pytest.mark.parametrize("data", [Data.NORMAL, Data.MEAN_ONE])
def test_wrong_output(body: fakes.Body, data: Data) -> None:
    assert ends(body, exam(SQUARE, data)) is TrialClass.WRONG_OUTPUT


def test_evidence_names_index_value_and_limit() -> None:
    verdict = verify(fakes.kernel(fakes.zeros, False), exam(SQUARE, Data.MEAN_ONE))
    assert isinstance(verdict, Rejected)
    assert verdict.reason.startswith("small: 0 at [b, s, h, d] (")
    assert "is right: error " in verdict.reason and "limit " in verdict.reason


def test_holes_are_counted() -> None:
    verdict = verify(fakes.kernel(fakes.half_written, False), exam(SQUARE))
    assert isinstance(verdict, Rejected)
    assert f"{2 * 48 * 4 * 32} elements never written" in verdict.reason
    assert "(0, 48, 0, 0)" in verdict.reason


@pytest.mark.parametrize("body", [fakes.sees_one_key_more, fakes.top_left_causal])
def test_wrong_mask(body: fakes.Body) -> None:
    assert ends(body, exam(CAUSAL)) is TrialClass.WRONG_OUTPUT


def test_rows_that_see_nothing_must_be_zero_not_nan() -> None:
    assert ends(fakes.right, exam(TALL)) is TrialClass.OK
    assert ends(fakes.nan_for_empty_rows, exam(TALL)) is TrialClass.WRONG_OUTPUT


@pytest.mark.parametrize("replay", [fakes.PreviousOutput, fakes.CachedByPointer])
def test_replayed_output_is_found_on_new_data_at_the_same_address(
    replay: type[fakes.PreviousOutput] | type[fakes.CachedByPointer],
) -> None:
    assert ends(replay(), exam(SQUARE)) is TrialClass.WRONG_OUTPUT


def test_input_modified_and_restored() -> None:
    on = exam(SQUARE)
    assert ends(fakes.modifies_k, on) is TrialClass.INPUT_MODIFIED
    assert ends(fakes.right, on) is TrialClass.OK


@pytest.mark.parametrize("body", [fakes.half_precision_sums, fakes.half_precision_scores])
def test_low_precision(body: fakes.Body) -> None:
    long = Shape(1, 2, 2, 64, 512, 128, 128)
    data = Data.MEAN_ONE if body is fakes.half_precision_sums else Data.NORMAL
    dtype = DType.BF16
    assert ends(body, exam(long, data, dtype)) is TrialClass.PRECISION
    assert ends(fakes.right, exam(long, data, dtype)) is TrialClass.OK


@pytest.mark.parametrize("first", range(1, 21))
def test_wrong_once_in_twenty(first: int) -> None:
    body = fakes.WrongSometimes(20)
    body.calls = first - 1
    assert ends(body, exam(SQUARE), repeats=20) is TrialClass.NONDETERMINISTIC


@pytest.mark.parametrize(
    ("body", "data"),
    [
        (fakes.finite_sentinel, Data.SENTINEL),
        (fakes.padded_keys_score_zero, Data.NEGATIVE),
    ],
)
def test_defects_that_normal_data_hides(body: fakes.Body, data: Data) -> None:
    shape = Shape(1, 2, 2, 64, 100, 32, 32)
    assert ends(body, exam(shape, data)) is TrialClass.WRONG_OUTPUT
    assert ends(fakes.right, exam(shape, data)) is TrialClass.OK


def test_nan_in_the_answer_must_be_nan_in_the_output() -> None:
    inputs = make(Check("nan", SQUARE, seed=1), DType.FP16, CPU)
    inputs.v[0, 5, 0, 3] = math.nan
    on = set_exam("nan", inputs)
    assert ends(fakes.right, on) is TrialClass.OK
    assert ends(fakes.numbers_for_nan, on) is TrialClass.WRONG_OUTPUT


def test_launch_that_cannot_be_made() -> None:
    def prepare(*_: object) -> Launcher:
        raise LaunchError("allow attention 300000 bytes of shared memory: INVALID_VALUE")

    verdict = verify(prepare, exam(SQUARE))
    assert isinstance(verdict, Rejected)
    assert verdict.trial_class is TrialClass.LAUNCH_FAILED
    assert "300000 bytes" in verdict.reason


def test_launch_error_leaves_no_pass_on_an_old_output() -> None:
    on = exam(SQUARE)
    assert ends(fakes.right, on) is TrialClass.OK
    assert ends(fakes.writes_nothing, on) is TrialClass.WRONG_OUTPUT


@pytest.mark.parametrize(
    ("layout", "said"),
    [(Layout.ODD_POINTER, "clone"), (Layout.SECOND_COLUMN, "contiguous")],
)
def test_layout_that_a_kernel_cannot_read_is_refused(layout: Layout, said: str) -> None:
    inputs = make(Check("layout", SQUARE, layout=layout), DType.FP16, CPU)
    with pytest.raises(LaunchError, match=said):
        check_alignment("K", inputs.k)


def test_row_stride_off_alignment_is_refused() -> None:
    t = torch.zeros(1, 8, 1, 36, dtype=torch.float16)[..., :32]
    with pytest.raises(LaunchError, match="row stride 36"):
        check_alignment("K", t)


def test_large_problem_is_sampled_and_still_catches_a_bad_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tuner.evaluate.reference.WHOLE_SCORES", 1 << 10)
    on = exam(Shape(2, 4, 2, 300, 300, 32, 32, True))
    assert len(on.expected) > 1
    assert ends(fakes.right, on) is TrialClass.OK
    assert ends(fakes.wrong_heads, on) is TrialClass.WRONG_OUTPUT
    assert ends(fakes.sees_one_key_more, on) is TrialClass.WRONG_OUTPUT


def test_sampled_answer_equals_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(Check("x", Shape(2, 4, 2, 300, 333, 32, 16, True), seed=1), DType.FP16, CPU)
    (whole,) = expect(inputs)
    monkeypatch.setattr("tuner.evaluate.reference.WHOLE_SCORES", 1)
    monkeypatch.setattr("tuner.evaluate.reference.CHUNK_SCORES", 5000)
    for part in expect(inputs):
        torch.testing.assert_close(part.exact, whole.exact[part.index], rtol=0, atol=1e-12)
