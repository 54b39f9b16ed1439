"""Hopper decode kernels: golden text, plans of all kinds of points, barriers, real compiles."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from decode_programs import emitted, text_of

from codegen import nvrtc
from codegen.cute import decode_protocol
from codegen.cute.decode_protocol import Rings, Step, check_decode_protocol, play
from codegen.errors import PlanError, ToolchainMissing
from codegen.kernel import ArgKind, GridAxis, KernelSource
from llm_proposer.seeds import seeds
from space.constraints import smem_bytes, space_for, violated
from space.gpu import GPUS
from space.legal import legal_points
from space.params import Point
from space.variant import LATENT_DIMS, DType, Phase, Problem

GOLDEN = Path(__file__).parents[2] / "golden" / "cute"
H200 = GPUS["h200"]
LATENT = Rings(
    ("rest", "right", "left"), ("rest", "right", "left"), "rest", ("left", "right"), 2, True
)
OWN = Rings(("keys", "values"), ("keys",), "keys", ("values",), 3, True)


def decode(variant: str, dims: tuple[int, int], causal: bool = False, page: int = 0) -> Problem:
    return Problem(variant, DType.BF16, *dims, causal, Phase.DECODE, page)


def first_seeds(problem: Problem) -> tuple[Point, ...]:
    return seeds(problem, H200, space_for(problem, H200))


GOLDENS = {
    "decode-gqa-causal-sm90": (decode("gqa", (128, 128), True), 1),
    "decode-mla-page64-sm90": (decode("mla", LATENT_DIMS, page=64), 1),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_text_is_the_golden_one(name: str, request: pytest.FixtureRequest) -> None:
    problem, nth = GOLDENS[name]
    text = emitted(problem, "h200", first_seeds(problem)[nth]).text
    path = GOLDEN / f"{name}.cu"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text(), f"{name} changed; pytest --update-golden shows how in git"


@pytest.mark.parametrize("page", [0, 16, 64, 128])
@pytest.mark.parametrize(
    ("variant", "dims"), [("gqa", (128, 128)), ("mqa", (64, 64)), ("mha", (96, 80)),
                          ("mla", LATENT_DIMS)],
)  # fmt: skip
def test_every_kind_of_legal_point_becomes_a_kernel(
    variant: str, dims: tuple[int, int], page: int
) -> None:
    """The plan refuses nothing that the predicates let through, and agrees on shared memory."""
    problem = decode(variant, dims, causal=page == 16, page=page)
    legal = legal_points(problem, H200, space_for(problem, H200))
    rng = random.Random(page)
    for point in [*first_seeds(problem), *(legal.draw(rng) for _ in range(12))]:
        assert violated(problem, point, H200) is None
        source = emitted(problem, "h200", point)
        partial, combine = source.launches
        assert partial.smem_bytes == smem_bytes(problem, point)
        assert combine.if_split and combine.dependent and not partial.if_split
        assert (source.splits is not None) and source.splits.keys == point["BN"]
        kinds = [a.kind for a in partial.args]
        assert (ArgKind.PAGES in kinds) == bool(page)
        assert emitted(problem, "h200", point).text == source.text


def test_a_panel_of_q_that_stays_in_registers_is_read_from_shared_memory_once() -> None:
    """9 panels of 4 steps: all of them are read at each tile, or 8 of them are."""
    problem = decode("mla", LATENT_DIMS)
    held = next(p for p in first_seeds(problem) if p["q_panels"])
    one, none = (emitted(problem, "h200", held.replace(q_panels=n)).text for n in (1, 0))
    assert one.count("ldsm(Q_r[k]") == 1 and "ldsm" not in none
    product = "64x64x16_rs(S, Q_r[k - 32], b + "
    assert one.count(product) == none.count("for (int k = 32; k < 36; ++k)") > 0
    assert product not in none


@pytest.mark.parametrize(("variant", "dims"), [("mqa", (128, 128)), ("mla", LATENT_DIMS)])
def test_blocks_of_a_cluster_combine_their_splits(variant: str, dims: tuple[int, int]) -> None:
    """They leave results in shared memory; only joined ones reach global memory."""
    problem = decode(variant, dims)
    point = first_seeds(problem)[1].replace(split_cluster=2)
    source, alone = (emitted(problem, "h200", point.replace(split_cluster=n)) for n in (2, 1))
    assert (source.launches[0].cluster, alone.launches[0].cluster) == (2, 1)
    assert source.launches[0].smem_bytes == alone.launches[0].smem_bytes
    assert source.splits is not None and source.splits.sharing == 2
    assert "__cluster_dims__(2, 1, 1)" in source.text and "__cluster_dims__" not in alone.text
    assert "int const tiles_per_split = ceil_div(tiles, splits * 2);" in source.text
    first = source.text[: source.text.index("combine(")]
    before, _, behind = first.partition("  meet_cluster();")
    assert "gO_s +" not in before and "glse_s[" not in before
    assert behind.count("gO_s + at") == behind.count("glse_s[at]") == 1
    assert behind.count("meet_cluster();") == 1  # before the block ends


def test_blocks_share_the_columns_of_a_latent_output() -> None:
    """Each loads whole rows of keys, its own columns of V first, and stores its own columns."""
    problem = decode("mla", LATENT_DIMS)
    point = first_seeds(problem)[0].replace(column_blocks=2, q_panels=0)
    both, alone = (emitted(problem, "h200", point.replace(column_blocks=n)) for n in (2, 1))
    assert both.launches[0].grid == (GridAxis("2", 1), *alone.launches[0].grid)
    assert both.launches[0].smem_bytes == alone.launches[0].smem_bytes
    assert both.splits is not None and both.splits.sharing == 2
    assert both.workspaces == alone.workspaces
    part = both.text[: both.text.index("combine(")]
    assert part.count("* 512 + column_block * 256, from, 512)") == 1
    assert part.count("* 512 + 128 + column_block * 256, from, 512)") == 1
    assert part.count("if (column_block == 0 && splits > 1") == 1  # the rows' sums, once
    panel = "(panel < 8 ? (panel + column_block * 4) % 8 : panel)"
    assert part.count(f"{panel} * 64, i * 64, kv_head, sequence") == 6
    assert part.count(f"from + {panel} * 64") == 1
    for block in (0, 1):
        places = [(p + block * 4) % 8 if p < 8 else p for p in range(9)]
        assert places[:4] == [block * 4 + n for n in range(4)] and sorted(places) == [*range(9)]


def test_only_sums_and_normalised_outputs_are_combined_in_a_cluster() -> None:
    """Which other results mean is the second kernel's to know."""
    problem = decode("mqa", (128, 128))
    point = first_seeds(problem)[0].replace(split_cluster=2)
    text = text_of(problem)
    changed = text.replace("Compute LogSumExp S and get lse\n", "Compute LogSumExp S and get lse\n"
                           "Compute Scale O, scale\n", 1)  # fmt: skip
    assert changed != text
    with pytest.raises(PlanError, match="split_cluster=2 combines normalised outputs"):
        emitted(problem, "h200", point, changed)


