"""The judge on decode: right kernels pass every cache, each defect is found by its class."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from decode_fakes import Decoder, spoiled
from scripted_clock import ScriptedClock

from codegen.kernel import KernelSource
from runs.record import Measured, Rejected, TrialClass
from space.variant import LATENT_DIMS, DType, Phase, Problem, Shape
from tuner.evaluate.arena import Arena
from tuner.evaluate.cache import NO_PAGE
from tuner.evaluate.decode_checks import (
    HEADS,
    VERIFY_DATA,
    VERIFY_LAYOUTS,
    hidden_checks,
    neighbour_checks,
    trial_checks,
    verify_checks,
)
from tuner.evaluate.finals import run_finals
from tuner.evaluate.inputs import Check, Data, Inputs, Layout, make
from tuner.evaluate.judge import Judge, ask
from tuner.evaluate.peers import peers
from tuner.evaluate.reference import attention
from tuner.evaluate.timing import Plan
from tuner.evaluate.verify import check_whole, set_exam, verify
from tuner.job import Entry

CPU = torch.device("cpu")
SOURCE = KernelSource("", "sm_80", (), ())


def problem(variant: str = "gqa", causal: bool = False, page: int = 0) -> Problem:
    dims = LATENT_DIMS if variant == "mla" else (32, 16)
    return Problem(variant, DType.FP16, *dims, causal, Phase.DECODE, page)


def inputs(check: Check, dtype: DType = DType.FP16) -> Inputs:
    return make(check, dtype, CPU)


def small(
    variant: str, queries: int, counts: tuple[int, ...], causal: bool = False, page: int = 0,
    **more: object,
) -> Check:  # fmt: skip
    """A problem with few heads: 6 that share 2 KV heads, or 4 that share the latent one."""
    dims = LATENT_DIMS if variant == "mla" else (32, 16)
    heads = (4, 1) if variant == "mla" else (6, 2)
    shape = Shape(len(counts), *heads, queries, max(counts), *dims, causal)
    return Check("small", shape, counts=counts, page=page, **more)  # type: ignore[arg-type]


def verdict(check: Check, kernel: Decoder) -> float | Rejected:
    return verify(
        replace(kernel, causal=check.shape.causal).prepare, set_exam(check.name, inputs(check))
    )


# ---- right kernels -----------------------------------------------------------------------------


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("variant", ["gqa", "mla"])
@pytest.mark.parametrize(("queries", "causal"), [(1, False), (5, False), (5, True)])
def test_right_kernel_passes(variant: str, queries: int, causal: bool, page: int) -> None:
    check = small(variant, queries, (70, 0, 3, 33), causal, page)
    found = verdict(check, Decoder())
    assert isinstance(found, float), found


@pytest.mark.parametrize("data", list(VERIFY_DATA))
@pytest.mark.parametrize("variant", ["gqa", "mla"])
def test_right_kernel_passes_every_kind_of_data(variant: str, data: Data) -> None:
    found = verdict(small(variant, 4, (70, 33), True, data=data), Decoder())
    assert isinstance(found, float), found


@pytest.mark.parametrize("layout", list(VERIFY_LAYOUTS))
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("variant", ["gqa", "mla"])
def test_right_kernel_passes_every_layout(variant: str, page: int, layout: Layout) -> None:
    found = verdict(small(variant, 2, (40, 17), False, page, layout=layout), Decoder())
    assert isinstance(found, float), found


@pytest.mark.parametrize("splits", [1, 2, 7, 64])
def test_any_number_of_splits_is_right(splits: int) -> None:
    found = verdict(small("gqa", 3, (100, 1), True, splits=splits), Decoder())
    assert isinstance(found, float), found


# ---- wrong kernels -----------------------------------------------------------------------------

WRONG = {
    "counts not read": (Decoder(ignores_counts=True), {}, TrialClass.WRONG_OUTPUT),
    "rows behind the last key read": (Decoder(reads_tail=True), {}, TrialClass.WRONG_OUTPUT),
    "mask of the capacity": (
        Decoder(causal_by_capacity=True), {"causal": True}, TrialClass.WRONG_OUTPUT,
    ),
    "table not read": (Decoder(pages_in_order=True), {"page": 16}, TrialClass.WRONG_OUTPUT),
    "heads shared the other way": (Decoder(heads_interleaved=True), {}, TrialClass.WRONG_OUTPUT),
    "first split only": (Decoder(keeps_first_split=True), {}, TrialClass.WRONG_OUTPUT),
    "splits averaged": (Decoder(sums_partials_plainly=True), {}, TrialClass.WRONG_OUTPUT),
    "empty split not a number": (
        Decoder(empty_split_is_nan=True), {"splits": 9}, TrialClass.WRONG_OUTPUT,
    ),
    "table written to": (Decoder(turns_table=True), {"page": 16}, TrialClass.INPUT_MODIFIED),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WRONG))
def test_defect_is_found(name: str) -> None:
    kernel, more, found = WRONG[name]
    said = verdict(small("gqa", 5, (70, 33), **more), kernel)  # type: ignore[arg-type]
    assert isinstance(said, Rejected)
    assert said.trial_class is found, said


def test_key_changed_behind_the_judge_is_found_where_v_is_part_of_it() -> None:
    kernel = spoiled(Decoder(), lambda q, k, v, out: k[0, 0, 0].mul_(2))
    said = verify(kernel, set_exam("x", inputs(small("mla", 1, (40,)))))
    assert isinstance(said, Rejected)
    assert (said.trial_class, said.reason) == (TrialClass.INPUT_MODIFIED, "x: K was changed")


def test_output_that_does_not_follow_the_latent_cache_is_found() -> None:
    kept: list[torch.Tensor] = []

    def replays(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        if kept:
            out.copy_(kept[0])
        kept.append(out.clone())

    exam = set_exam("x", inputs(small("mla", 2, (40,))))
    said = verify(spoiled(Decoder(), replays), exam)
    assert isinstance(said, Rejected)
    assert said.trial_class is TrialClass.WRONG_OUTPUT


def test_inputs_are_what_they_were_after_an_exam() -> None:
    given = inputs(small("mla", 8, (40, 9), data=Data.NAN_QUERIES))
    exam = set_exam("x", given)
    assert isinstance(verify(Decoder().prepare, exam), float)
    for now, was in zip(given.tensors, exam.pristine, strict=True):
        assert torch.equal(now.view(torch.int16), was.view(torch.int16))


# ---- problems ----------------------------------------------------------------------------------


def test_what_no_sequence_owns_is_nan() -> None:
    dense = inputs(small("gqa", 1, (40, 0, 7)))
    assert dense.k[1].isnan().all() and dense.v[2, 7:].isnan().all()
    assert not dense.k[2, :7].isnan().any()
    paged = inputs(small("gqa", 1, (40, 0, 7), page=16))
    cache = paged.cache
    assert cache is not None and cache.pages is not None
    assert paged.k.shape == (3 + 1 + 2, 16, 2, 32)
    assert cache.pages[1].tolist() == [NO_PAGE] * 3
    owned = {int(n) for n in cache.pages.flatten() if n != NO_PAGE}
    assert len(owned) == 4
    assert all(paged.k[n].isnan().all() for n in set(range(6)) - owned)


def test_latent_values_are_the_memory_of_the_keys() -> None:
    for layout in VERIFY_LAYOUTS:
        given = inputs(small("mla", 1, (40, 7), layout=layout))
        assert given.latent
        assert given.v.stride() == given.k.stride()
        assert given.v.shape[3] == 512


@pytest.mark.parametrize("page", [0, 16])
def test_reference_sees_each_sequence_alone(page: int) -> None:
    check = small("gqa", 3, (40, 7, 2), True, page)
    given = inputs(check)
    whole = attention(given, torch.float64)
    assert given.cache is not None
    for b, count in enumerate(check.counts):
        k, v = (given.cache.sequence(t, b, count).double() for t in (given.k, given.v))
        group = given.q.shape[2] // k.shape[2]
        scores = torch.einsum(
            "bqhd,bkhd->bhqk", given.q[b : b + 1].double(), k.repeat_interleave(group, 2)
        )
        last = torch.arange(3)[:, None] + count - 3
        scores = (scores * given.scale).masked_fill(torch.arange(count) > last, -math.inf)
        p = scores.softmax(-1).nan_to_num(0.0)
        right = torch.einsum("bhqk,bkhd->bqhd", p, v.repeat_interleave(group, 2))
        torch.testing.assert_close(whole[b], right[0])


@pytest.mark.parametrize("variant", list(HEADS))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page", [0, 64])
def test_checks_are_of_the_problem(variant: str, causal: bool, page: int) -> None:
    p = problem(variant, causal, page)
    shapes = (Shape(1, 32, 8, 2, 4096, 32, 16),)
    checks = verify_checks(p, shapes, seed=3, hidden=12)
    assert len({c.name for c in checks}) == len(checks)
    for check in checks:
        assert p.serves(check.shape), check.name
        assert check.page == page
        assert len(check.counts) == check.shape.batch
        assert max(*check.counts, 1) == check.shape.seqlen_k
        assert check.shape.seqlen_q >= (2 if causal else 1)
    assert {(c.shape.heads, c.shape.kv_heads) for c in checks} >= set(HEADS[variant])
    assert {c.layout for c in checks} >= set(VERIFY_LAYOUTS)
    assert {c.data for c in checks} >= set(VERIFY_DATA)
    assert {1, 3, 7, 64} <= {c.splits for c in trial_checks(p)}


def test_hidden_problems_follow_their_seed() -> None:
    p = problem()
    assert hidden_checks(p, 1, 4) == hidden_checks(p, 1, 4)
    assert hidden_checks(p, 1, 4) != hidden_checks(p, 2, 4)


def test_neighbour_is_one_key_further_on() -> None:
    shapes = (Shape(4, 32, 8, 1, 4096, 32, 16), Shape(9, 32, 8, 1, 4096, 32, 16))
    (check,) = neighbour_checks(problem(page=16), shapes)
    assert check.counts == (4097, 4097)
    assert check.shape.batch == 2


# ---- timed shapes ------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("dims", [(32, 16), LATENT_DIMS])
def test_timed_shape_is_laid_out_and_judged(dims: tuple[int, int], page: int) -> None:
    shape = Shape(3, 4, 1, 1, 50, *dims)
    arena = Arena((shape,), DType.FP16, 0, CPU, page)
    assert arena.holds((shape,), DType.FP16, 0, page)
    assert not arena.holds((shape,), DType.FP16, 0, 64)
    bay = arena.bay(shape)
    assert bay.slots[0].latent == (dims == LATENT_DIMS)
    for data_set in range(len(bay.exams)):
        found = ask(Decoder().prepare, bay, data_set)
        assert isinstance(found, float), found


def test_pages_of_a_timed_shape_are_in_random_order() -> None:
    shape = Shape(2, 4, 1, 1, 64, 32, 16)
    bay = Arena((shape,), DType.FP16, 0, CPU, 16).bay(shape)
    cache = bay.slots[0].cache
    assert cache is not None and cache.pages is not None and cache.key_counts is None
    assert sorted(cache.pages.flatten().tolist()) == list(range(8))
    found = ask(Decoder(pages_in_order=True).prepare, bay, 0)
    assert isinstance(found, Rejected)


# ---- whole trials ------------------------------------------------------------------------------

TIMED = Shape(2, 6, 2, 1, 40, 32, 16)


class Loaded:
    def __init__(self, kernel: Decoder) -> None:
        self.prepare = kernel.prepare

    def unload(self) -> None:
        pass


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial is given one small problem: the others have tests of their own."""
    for module in ("judge", "finals"):
        for name in ("trial_checks", "hidden_checks", "neighbour_checks"):
            found = (small("gqa", 2, (20,), page=16),) if name == "trial_checks" else ()
            monkeypatch.setattr(f"tuner.evaluate.{module}.{name}", lambda *_, f=found: f)


