"""Kernels that are right on short, packed, usual problems and wrong on others: each is named.

One attention in torch has every fault as a choice; prefill calls it as it is, decode for each
sequence of a cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from runs.record import Rejected
from space.variant import LATENT_DIMS, DType, Phase, Problem, Shape
from tests.tuner.evaluate import fakes
from tuner.evaluate.checks import grid_checks, neighbour_checks, trial_checks
from tuner.evaluate.decode_checks import pool_checks
from tuner.evaluate.inputs import Check, make
from tuner.evaluate.launch import Launcher
from tuner.evaluate.verify import set_exam, verify

T = torch.Tensor
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Attention:
    """A kernel; each field is a way to be wrong."""

    causal: bool = False
    sum_most: float = math.inf  #: a row's sum is clamped
    frozen_after: int = 0  #: keys from which on the maximum stays
    least_weight: float = 0.0  #: of a row's largest: lighter keys are left out
    scale_most: float = math.inf
    no_scale_is_nan: bool = False
    half_precision: bool = False  #: values go through fp16
    lost: int = 0  #: the newest keys, of all sequences but the first
    most_keys: int = 1 << 30  #: later ones are not read
    most_splits: int = 1 << 30  #: later ones are not combined
    heads_of: int = 1 << 30  #: the KV head is taken modulo this
    batches_of: int = 1 << 30  #: so is the sequence
    rows_of: int = 1 << 30  #: packed rows past this read KV head 0
    aligned: int = 0  #: pointers and row strides of K are rounded down to so many elements
    aligned_out: int = 0  #: so are address and strides of the output
    few_queries_lose: int = 0  #: newest keys, where there are 2 to 8 queries
    pages_of: int = 1 << 30

    def prepare(
        self, q: T, k: T, v: T, out: T, scale: float, key_counts: T | None = None,
        pages: T | None = None, splits: int | None = None,
    ) -> Launcher:  # fmt: skip
        """See `LoadedKernel.prepare`."""
        cached = key_counts is not None or pages is not None

        def launch() -> None:
            if not cached:
                order = torch.arange(q.shape[0]) % self.batches_of
                few = 2 <= q.shape[1] <= 8
                count = k.shape[1] - (self.few_queries_lose if few else 0)
                keys, values = self.read(k)[order, :count], v[order, :count]
                self.place(out).copy_(self.attend(q, keys, values, scale))
                return
            for b in range(q.shape[0]):
                keys, values = (self.rows(t, b % self.batches_of, pages) for t in (k, v))
                count = keys.shape[0] if key_counts is None else int(key_counts[b])
                count = min(count - (self.lost if b else 0), self.most_keys)
                if splits is not None and splits > self.most_splits:
                    count = count * self.most_splits // splits
                keys, values = (t[None, : max(count, 0)] for t in (keys, values))
                self.place(out)[b : b + 1] = self.attend(q[b : b + 1], keys, values, scale)

        return launch

    def place(self, out: T) -> T:
        """The output as it is found with a rounded address and rounded strides."""
        if not self.aligned_out:
            return out
        first = out.storage_offset() // self.aligned_out * self.aligned_out
        strides = [n // self.aligned_out * self.aligned_out for n in out.stride()[:3]]
        return out.as_strided(out.shape, (*strides, 1), first)

    def read(self, t: T) -> T:
        """K as it is found with rounded addresses; NaN where these lead."""
        if not self.aligned:
            return t
        offset, strides = t.storage_offset(), list(t.stride())
        rounded = offset // self.aligned * self.aligned
        strides[1] = strides[1] // self.aligned * self.aligned
        return t.as_strided(t.shape, strides, rounded)

    def rows(self, cache: T, b: int, pages: T | None) -> T:
        """A sequence's rows."""
        if pages is None:
            return self.read(cache)[b]
        return cache[pages[b].clamp(min=0).long() % self.pages_of].flatten(0, 1)

    def attend(self, q: T, k: T, v: T, scale: float) -> T:
        """Softmax attention with this kernel's faults."""
        if self.no_scale_is_nan and scale == 0:
            return torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype)
        heads = torch.arange(k.shape[2]) % self.heads_of
        k, v = k[:, :, heads], v[:, :, heads]
        if self.half_precision:
            v = v.half().to(v.dtype)
        group = q.shape[2] // k.shape[2]
        if self.rows_of < q.shape[1] * group:
            k, v = k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v)
        s = fakes.scores(q, k, min(scale, self.scale_most), self.causal)
        looked = s[..., : self.frozen_after] if self.frozen_after else s
        top = looked.amax(-1, keepdim=True).clamp_min(-3e38) if looked.shape[-1] else 0.0
        p = (s - top).exp()
        p = torch.where(p < self.least_weight, 0.0, p)
        total = p.sum(-1, keepdim=True).clamp(1e-30, self.sum_most)
        values = v.float().repeat_interleave(group, 2)
        mixed = torch.einsum("bhqk,bkhd->bhqd", p.to(q.dtype).float(), values)
        return (mixed / total).transpose(1, 2).to(q.dtype)