def test_a_latent_program_reads_no_v() -> None:
    problem = decode("mla", LATENT_DIMS)
    source = emitted(problem, "h200", first_seeds(problem)[0])
    assert dict(source.tensors) == {"Q": "in", "K": "in", "O": "out"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"BM": 128}, "64 packed rows"),
        ({"stages": 8, "BN": 128}, "bytes of shared memory wanted"),
        ({"consumer_warpgroups": 2}, "one warpgroup computes"),
    ],
)
def test_what_cannot_run_is_refused_with_its_limit(change: dict[str, int], said: str) -> None:
    problem = decode("gqa", (128, 128))
    point = first_seeds(problem)[0]
    values = point.as_dict() | change
    with pytest.raises(PlanError, match=said):
        emitted(problem, "h200", Point.of(values))


ADD_BIAS = """\
  Copy B in coordinate [L = block_idx, D = i] from global to shared
  Compute Add S, B
"""


def masked(lines: str) -> KernelSource:
    problem = decode("gqa", (128, 128))
    text = text_of(problem)
    scaled = "  Compute Scale S, scale\n"
    changed = text.replace(scaled, f"{scaled}{lines}")
    assert changed != text
    return emitted(problem, "h200", first_seeds(problem)[0], changed)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (ADD_BIAS, "a bias or alibi"),
        ("  Compute Mask S, alibi\n", "a bias or alibi"),
        ("  Compute Mask S, window(9, 0, 2)\n", "a window with sinks"),
    ],
)
def test_a_mask_that_prefill_alone_lowers_is_refused(lines: str, said: str) -> None:
    with pytest.raises(PlanError, match=f"{said} has no lowering in a Hopper decode kernel"):
        masked(lines)


