"""The right kernels that defects are put into, on a Hopper card.

Prefill on both back ends with both masks; decode with V of its own and absorbed MLA.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from codegen.cute import translate
from codegen.kernel import KernelSource
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import sketches
from space.constraints import Backend, space_for
from space.gpu import gpu_named
from space.variant import LATENT_DIMS, DType, Phase, Problem, Shape

GPU = gpu_named("h200")


@dataclass(frozen=True, slots=True)
class Subject:
    """A program at one point: what is emitted today for it is what a defect is put into."""

    backend: Backend
    causal: bool
    point: tuple[tuple[str, int], ...]
    phase: Phase = Phase.PREFILL
    latent: bool = False

    @property
    def problem(self) -> Problem:
        """Query heads share KV heads, so that a wrong head shows."""
        variant, dims = ("mla", LATENT_DIMS) if self.latent else ("gqa", (128, 128))
        return Problem(variant, DType.FP16, *dims, self.causal, self.phase)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """What the judge times it on: enough blocks to fill the card."""
        if self.phase is Phase.PREFILL:
            return (Shape(4, 12, 4, 1024, 1024, 128, 128, self.causal),)
        heads, kv_heads = (128, 1) if self.latent else (32, 8)
        dims = self.problem.head_dim, self.problem.head_dim_v
        return (Shape(4, heads, kv_heads, 1, 2048, *dims, self.causal),)


def _sync(causal: bool, stages: int, threshold: int) -> Subject:
    point = {
        "BM": 128, "BN": 64, "warps": 4, "stages": stages, "swizzle": 128, "q_in_registers": 0,
        "p_in_registers": 1, "rescale_threshold": threshold, "peel": 1, "blocks_per_sm": 1,
        "head_group": 1, "epilogue_smem": 1, "causal_longest_first": int(causal),
    }  # fmt: skip
    return Subject(Backend.MMA_SYNC, causal, tuple(point.items()))


def _hopper(causal: bool, fast: bool) -> Subject:
    point = {
        "BM": 128, "BN": 128, "consumer_warpgroups": 2, "stages": 2, "q_stages": 1,
        "late_wait": 0, "q_in_registers": 0, "exp2_fma": 0,
        "out_buffer": 1, "overlap": int(fast), "pingpong": int(fast),
        "rescale_threshold": 8 * fast, "integer_max": int(fast), "persistent": int(fast),
        "head_group": 0 if fast else 1, "skip": 0, "causal_longest_first": int(causal),
        "swizzle": 128, "cluster": 1, "pack_heads": 1,
    }  # fmt: skip
    return Subject(Backend.WGMMA, causal, tuple(point.items()))


def _decode(latent: bool, **others: int) -> Subject:
    point = {
        "BM": 64, "BN": 64, "consumer_warpgroups": 1 + latent, "stages": 2 if latent else 3,
        "blocks_per_sm": 1, "overlap": 1, "evict_first": 0, "rescale_threshold": 8,
        "integer_max": 1, "split_blocks": 1, "min_split_tiles": 1, "combine_early": 0,
        "combine_groups": 4, "q_panels": int(latent), **others,
    }  # fmt: skip
    return Subject(Backend.WGMMA, False, tuple(point.items()), Phase.DECODE, latent)


SUBJECTS = {
    "mma_sync causal": _sync(True, stages=1, threshold=0),
    "mma_sync full": _sync(False, stages=2, threshold=8),
    "hopper causal": _hopper(True, fast=False),
    "hopper full": _hopper(False, fast=True),
    "decode gqa": _decode(latent=False),
    "decode mla": _decode(latent=True),
}


@functools.cache
def emitted(name: str) -> KernelSource:
    """Return what is emitted today for a subject."""
    subject = SUBJECTS[name]
    problem = subject.problem
    point = space_for(problem, GPU, subject.backend).point(dict(subject.point))
    text = next(iter(sketches(problem.variant, problem.causal, problem.phase).values()))
    return translate(bind(parse(text), problem, point), problem, GPU)
