"""Decode kernels with warp-level MMA on a GPU: packed heads, splits, lengths, pages, dirty tails."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from codegen.cute import translate
from codegen.kernel import KernelSource
from codegen.nvrtc import compile_source
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import sketches
from llm_proposer.seeds import seeds
from space.constraints import Backend, space_for
from space.gpu import GPUS, gpu_of_device_name
from space.variant import DType, Phase, Problem
from tuner.devices import device_names
from tuner.evaluate.inputs import TORCH_DTYPE
from tuner.evaluate.launch import LoadedKernel

DEVICES = device_names()
GPU = gpu_of_device_name(DEVICES[0]) if DEVICES else None

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPU is None, reason="no CUDA device that is known"),
]

LATENT = (576, 512)
#: (variant, query heads, KV heads, head dims): groups of 4, 7, 8, 32, 71 and absorbed MLA's
HEADS = (
    ("gqa", 32, 8, (128, 128)), ("gqa", 28, 4, (128, 128)), ("gqa", 64, 8, (64, 64)),
    ("mqa", 32, 1, (128, 128)), ("mqa", 71, 1, (128, 128)), ("mha", 4, 4, (256, 256)),
    ("mla", 128, 1, LATENT), ("mla", 64, 1, LATENT), ("mla", 16, 1, LATENT),
)  # fmt: skip
#: (queries, causal)
MASKS = ((1, False), (2, True), (5, True), (8, True), (8, False))
SPLITS = (1, 2, 7, 64)
#: generations whose code this GPU runs, built for it
GENERATIONS = ("t4", "a100", "l40s", "h200")


class SplitKernel(LoadedKernel):
    """A kernel whose number of splits the test says."""

    splits = 1

    def lengths(
        self, q: torch.Tensor, k: torch.Tensor, pages: torch.Tensor | None = None
    ) -> dict[str, int]:
        return {**super().lengths(q, k, pages), "splits": self.splits}


@dataclass(frozen=True)
class Case:
    """Tensors of one problem, NaN wherever no sequence has a key."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    counts: torch.Tensor
    pages: torch.Tensor | None
    causal: bool
    scale: float

    def keys_of(self, b: int, cache: torch.Tensor) -> torch.Tensor:
        """The keys or values of sequence b, [keys, heads, columns]."""
        count = int(self.counts[b])
        if self.pages is None:
            return cache[b, :count]
        page = cache.shape[1]
        return cache[self.pages[b, : -(-count // page)].long()].flatten(0, 1)[:count]

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """Plain attention computed in `dtype`; a query that sees no key is 0."""
        batch, queries, heads, _ = self.q.shape
        group = heads // self.k.shape[2]
        out = self.q.new_zeros((batch, queries, heads, self.v.shape[3]), dtype=dtype)
        for b in range(batch):
            k, v = (
                self.keys_of(b, x).to(dtype).repeat_interleave(group, 1) for x in (self.k, self.v)
            )
            if not len(k):
                continue
            scores = torch.einsum("qhd,khd->hqk", self.q[b].to(dtype), k) * self.scale
            if self.causal:
                hidden = torch.ones_like(scores[0], dtype=torch.bool)
                hidden = hidden.triu(len(k) - queries + 1)
                scores = scores.masked_fill(hidden, -torch.inf)
            p = scores.softmax(-1).nan_to_num(0.0)
            out[b] = torch.einsum("hqk,khd->qhd", p, v)
        return out


def case(
    problem: Problem, heads: int, kv_heads: int, queries: int, counts: tuple[int, ...]
) -> Case:
    torch.manual_seed(3)
    kind, batch, page = TORCH_DTYPE[problem.dtype], len(counts), problem.page
    d, dv = problem.head_dim, problem.head_dim_v
    capacity = max(counts) + 5
    pages = None
    if page:
        per = -(-capacity // page)
        pages = torch.randperm(batch * per + 3)[: batch * per].reshape(batch, per).int().cuda()
        shape = (batch * per + 3, page, kv_heads)
    else:
        shape = (batch, capacity, kv_heads)
    # one more row and 8 more columns: strides that nobody may take for granted
    k = torch.full((shape[0], shape[1] + 1, kv_heads, d + 8), torch.nan, dtype=kind, device="cuda")
    k = k[:, : shape[1], :, :d]
    v = (
        k[..., :dv]
        if problem.latent
        else torch.full((*shape, dv), torch.nan, device="cuda").to(kind)
    )
    found = Case(
        torch.randn(batch, queries, heads, d, device="cuda").to(kind), k, v,
        torch.tensor(counts, dtype=torch.int32, device="cuda"), pages, problem.causal,
        problem.default_scale,
    )  # fmt: skip
    for b, count in enumerate(counts):
        for j in range(0, count, page or max(count, 1)):
            at = (int(pages[b, j // page]), slice(0, min(page, count - j))) if pages is not None else (
                b, slice(0, count)
            )  # fmt: skip
            for x in (k,) if problem.latent else (k, v):
                x[at] = torch.randn(x[at].shape, device="cuda").to(kind)
    return found


def source_of(problem: Problem, generation: str, nth: int = 0) -> KernelSource:
    gpu = GPUS[generation]
    points = seeds(problem, gpu, space_for(problem, gpu, Backend.MMA_SYNC))
    text = sketches(problem.variant, problem.causal, Phase.DECODE)["decode"]
    return translate(bind(parse(text), problem, points[nth % len(points)]), problem, gpu)


def answer(source: KernelSource, given: Case, splits: int) -> torch.Tensor:
    """Launch on a NaN-filled output, twice: the same bits."""
    assert GPU is not None
    kernel = SplitKernel(source, compile_source(source, GPU.arch).image, torch.device("cuda", 0))
    kernel.splits = splits
    found = []
    for _ in range(2):
        shape = (*given.q.shape[:3], given.v.shape[3])
        out = torch.full(shape, torch.nan, device="cuda").to(given.q.dtype)
        kernel.prepare(given.q, given.k, given.v, out, given.scale, given.counts, given.pages)()
        torch.cuda.synchronize()
        found.append(out)
    assert torch.equal(found[0].view(torch.int16), found[1].view(torch.int16)), "bits differ"
    kernel.unload()
    return found[0]


def assert_right(got: torch.Tensor, given: Case) -> None:
    """At most twice the error of plain attention at the same dtype, and no NaN."""
    exact = given.plain(torch.float64)
    own = (given.plain(got.dtype).double() - exact).abs().max().item()
    error = (got.double() - exact).abs().max().item()
    assert error <= 2 * own + 2**-10 * exact.abs().max().item(), (error, own)


def problem_of(
    variant: str, dims: tuple[int, int], causal: bool, generation: str, page: int
) -> Problem:
    dtype = DType.FP16 if generation == "t4" else DType.BF16
    return Problem(variant, dtype, *dims, causal, Phase.DECODE, page)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("page", [0, 16, 64, 128])
@pytest.mark.parametrize(("variant", "heads", "kv_heads", "dims"), HEADS)
def test_ragged_lengths(
    variant: str, heads: int, kv_heads: int, dims: tuple[int, int], page: int, generation: str
) -> None:
    for nth, (queries, causal) in enumerate(MASKS):
        problem = problem_of(variant, dims, causal, generation, page)
        source = source_of(problem, generation, nth)
        assert source.splits is not None
        tile = source.splits.keys
        counts = (0, 1, tile - 1, tile, tile + 1, 3 * tile + 7, 700)
        given = case(problem, heads, kv_heads, queries, counts)
        assert_right(answer(source, given, SPLITS[nth % len(SPLITS)]), given)


@pytest.mark.parametrize(("variant", "heads", "kv_heads", "dims"), [HEADS[0], HEADS[6]])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_number_of_splits_does_not_matter(
    variant: str, heads: int, kv_heads: int, dims: tuple[int, int], generation: str
) -> None:
    problem = problem_of(variant, dims, True, generation, 0)
    given = case(problem, heads, kv_heads, 2, (1500, 64, 1, 0))
    source = source_of(problem, generation)
    first, *others = (answer(source, given, splits) for splits in SPLITS)
    assert_right(first, given)
    ulp = 2**-7 if first.dtype is torch.bfloat16 else 2**-10
    for other in others:
        assert torch.allclose(other.float(), first.float(), rtol=2 * ulp, atol=ulp / 8)


@pytest.mark.parametrize(("variant", "heads", "kv_heads", "dims"), [HEADS[0], HEADS[6]])
def test_every_seed(variant: str, heads: int, kv_heads: int, dims: tuple[int, int]) -> None:
    for generation in GENERATIONS:
        problem = problem_of(variant, dims, False, generation, 16)
        given = case(problem, heads, kv_heads, 1, (300, 17))
        gpu = GPUS[generation]
        for nth in range(len(seeds(problem, gpu, space_for(problem, gpu, Backend.MMA_SYNC)))):
            assert_right(answer(source_of(problem, generation, nth), given, 3), given)


def test_scores_past_any_finite_sentinel() -> None:
    """Products beyond the exact range of the exponent, all of one sign, and a scale of 0."""
    problem = problem_of("gqa", (128, 128), False, "a100", 0)
    source = source_of(problem, "a100", 1)
    given = case(problem, 32, 8, 1, (333, 64))
    for factor, scale in ((300.0, given.scale), (-300.0, given.scale), (1.0, 0.0), (1.0, -0.1)):
        changed = Case(given.q * factor, given.k, given.v, given.counts, None, False, scale)
        assert_right(answer(source, changed, 2), changed)