def test_a_plain_window_is_lowered() -> None:
    text = masked("  Compute Mask S, window(37, 5)\n").text
    assert "int const first = query + diagonal - 37 - (" in text
    assert "min(keys - 1, query + diagonal + 5)" in text


@pytest.mark.parametrize(
    ("variant", "dims", "nth"),
    [("gqa", (128, 128), 1), ("mla", LATENT_DIMS, 0), ("mla", LATENT_DIMS, 1),
     ("mla", LATENT_DIMS, 2)],
)  # fmt: skip
@pytest.mark.parametrize("cluster", [1, 2])
def test_ptxas_neither_spills_nor_serialises(
    variant: str, dims: tuple[int, int], nth: int, cluster: int
) -> None:
    problem = decode(variant, dims)
    point = first_seeds(problem)[nth].replace(split_cluster=cluster)
    source = emitted(problem, "h200", point)
    try:
        cubin = nvrtc.compile_source(source, "sm_90a")
    except ToolchainMissing as missing:
        pytest.skip(str(missing))
    assert {r.entry for r in cubin.resources} == {"partial", "combine"}
    assert all(r.spill_store_bytes == r.stack_bytes == 0 for r in cubin.resources)


# ---- barriers --------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rings", [LATENT, OWN])
def test_the_barriers_let_everybody_through(rings: Rings, overlap: bool, stages: int) -> None:
    check_decode_protocol(replace(rings, overlap=overlap, stages=stages))


def test_one_stage_with_overlapped_products_waits_for_ever() -> None:
    """The next tile's scores are waited for before this tile's columns of V are let go."""
    with pytest.raises(PlanError, match="everybody waits"):
        check_decode_protocol(replace(LATENT, stages=1))


@pytest.mark.parametrize("lost", ["empty rest", "empty right", "P empty", "P full", "full left"])
def test_a_lost_signal_is_a_deadlock(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(steps: Iterator[Step]) -> Iterator[Step]:
        for step in steps:
            yield replace(step, gives="") if step.gives == lost else step

    for name in ("producer_steps", "owner_steps", "follower_steps"):
        whole = getattr(decode_protocol, name)
        monkeypatch.setattr(decode_protocol, name, lambda r, n, whole=whole: without(whole(r, n)))
    with pytest.raises(PlanError):
        check_decode_protocol(LATENT)


def test_a_tile_filled_before_its_reader_let_go_is_not_possible() -> None:
    """The loader may be at most `stages` tiles ahead of the last reader of a part."""
    ahead = play([decode_protocol.producer_steps(OWN, OWN.stages)])
    assert ahead["full keys"] == ahead["full values"] == OWN.stages
    with pytest.raises(PlanError, match="empty keys 1"):
        play([decode_protocol.producer_steps(OWN, OWN.stages + 1)])
