"""Decode kernels with warp-level MMA: golden text, shared memory, refusals, real compiles."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from decode_programs import decode, emitted, text_of

from codegen import nvrtc
from codegen.cute import translate
from codegen.cute.decode_plan import plan_decode
from codegen.cute.row_copies import RowOrder
from codegen.errors import PlanError, ToolchainMissing
from codegen.kernel import ArgKind, GridAxis, SplitRule
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from codegen.tl.smem import smem_bytes as program_smem_bytes
from llm_proposer.builtin import sketches
from llm_proposer.seeds import seeds
from space.constraints import Backend, smem_bytes, space_for
from space.gpu import GPUS
from space.legal import legal_points
from space.params import Point
from space.variant import Problem

GOLDEN = Path(__file__).parents[2] / "golden" / "cute"
LATENT = (576, 512)


def seed(problem: Problem, gpu: str, nth: int = 0) -> Point:
    return seeds(problem, GPUS[gpu], space_for(problem, GPUS[gpu], Backend.MMA_SYNC))[nth]


GOLDENS = {
    "decode-gqa-causal-sm80": (decode("gqa", (128, 128), True, dtype="bf16"), "a100", 1),
    "decode-mla-page16-sm80": (decode("mla", LATENT, page=16, dtype="bf16"), "a100", 1),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_text_is_the_golden_one(name: str, request: pytest.FixtureRequest) -> None:
    problem, gpu, nth = GOLDENS[name]
    text = emitted(problem, gpu, seed(problem, gpu, nth)).text
    path = GOLDEN / f"{name}.cu"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text(), f"{name} changed; pytest --update-golden shows how in git"


def drawn(problem: Problem, gpu: str, count: int) -> list[Point]:
    """Legal points, drawn alike from all."""
    legal = legal_points(problem, GPUS[gpu], space_for(problem, GPUS[gpu], Backend.MMA_SYNC))
    rng = random.Random(7)
    return [legal.draw(rng) for _ in range(count)]


@pytest.mark.parametrize("gpu", ["t4", "a100", "l40s", "h200"])
@pytest.mark.parametrize(
    ("variant", "dims"),
    [("gqa", (128, 128)), ("mqa", (64, 64)), ("gqa", (72, 72)), ("mha", (192, 128)),
     ("gqa", (80, 96)), ("mha", (256, 256)), ("mla", LATENT)],
)  # fmt: skip
def test_legal_points_plan_with_the_shared_memory_that_was_predicted(
    gpu: str, variant: str, dims: tuple[int, int]
) -> None:
    problem = decode(variant, dims, causal=True, page=64)
    for point in drawn(problem, gpu, 12):
        program = bind(parse(text_of(problem)), problem, point)
        source = translate(program, problem, GPUS[gpu])
        planned = source.launches[0].smem_bytes
        assert planned == smem_bytes(problem, point), point.key
        assert planned == program_smem_bytes(program, program.kernels[0]), point.key
        assert planned <= GPUS[gpu].smem_per_block_bytes


@pytest.mark.parametrize("gpu", ["t4", "a100", "l40s"])
def test_absorbed_mla_has_legal_points_on_every_generation(gpu: str) -> None:
    problem = decode("mla", LATENT)
    legal = legal_points(problem, GPUS[gpu], space_for(problem, GPUS[gpu], Backend.MMA_SYNC))
    assert len(legal) > 0
    source = emitted(problem, gpu, seed(problem, gpu))
    assert [name for name, _ in source.tensors] == ["Q", "K", "O"], "V is part of K"


def test_a_launch_says_what_a_decode_kernel_needs() -> None:
    problem = decode("gqa", (128, 128), page=16)
    point = seed(problem, "a100", 1).replace(split_blocks=3, min_split_tiles=2)
    source = emitted(problem, "a100", point)
    partial, combine = source.launches
    assert partial.grid == (
        GridAxis("rows", 16), GridAxis("kv_heads", 1), GridAxis("splits", 1), GridAxis("batch", 1),
    )  # fmt: skip
    assert source.splits == SplitRule(16, 64, 3, 2)
    kinds = {a.kind for a in partial.args}
    assert {ArgKind.KEY_COUNTS, ArgKind.PAGES, ArgKind.PAGE_STRIDE} <= kinds
    assert (partial.if_split, combine.if_split, combine.dependent) == (False, True, False)
    assert emitted(problem, "h200", point).launches[1].dependent, "sm_90 can start it early"
    unpaged = emitted(decode("gqa", (128, 128)), "a100", point)
    assert ArgKind.PAGES not in {a.kind for a in unpaged.launches[0].args}


def test_warps_that_share_rows_meet_twice_a_tile() -> None:
    """Once for the tile, once for P: maxima are exchanged only where the vote says so."""
    point = seed(decode("gqa", (128, 128)), "a100", 1)
    text = emitted(decode("gqa", (128, 128)), "a100", point).text
    loop = text[text.index("for (int i = i_lo") :]
    body, rare = loop[: loop.index("if (moved)")], loop[loop.index("if (moved)") :]
    assert body.count("__syncthreads();") == 1 and body.count("__syncthreads_or(") == 1
    assert rare.index("weigh_S();") < rare.index("// TL"), "P is written again before it is read"


def test_rows_past_the_sequence_are_zero_and_their_pages_not_looked_up() -> None:
    problem = decode("mla", LATENT, page=16)
    text = emitted(problem, "a100", seed(problem, "a100", 1)).text
    assert "int64_t const page = valid ? __ldg(table + key / 16) : 0;" in text
    wide = decode("mla", LATENT, page=64)  # a tile lies in one page
    text = emitted(wide, "a100", seed(wide, "a100", 1)).text
    assert "? __ldg(table + uint32_t((index) * 32) / 64) : 0;" in text


@pytest.mark.parametrize(
    ("dims", "changes", "said"),
    [
        ((128, 128), {"BM": 16, "column_warps": 1}, "16 rows over 4 warps"),
        ((128, 128), {"BN": 16, "column_warps": 4}, "BN=16 is not a multiple of 8 for each"),
        ((96, 96), {"swizzle": 64, "column_warps": 4}, "48 bytes of V's row"),
        ((256, 256), {"BM": 64, "BN": 128, "stages": 4, "column_warps": 1}, "on a100"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(
    dims: tuple[int, int], changes: dict[str, int], said: str
) -> None:
    problem = decode("gqa", dims)
    base = seed(decode("gqa", (128, 128)), "a100", 1)
    with pytest.raises(PlanError, match=said):
        emitted(problem, "a100", base.replace(**changes))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Compute LogSumExp S and get lse\n", "Compute Relu O\nCompute LogSumExp S and get lse\n",
         "Relu has no lowering where warps share rows"),
        ("  Reshape S", "  Compute Softcap S, 3.0\n  Reshape S", "needs column_warps = 1"),
        ("split_start:split_end", "0:N", "split_start:split_end"),
        ("S, scale\n", "S, scale\n  Compute Mask S, alibi\n", "a bias or alibi has no lowering"),
        ("S, scale\n",
         "S, scale\n  Copy B in coordinate [L = block_idx, D = i] from global to shared\n"
         "  Compute Add S, B\n", "a bias or alibi has no lowering"),
        ("S, scale\n", "S, scale\n  Compute Mask S, window(9, 0)\n", "a window mask has no"),
        ("S, scale\n", "S, scale\n  Compute Mask S, window(9, 0, 2)\n", "a window mask has no"),
    ],
)  # fmt: skip
def test_programs_that_have_no_decode_lowering_are_refused(old: str, new: str, said: str) -> None:
    problem = decode("gqa", (128, 128))
    text = text_of(problem).replace(old, new)
    assert text != text_of(problem)
    with pytest.raises(PlanError, match=said):
        emitted(problem, "a100", seed(problem, "a100", 1), text)


def test_a_program_of_one_kernel_is_refused() -> None:
    problem = decode("gqa", (128, 128))
    with pytest.raises(PlanError, match="two kernels"):
        emitted(problem, "a100", seed(problem, "a100"), sketches("gqa", False)["forward"])


@pytest.mark.parametrize("threads", [64, 128, 256])
@pytest.mark.parametrize("dims", [(128, 128), (72, 72), (96, 96), LATENT])
def test_every_chunk_of_a_tile_has_one_thread(threads: int, dims: tuple[int, int]) -> None:
    problem = decode("mla" if dims == LATENT else "gqa", dims)
    point = seed(problem, "a100").replace(swizzle=0, stages=1)
    program = bind(parse(text_of(problem)), problem, point)
    for buffer in plan_decode(program, problem, GPUS["a100"], "O").base.buffers:
        order = RowOrder.of(buffer, threads)
        moved = [
            (tid // order.width % order.rows + step * order.rows, group * order.width + lane)
            for tid in range(threads)
            for step in range(order.steps)
            for turn in range(order.passes)
            for lane in (tid % order.width,)
            for group in (turn * order.parts + tid // (order.width * order.rows),)
            if group < order.groups
        ]
        layout = buffer.layout
        assert sorted(moved) == [(r, c) for r in range(layout.rows) for c in range(layout.chunks)]
        assert order.rows % 8 == 0, "the swizzle repeats within a thread's steps"


@pytest.mark.parametrize(
    ("gpu", "variant", "dims", "page", "nth"),
    [("t4", "gqa", (128, 128), 0, 1), ("a100", "gqa", (128, 128), 0, 2),
     ("l40s", "gqa", (64, 64), 16, 1), ("a100", "mla", LATENT, 0, 2),
     ("l40s", "mla", LATENT, 16, 1),
     ("h200", "mla", LATENT, 64, 2), ("h200", "gqa", (128, 128), 16, 4)],
)  # fmt: skip
def test_kernels_build_without_spills(
    gpu: str, variant: str, dims: tuple[int, int], page: int, nth: int
) -> None:
    try:
        nvrtc.nvrtc_version()
        nvrtc.find_headers()
    except ToolchainMissing as missing:
        pytest.skip(str(missing))
    problem = decode(variant, dims, causal=True, page=page)
    cubin = nvrtc.compile_source(emitted(problem, gpu, seed(problem, gpu, nth)), GPUS[gpu].arch)
    for found in cubin.resources:
        assert (found.spill_store_bytes, found.stack_bytes) == (0, 0), found
