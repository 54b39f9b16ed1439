"""Decode kernels with warp-level MMA on a GPU: packed heads, splits, lengths, pages, tails."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_here import GPU, NEEDS_GPU

from codegen.cute import translate
from codegen.kernel import KernelSource
from codegen.nvrtc import compile_source
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import sketches
from llm_proposer.seeds import seeds
from space.constraints import Backend, space_for
from space.gpu import GPUS
from space.variant import DType, Phase, Problem
from tests.decode_cases import LATENT, DecodeCase, decode_case
from tuner.evaluate.launch import LoadedKernel

pytestmark = NEEDS_GPU

#: (variant, query heads, KV heads, head dims): groups of 4, 7, 8, 32, 71 and absorbed MLA's
HEADS = (
    ("gqa", 32, 8, (128, 128)), ("gqa", 28, 4, (128, 128)), ("gqa", 64, 8, (64, 64)),
    ("mqa", 32, 1, (128, 128)), ("mqa", 71, 1, (128, 128)), ("mha", 4, 4, (256, 256)),
    ("mla", 128, 1, LATENT), ("mla", 64, 1, LATENT), ("mla", 16, 1, LATENT),
)  # fmt: skip
#: (queries, causal)
MASKS = ((1, False), (2, True), (5, True), (8, True), (8, False))
SPLITS = (1, 2, 7, 64)
PAGES = (0, 16, 64, 128)
#: generations whose code this GPU runs, built for it
GENERATIONS = ("t4", "a100", "l40s", "h200")


class SplitKernel(LoadedKernel):
    """A kernel whose number of splits the test says."""

    splits = 1

    def lengths(
        self, q: torch.Tensor, k: torch.Tensor, pages: torch.Tensor | None = None
    ) -> dict[str, int]:
        return {**super().lengths(q, k, pages), "splits": self.splits}


def source_of(problem: Problem, generation: str, nth: int = 0) -> KernelSource:
    gpu = GPUS[generation]
    points = seeds(problem, gpu, space_for(problem, gpu, Backend.MMA_SYNC))
    text = sketches(problem.variant, problem.causal, Phase.DECODE)["decode"]
    return translate(bind(parse(text), problem, points[nth % len(points)]), problem, gpu)


def answer(source: KernelSource, given: DecodeCase, splits: int) -> torch.Tensor:
    """Launch on a NaN-filled output, twice: the same bits."""
    assert GPU is not None
    kernel = SplitKernel(source, compile_source(source, GPU.arch).image, torch.device("cuda", 0))
    kernel.splits = splits
    found = [given.output() for _ in range(2)]
    for out in found:
        kernel.prepare(given.q, given.k, given.v, out, given.scale, given.counts, given.pages)()
    torch.cuda.synchronize()
    kernel.unload()
    assert torch.equal(found[0].view(torch.int16), found[1].view(torch.int16)), "bits differ"
    return found[0]


def problem_of(
    variant: str, dims: tuple[int, int], causal: bool, generation: str, page: int
) -> Problem:
    dtype = DType.FP16 if generation == "t4" else DType.BF16
    return Problem(variant, dtype, *dims, causal, Phase.DECODE, page)


@pytest.mark.parametrize(("variant", "heads", "kv_heads", "dims"), HEADS)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_ragged_lengths(
    variant: str, heads: int, kv_heads: int, dims: tuple[int, int], generation: str
) -> None:
    for nth, (queries, causal) in enumerate(MASKS):
        problem = problem_of(variant, dims, causal, generation, PAGES[nth % len(PAGES)])
        source = source_of(problem, generation, nth)
        assert source.splits is not None
        tile = source.splits.keys
        counts = (0, 1, tile - 1, tile, tile + 1, 3 * tile + 7, 700)
        given = decode_case(problem, heads, kv_heads, queries, counts, "cuda")
        given.assert_right(answer(source, given, SPLITS[nth % len(SPLITS)]))


@pytest.mark.parametrize(("variant", "heads", "kv_heads", "dims"), [HEADS[0], HEADS[6]])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_number_of_splits_does_not_matter(
    variant: str, heads: int, kv_heads: int, dims: tuple[int, int], generation: str
) -> None:
    problem = problem_of(variant, dims, True, generation, 0)
    given = decode_case(problem, heads, kv_heads, 2, (1500, 64, 1, 0), "cuda")
    source = source_of(problem, generation)
    first, *others = (answer(source, given, splits) for splits in SPLITS)
    given.assert_right(first)
    for other in others:
        given.assert_right(other)
        given.assert_close(other, first)


@pytest.mark.parametrize(("variant", "heads", "kv_heads", "dims"), [HEADS[0], HEADS[6]])
def test_every_seed(variant: str, heads: int, kv_heads: int, dims: tuple[int, int]) -> None:
    for generation in GENERATIONS:
        problem = problem_of(variant, dims, False, generation, 16)
        given = decode_case(problem, heads, kv_heads, 1, (300, 17), "cuda")
        gpu = GPUS[generation]
        for nth in range(len(seeds(problem, gpu, space_for(problem, gpu, Backend.MMA_SYNC)))):
            given.assert_right(answer(source_of(problem, generation, nth), given, 3))


def test_scores_past_any_finite_sentinel() -> None:
    """Products beyond the range of the exponent, of both signs, and a scale of 0."""
    problem = problem_of("gqa", (128, 128), False, "a100", 0)
    source = source_of(problem, "a100", 1)
    given = decode_case(problem, 32, 8, 1, (333, 64), "cuda")
    for factor, scale in ((3e4, given.scale), (-3e4, given.scale), (1.0, 0.0), (1.0, -0.1)):
        changed = replace(given, q=given.q * factor, scale=scale)
        changed.assert_right(answer(source, changed, 2))