RIGHT = Attention()
EVERYWHERE = {
    "sum of at most 1024": Attention(sum_most=1024.0),
    "maximum of the first 1024 keys": Attention(frozen_after=1024),
    "weights under 2^-12 left out": Attention(least_weight=2.0**-12),
    "scale of at most 0.5": Attention(scale_most=0.5),
    "NaN without a scale": Attention(no_scale_is_nan=True),
    "values through fp16": Attention(half_precision=True),
    "KV heads modulo 8": Attention(heads_of=8),
    "K's address and rows in whole 128 bytes": Attention(aligned=64),
    "O's address and strides in whole 64 bytes": Attention(aligned_out=32),
}
#: wrong in prefill, with the variant that shows it
PREFILL = {
    "batches modulo 32": ("gqa", Attention(batches_of=32)),
    "KV heads modulo 16": ("mla", Attention(heads_of=16)),
    "64 keys lost where there are 2 to 8 queries": ("mha", Attention(few_queries_lose=64)),
}
DECODE = {
    "newest 64 keys lost, but of the first sequence": Attention(lost=64),
    "keys past 8192 lost": Attention(most_keys=8192),
    "64 splits combined": Attention(most_splits=64),
    "sequences modulo 16": Attention(batches_of=16),
    "sequences modulo 64": Attention(batches_of=64),
    "rows past 64 read KV head 0": Attention(rows_of=64),
}


def failed(kernel: Attention, problem: Problem, checks: tuple[Check, ...]) -> list[str]:
    """Return the names of the problems that the kernel gets wrong."""
    kernel = replace(kernel, causal=problem.causal)
    exams = ((c.name, set_exam(c.name, make(c, problem.dtype, CPU))) for c in checks)
    return [n for n, exam in exams if isinstance(verify(kernel.prepare, exam), Rejected)]


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "mla"])
def test_right_kernel_passes(variant: str, causal: bool, phase: Phase) -> None:
    dims = (24, 16)
    if variant == "mla" and phase is Phase.DECODE:
        dims = LATENT_DIMS
    for dtype in DType if variant == "gqa" else (DType.BF16,):
        problem = Problem(variant, dtype, *dims, causal, phase)
        assert failed(RIGHT, problem, trial_checks(problem)) == []


@pytest.mark.parametrize("name", list(EVERYWHERE))
@pytest.mark.parametrize("phase", list(Phase))
def test_wrong_kernel_is_found_out(name: str, phase: Phase) -> None:
    problem = Problem("gqa", DType.BF16, 32, 32, False, phase)
    assert failed(EVERYWHERE[name], problem, trial_checks(problem))


@pytest.mark.parametrize("name", list(PREFILL))
def test_wrong_prefill_kernel_is_found_out(name: str) -> None:
    variant, kernel = PREFILL[name]
    problem = Problem(variant, DType.BF16, 32, 32, False)
    assert failed(kernel, problem, trial_checks(problem))


def test_rows_of_long_problems_do_not_follow_each_other() -> None:
    """Who takes K for packed where rows are many is asked about rows that have gaps."""
    problem = Problem("gqa", DType.FP16, 32, 32, False)
    (check,) = neighbour_checks(problem, (Shape(1, 12, 4, 1024, 1024, 32, 32, False),), 1 << 30)
    k = make(check, DType.FP16, CPU).k
    assert k.shape[1] == 1025 and k.stride(1) > k.shape[2] * k.shape[3]


@pytest.mark.parametrize("name", list(DECODE))
def test_wrong_decode_kernel_is_found_out(name: str) -> None:
    problem = Problem("gqa", DType.FP16, 32, 32, False, Phase.DECODE)
    shapes = (Shape(1, 32, 8, 1, 20_000, 32, 32, False),)
    checks = (*trial_checks(problem), *neighbour_checks(problem, shapes, 0))
    assert failed(DECODE[name], problem, checks)


def test_page_numbers_of_16_bits_are_found_out() -> None:
    problem = Problem("mqa", DType.FP16, 8, 8, False, Phase.DECODE, 16)
    checks = pool_checks(problem)
    assert failed(RIGHT, problem, checks) == []
    assert failed(Attention(pages_of=1 << 16), problem, checks) == ["pages past 65536"]
    assert failed(Attention(most_keys=1 << 16), problem, checks) == ["keys past 65536"]
    (alone,) = pool_checks(replace(problem, page=0))
    assert alone.counts == (70_000,)
    assert len(pool_checks(replace(problem, head_dim=576, head_dim_v=512, page=128))) == 1


def test_a_grid_goes_round_more_than_sixteen_times() -> None:
    """A row block is at least 64 rows, and no card that is known has more than 148 SMs."""
    for variant in ("mha", "gqa", "mqa", "mla"):
        (check,) = grid_checks(Problem(variant, DType.FP16, 64, 64, True))
        assert check.shape.seqlen_q <= 64
        assert check.shape.batch * check.shape.heads > 17 * 148
