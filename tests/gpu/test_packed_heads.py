"""Query heads packed into the rows of a Hopper tile, on the GPU: judged, and in users' programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_here import NEEDS_GPU
from test_judged_kernels import built
from test_programs import check, seeded

from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import programs
from runs.record import Measured
from space.constraints import Backend
from space.gpu import GpuSpec
from space.variant import DType, Problem, Shape
from tuner.job import EvalJob
from tuner.pools import GpuPool

EXAMPLES = Path(__file__).parents[2] / "examples"
WIDE = {"BM": 192, "BN": 80, "consumer_warpgroups": 3, "q_stages": 1}

pytestmark = NEEDS_GPU


@pytest.mark.parametrize(
    ("heads", "causal", "changes"),
    [
        ((32, 8), True, {"pack_heads": 4}),
        ((6, 2), True, {"pack_heads": 4, **WIDE, "skip": 1}),
        ((6, 2), False, {"pack_heads": 2, "out_buffer": 2}),
        ((12, 1), True, {"pack_heads": 8, "out_buffer": 0, "q_stages": 1}),
        ((12, 1), False, {"pack_heads": 8, "cluster": 2, "persistent": 1}),
        ((14, 2), True, {"pack_heads": 4, "q_in_registers": 1, "BN": 64}),
        ((14, 2), True, {"pack_heads": 8, "persistent": 0, "q_stages": 1, "head_group": 0}),
    ],
    ids=str,
)
def test_packed_heads_are_right_whatever_shares_a_kv_head(
    pool: GpuPool, gpu: GpuSpec, heads: tuple[int, int], causal: bool, changes: dict[str, int]
) -> None:
    """Groups that the pack does not divide too; the judge adds lengths, layouts and groups."""
    if gpu.sm != 90:
        pytest.skip(f"{gpu.name} has no wgmma")
    problem = Problem("gqa", DType.BF16, 128, 128, causal)
    kernel = built(problem, gpu, 0, **changes)
    shape = Shape(2, *heads, 1100, 1300, 128, 128, causal)
    outcome = pool.submit(EvalJob(problem, kernel.source, kernel.cubin.image, (shape,), 1)).result()
    assert isinstance(outcome, Measured), outcome
    assert outcome.error_ratio is not None and outcome.error_ratio <= 2.0


@pytest.mark.parametrize(
    ("name", "causal", "changes"),
    [
        ("alibi", True, {"pack_heads": 2}),
        ("alibi", True, {"pack_heads": 4, "out_buffer": 2}),
        ("softcap_window", False, {"pack_heads": 2}),
        ("softcap_window", True, {"pack_heads": 4, "skip": 1}),
        ("relu", True, {"pack_heads": 2, "out_buffer": 2}),
    ],
)
def test_programs_that_ask_for_rows_and_heads_get_those_of_packed_heads(
    gpu: GpuSpec, name: str, causal: bool, changes: dict[str, int]
) -> None:
    if gpu.sm != 90:
        pytest.skip(f"{gpu.name} has no wgmma")
    own = EXAMPLES / f"{name}.tl"
    text = own.read_text() if own.exists() else programs(causal)[name]
    problem = Problem("gqa", DType.FP16, 64, 64, causal)
    point = seeded(problem, "h200", Backend.WGMMA, text).replace(**changes)
    check(bind(parse(text), problem, point), problem, "h200")
