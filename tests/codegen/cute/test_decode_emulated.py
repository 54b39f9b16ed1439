"""Emitted decode kernels run on the CPU: right on ragged, paged and dirty caches, in any order."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from decode_programs import emitted

from codegen.kernel import KernelSource
from space.constraints import Backend, space_for
from space.gpu import GPUS
from space.legal import legal_points
from space.params import Point
from space.variant import DType, Phase, Problem
from tests.decode_cases import LATENT, DecodeCase, decode_case
from tests.emulation.emulator import COMPILER, Emulator

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")


def problem_of(
    variant: str, dims: tuple[int, int], causal: bool, page: int, dtype: str = "bf16"
) -> Problem:
    return Problem(variant, DType(dtype), *dims, causal, Phase.DECODE, page)


def drawn(problem: Problem, gpu: str, seed: int, **fixed: int) -> Point:
    """A legal point, any, with some parameters as they are told."""
    space = space_for(problem, GPUS[gpu], Backend.MMA_SYNC)
    space = space.restrict({k: (v,) for k, v in fixed.items()})
    return legal_points(problem, GPUS[gpu], space).draw(random.Random(seed))


def emulated(
    source: KernelSource, dtype: DType, case: DecodeCase, splits: int, late: bool, backwards: bool
) -> torch.Tensor:
    out = case.output()
    tensors = {"Q": case.q, "K": case.k, "V": case.v, "O": out, "key_counts": case.counts}
    keys = case.k.shape[1]
    if case.pages is not None:
        tensors["pages"] = case.pages
        keys *= case.pages.shape[1]
    batch, queries, heads, _ = case.q.shape
    kv_heads = case.k.shape[2]
    group = heads // kv_heads
    lengths = {
        "batch": batch, "heads": heads, "kv_heads": kv_heads, "group": group, "M": queries,
        "N": keys, "rows": queries * group, "splits": splits,
    }  # fmt: skip
    Emulator(source, dtype, late, backwards).run(tensors, lengths, {"scale": case.scale})
    return out


def answer(
    problem: Problem, gpu: str, point: Point, case: DecodeCase, splits: int, turned: bool = False
) -> torch.Tensor:
    """Emulate a kernel; `turned`, with late copies and backward threads."""
    source = emitted(problem, gpu, point)
    return emulated(source, problem.dtype, case, splits, turned, turned)


@pytest.mark.parametrize(
    ("gpu", "variant", "dims", "heads", "queries", "causal", "page", "fixed"),
    [
        ("a100", "gqa", (128, 128), (8, 2), 1, False, 0, {"BM": 16, "column_warps": 4}),
        ("h200", "gqa", (128, 128), (28, 4), 5, True, 16, {"BN": 64, "column_warps": 8}),
        ("l40s", "mqa", (64, 64), (71, 1), 2, True, 64, {"BM": 32, "column_warps": 2}),
        ("a100", "mqa", (128, 128), (32, 1), 8, True, 128, {"BM": 64, "column_warps": 1}),
        ("l40s", "mha", (256, 256), (2, 2), 8, False, 16, {"column_warps": 4}),
        ("a100", "gqa", (72, 72), (8, 2), 2, True, 0, {}),
        ("t4", "gqa", (128, 128), (8, 2), 5, True, 16, {"column_warps": 4}),
        ("t4", "gqa", (80, 96), (8, 2), 1, False, 0, {"swizzle": 0, "column_warps": 2}),
        ("l40s", "mla", LATENT, (16, 1), 1, False, 0, {"BM": 16, "column_warps": 4}),
        ("a100", "mla", LATENT, (64, 1), 2, True, 16, {"BM": 64, "column_warps": 4}),
        ("l40s", "mla", LATENT, (16, 1), 1, False, 64, {"q_in_registers": 1}),
    ],
)
def test_ragged_lengths_in_either_order(
    gpu: str, variant: str, dims: tuple[int, int], heads: tuple[int, int], queries: int,
    causal: bool, page: int, fixed: dict[str, int],
) -> None:  # fmt: skip
    problem = problem_of(variant, dims, causal, page, "fp16" if gpu == "t4" else "bf16")
    point = drawn(problem, gpu, 5, **fixed)
    tile = point["BN"]
    case = decode_case(problem, *heads, queries, (2 * tile + 1, 0, 1, tile - 1))
    first, second = (answer(problem, gpu, point, case, 2, turned) for turned in (False, True))
    case.assert_right(first)
    assert torch.equal(first.view(torch.int16), second.view(torch.int16)), point.key


@pytest.mark.parametrize(("variant", "dims"), [("gqa", (128, 128)), ("mla", LATENT)])
def test_the_number_of_splits_does_not_matter(variant: str, dims: tuple[int, int]) -> None:
    problem = problem_of(variant, dims, True, 16)
    point = drawn(problem, "a100", 1, BM=16, BN=32, column_warps=4, warps=4)
    case = decode_case(problem, 8, 1, 2, (100, 33))
    for splits in (1, 2, 7):  # of four tiles and two: with seven most splits are empty
        case.assert_right(answer(problem, "a100", point, case, splits))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("bool const moved = __syncthreads_or(grown);", "bool const moved = grown;"),
        ("    cp_async_wait<2>();", ""),
        ("min(keys - 1, row / group + diagonal)", "keys - 1"),
        ("bool const valid = key < uint32_t(keys);", "bool const valid = true;"),
        ("S_sum[m][r] *= decay;", ""),
        ("packed % group", "packed / group"),
    ],
)
def test_a_defect_is_seen(right: str, wrong: str) -> None:
    """What the emulation is worth: barriers, waits, masks and tails that are left out."""
    problem = problem_of("gqa", (64, 64), True, 0)
    fixed = {
        "BM": 16, "BN": 32, "warps": 4, "column_warps": 4, "stages": 2, "q_in_registers": 0,
        "rescale_threshold": 0,
    }  # fmt: skip
    case = decode_case(problem, 8, 2, 2, (100, 45))
    source = emitted(problem, "a100", drawn(problem, "a100", 3, **fixed))
    assert right in source.text
    for late, backwards in ((False, False), (True, True)):
        case.assert_right(emulated(source, problem.dtype, case, 2, late, backwards))
    spoiled = replace(source, text=source.text.replace(right, wrong))
    with pytest.raises(AssertionError):
        for late, backwards in ((False, False), (True, True)):
            case.assert_right(emulated(spoiled, problem.dtype, case, 2, late, backwards))


@pytest.mark.parametrize("threshold", [0, 8])
def test_scores_past_any_finite_sentinel(threshold: int) -> None:
    """Maxima that grow from tile to tile, products past the exponent's range, a scale of 0."""
    problem = problem_of("gqa", (64, 64), False, 0)
    point = drawn(problem, "a100", 2, BM=16, BN=16, column_warps=2, rescale_threshold=threshold)
    case = decode_case(problem, 4, 1, 1, (90,))
    growing = torch.linspace(0.1, 9, case.k.shape[1]).view(1, -1, 1, 1)
    grown = replace(case, k=(case.k * growing).to(case.k.dtype).contiguous())
    grown.assert_right(answer(problem, "a100", point, grown, 1))
    for factor, scale in ((3e4, case.scale), (-3e4, case.scale), (1.0, 0.0), (1.0, -0.1)):
        changed = replace(case, q=case.q * factor, scale=scale)
        changed.assert_right(answer(problem, "a100", point, changed, 2))
