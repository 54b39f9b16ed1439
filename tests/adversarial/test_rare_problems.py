"""Kernels that are wrong on problems few people try: the judge asks for each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from runs.record import Rejected, TrialClass
from space.variant import DType, Problem
from tests.tuner.evaluate import fakes
from tests.tuner.evaluate.scripted_clock import ScriptedClock
from tuner.evaluate.checks import (
    FEW_KEYS,
    MANY_ROWS,
    hidden_checks,
    race_check,
    trial_checks,
    verify_checks,
)
from tuner.evaluate.inputs import Data, make
from tuner.evaluate.judge import HIDDEN_CHECKS, Judge
from tuner.evaluate.verify import set_exam, verify

T = torch.Tensor
CPU = torch.device("cpu")


def wrong_in_the_last_head(group: int) -> fakes.Body:
    """Right but for the last query head of each KV head, where so many share one."""

    def body(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
        fakes.right(q, k, v, out, scale, causal)
        if q.shape[2] // k.shape[2] == group:
            out[:, :, group - 1 :: group] = 0.0

    return body


def no_rows_past_the_keys(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Leaves out query rows that no causal mask would let see, also where there is none."""
    fakes.right(q, k, v, out, scale, causal)
    if not causal and q.shape[1] > k.shape[1] > 128:
        out[:, k.shape[1] :] = 0.0


def numbers_for_special_keys(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Takes NaN and Inf in K for numbers."""
    finite = k.nan_to_num(0.0, 65504.0, -65504.0)
    fakes.right(q, finite, v, out, scale, causal)


def numbers_for_nan_in_k(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Takes NaN in K for 0."""
    fakes.right(q, torch.where(k.isnan(), 0.0, k), v, out, scale, causal)


def numbers_for_inf_in_k(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Takes Inf in K for the largest number."""
    fakes.right(q, torch.where(k.isinf(), 65504.0, k), v, out, scale, causal)


def numbers_for_nan_in_v(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Takes NaN in V for 0."""
    fakes.right(q, k, torch.where(v.isnan(), 0.0, v), out, scale, causal)


def numbers_for_inf_in_v(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Takes Inf in V for the largest number."""
    fakes.right(q, k, v.clamp(-65504.0, 65504.0), out, scale, causal)


def judge() -> Judge:
    return Judge(CPU, ScriptedClock(), lambda *_: None, None)  # type: ignore[arg-type,return-value]


def asked(body: fakes.Body, problem: Problem, checks: Callable[..., object]) -> str:
    """The class of the first problem that a kernel fails, with its name; "" when it fails none."""
    found = judge().check(fakes.kernel(body, problem.causal), problem, checks(problem))  # type: ignore[arg-type]
    if not isinstance(found, Rejected):
        return ""
    return f"{found.trial_class}: {found.reason.split(': ')[0]}"


def of_a_trial(problem: Problem) -> tuple[object, ...]:
    return (*trial_checks(problem), *hidden_checks(problem, 1, HIDDEN_CHECKS))


@pytest.mark.parametrize("variant", ["gqa", "mqa"])
@pytest.mark.parametrize("group", [8, 12])
def test_last_head_of_common_groups(variant: str, group: int) -> None:
    problem = Problem(variant, DType.FP16, 32, 32, True)
    body = wrong_in_the_last_head(group)
    assert asked(body, problem, of_a_trial).startswith("wrong_output: hidden")


@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "mla"])
@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8, 12, 16])
def test_verify_asks_every_variant_for_every_group(variant: str, group: int) -> None:
    problem = Problem(variant, DType.FP16, 32, 32, False)
    groups = {c.shape.heads // c.shape.kv_heads for c in verify_checks(problem, (), 5)}
    assert group in groups


@pytest.mark.parametrize("variant", ["mha", "gqa"])
def test_more_queries_than_keys_without_a_mask(variant: str) -> None:
    problem = Problem(variant, DType.BF16, 32, 32, False)
    assert asked(no_rows_past_the_keys, problem, trial_checks) == (
        "wrong_output: more queries than keys"
    )


@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "mla"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize(
    "body",
    [
        numbers_for_special_keys, numbers_for_nan_in_k, numbers_for_inf_in_k, numbers_for_nan_in_v,
        numbers_for_inf_in_v,
    ],
)  # fmt: skip
def test_special_values_of_keys(
    body: fakes.Body, dtype: DType, causal: bool, variant: str
) -> None:  # fmt: skip
    problem = Problem(variant, dtype, 32, 32, causal)
    assert asked(body, problem, trial_checks) == "wrong_output: keys and values not finite"


@pytest.mark.parametrize("dtype", list(DType))
def test_special_values_leave_numbers_to_compare(dtype: DType) -> None:
    """Each of them shows, and most of the output is still a number."""
    problem = Problem("gqa", dtype, 32, 32, True)
    (check,) = (c for c in trial_checks(problem) if c.data is Data.SPECIAL_KEYS)
    (part,) = set_exam(check.name, make(check, dtype, CPU)).expected
    exact = part.exact
    assert exact.isinf().any() and exact.isnan().any()
    assert exact.isfinite().double().mean() > 0.6
    inf_key = exact[0, :, 0].isnan().all(-1)  # a row is NaN where its query is positive
    assert 0.3 < inf_key.double().mean() < 0.7


@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "mla"])
@pytest.mark.parametrize("causal", [False, True])
def test_many_short_tiles_fill_a_card_and_a_right_kernel_passes(variant: str, causal: bool) -> None:
    problem = Problem(variant, DType.FP16, 32, 32, causal)
    check = race_check(problem)
    s = check.shape
    assert (s.seqlen_q, s.seqlen_k) == (MANY_ROWS, FEW_KEYS)
    assert s.batch * s.heads * (s.seqlen_q // 128) >= 2 * 142  # two for each SM of an L40S
    exam = set_exam(check.name, make(check, problem.dtype, CPU))
    assert isinstance(verify(fakes.kernel(fakes.right, causal), exam), float)
    verdict = verify(fakes.kernel(left_by_the_tile_before, causal), exam)
    assert isinstance(verdict, Rejected) and verdict.trial_class is TrialClass.WRONG_OUTPUT


def left_by_the_tile_before(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """One 16-row part of one tile is what the tile of the next head holds there."""
    fakes.right(q, k, v, out, scale, causal)
    out[-1, -16:, 0] = out[-1, -16:, 1].clone()


def test_races_are_asked_of_devices_first() -> None:
    problem = Problem("mha", DType.FP16, 32, 32, True)
    assert judge().races(problem) == ()
    on_device = Judge(torch.device("cuda", 0), ScriptedClock(), None, None)  # type: ignore[arg-type]
    assert on_device.races(problem) == (race_check(problem),)


def test_hidden_problems_serve_the_kernel() -> None:
    for variant in ("mha", "gqa", "mqa", "mla"):
        problem = Problem(variant, DType.BF16, 48, 32, False)
        for check in hidden_checks(problem, 3, 8):
            assert problem.serves(check.shape)
            assert check.shape.heads % check.shape.kv_heads == 0