@pytest.mark.usefixtures("few_checks")
def test_trial_is_timed_as_replays_and_finals_beside_peers() -> None:
    p, clock = problem(page=16), ScriptedClock()
    judge = Judge(CPU, clock, lambda *_: Loaded(Decoder()), None, Plan(max_samples=2, warmup_us=0))
    outcome = judge.judge(p, SOURCE, b"", (TIMED,), 1, {})
    assert isinstance(outcome, Measured), outcome
    assert [t.shape for t in outcome.timings] == [TIMED]
    assert clock.graphs == [1, 1]  # two slots, a graph of one launch each
    clock.graphs.clear()
    result = run_finals(judge, p, (Entry(3, SOURCE, b"", (TIMED,)),), (TIMED,), 1, peers(), 2)
    assert [f.trial for f in result.finalists] == [3]
    assert clock.graphs == [1]
    assert {a.name: a.reason for a in result.absent}["cudnn"] == "it reads no paged cache"


@pytest.mark.usefixtures("few_checks")
def test_trial_that_reads_no_table_is_wrong() -> None:
    kernel = Decoder(pages_in_order=True)
    judge = Judge(CPU, ScriptedClock(), lambda *_: Loaded(kernel), None)
    outcome = judge.judge(problem(page=16), SOURCE, b"", (TIMED,), 1, {})
    assert isinstance(outcome, Rejected)
    assert outcome.trial_class is TrialClass.WRONG_OUTPUT


def test_large_output_is_looked_at_in_every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.evaluate.reference.WHOLE_SCORES", 1 << 6)
    bay = Arena((TIMED,), DType.FP16, 0, CPU, 16).bay(TIMED)
    exam = bay.exams[0]
    exam.inputs.given_to(Decoder().prepare, bay.output.tensor)()
    assert len(exam.expected) > 1
    assert check_whole(exam) is None
    bay.output.tensor[1, 0, 4] += 0.5
    assert check_whole(exam) is not None
