"""Query heads packed into the rows of a Hopper tile: text, grid, maps, and what is refused."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from codegen.cute import translate
from codegen.cute.packing import check_pack
from codegen.errors import PlanError
from codegen.kernel import ArgKind, GridAxis, KernelSource
from codegen.tl import ast
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import sketches
from llm_proposer.seeds import seeds
from runs.templates.launch import grid_size, problem_lengths
from space.constraints import space_for
from space.gpu import GPUS
from space.variant import DType, Problem

H200 = GPUS["h200"]
EXAMPLES = Path(__file__).parents[3] / "examples"


def emitted(causal: bool = True, text: str = "", **changes: int) -> KernelSource:
    problem = Problem("gqa", DType.BF16, 128, 128, causal)
    point = seeds(problem, H200, space_for(problem, H200))[0].replace(**changes)
    program = bind(parse(text or sketches("gqa", causal)["forward"]), problem, point)
    return translate(program, problem, H200)


def test_one_head_a_row_block_is_what_it_was() -> None:
    """Programs from before there was the choice have the same text."""
    assert "pack" not in emitted(pack_heads=1).text.replace("pack(", "").replace("packs", "")


@pytest.mark.parametrize("pack", [2, 4, 8])
def test_a_copy_moves_the_heads_of_each_query(pack: int) -> None:
    """64 rows of a warpgroup's output, 128 of the block's Q; keys are of one head."""
    source = emitted(pack_heads=pack)
    maps = {a.name: a for a in source.launches[0].args if a.kind is ArgKind.TENSOR_MAP}
    assert {n: (a.box[1], a.pack) for n, a in maps.items()} == {
        "Q": (128 // pack, pack), "K": (128, 1), "V": (128, 1), "O": (64 // pack, pack),
    }  # fmt: skip
    assert "SM90_TMA_LOAD_5D::copy(&mapQ" in source.text
    assert "SM90_TMA_STORE_5D::copy(&mapO" in source.text
    assert source.text.count("first_head, row0, kv_head, batch);") == 1
    assert source.text.count("first_head, own_row0, kv_head, batch);") == 1


@pytest.mark.parametrize("pack", [2, 4, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (28, 4), (12, 1), (6, 6)])
def test_the_grid_covers_every_row_once(heads: int, kv_heads: int, pack: int) -> None:
    """Played in Python: the tile's number as the kernel decodes it, rows and heads as it stores."""
    source = emitted(pack_heads=pack, persistent=0, head_group=1, causal_longest_first=0)
    launch, batches, queries = source.launches[0], 2, 150
    assert launch.grid == (
        GridAxis("M", 128 // pack), GridAxis("kv_heads", 1), GridAxis("group", pack),
        GridAxis("batch", 1),
    )  # fmt: skip
    group = heads // kv_heads
    packs, span = -(-group // pack), 128 // pack
    row_blocks = -(-queries // span)
    assert f"int const packs = ceil_div(group, {pack});" in source.text
    tiles = grid_size(launch, problem_lengths(batches, heads, kv_heads, queries, 200))
    assert tiles == row_blocks * packs * kv_heads * batches
    seen: Counter[tuple[int, int, int]] = Counter()
    for tile in range(tiles):
        plane, block = divmod(tile, row_blocks)
        first_head, kv_plane = plane % packs * pack, plane // packs
        kv_head, batch = kv_plane % kv_heads, kv_plane // kv_heads
        for row in range(128):
            query, head = block * span + row // pack, first_head + row % pack
            if query < queries and head < group:
                seen[batch, kv_head * group + head, query] += 1
    assert len(seen) == batches * heads * queries and set(seen.values()) == {1}


def test_masks_and_skipped_tiles_go_by_the_query() -> None:
    source = emitted(pack_heads=4, skip=1)
    rows = set(re.findall(r"int const row = (row0 \+ .*);", source.text))
    assert rows == {"row0 + (warp * 16 + m * 16 + r * 8 + lane / 4) / 4"}
    assert "int const own_row0 = row0 + consumer * 16;" in source.text
    assert "int const row0 = block_idx * 32;" in source.text


def test_rows_stored_from_registers_find_their_head() -> None:
    text = emitted(pack_heads=4, out_buffer=2).text
    assert "int const row = row0 + packed / 4;" in text
    assert "int const head = kv_head * group + first_head + (packed) % 4;" in text
    assert "first_head + packed % 4 < group" in text


def test_every_row_has_its_own_heads_slope() -> None:
    problem = Problem("gqa", DType.BF16, 128, 128, True)
    text = emitted(text=(EXAMPLES / "alibi.tl").read_text(), pack_heads=2).text
    head = "kv_head * group + first_head + (warp * 16 + m * 16 + r * 8 + lane / 4) % 2;"
    assert problem.causal and text.index(head) < text.index("float const alibi_slope")


@pytest.mark.parametrize("pack", [3, 16, 128, 0])
def test_a_pack_that_no_warpgroup_holds_is_refused(pack: int) -> None:
    if pack == 16:  # legal for the tile, not offered by the space
        assert emitted(pack_heads=16).launches[0].grid[0] == GridAxis("M", 8)
        return
    with pytest.raises(PlanError, match=f"pack_heads={pack}"):
        emitted(pack_heads=pack)


def test_loop_bounds_of_a_causal_program_are_the_masks() -> None:
    """Whatever it writes of its row block, which packed heads would change."""
    text = sketches("gqa", True)["forward"]
    asked = text.replace("for i = 0:N", "for i = 0:(block_idx + 1) * BM / BN")
    assert asked != text
    assert emitted(text=asked, pack_heads=2).text == emitted(pack_heads=2).text


def test_a_kernel_that_computes_with_its_row_block_is_refused() -> None:
    problem = Problem("gqa", DType.BF16, 128, 128, False)
    point = seeds(problem, H200, space_for(problem, H200))[0]
    kernel = bind(parse(sketches("gqa", False)["forward"]), problem, point).kernels[0]
    asks = ast.Custom("Scale", "S", (ast.Name("block_idx"),))
    check_pack(kernel, 2)
    asking = replace(kernel, body=(*kernel.body, asks))
    check_pack(asking, 1)
    with pytest.raises(PlanError, match="packed heads change; pack_heads = 1"):
        check_pack(asking, 2)


@pytest.mark.parametrize(("variant", "choices"), [
    ("mha", (1,)), ("mla", (1,)), ("gqa", (1, 2, 4, 8)), ("mqa", (1, 2, 4, 8)),
])  # fmt: skip
def test_only_heads_that_share_keys_are_packed(variant: str, choices: tuple[int, ...]) -> None:
    dims = (192, 128) if variant == "mla" else (128, 128)
    problem = Problem(variant, DType.BF16, *dims, True)
    assert space_for(problem, H200).param("pack_heads").choices == choices
    packed = {p["pack_heads"] for p in seeds(problem, H200, space_for(problem, H200))}
    assert packed == {"mha": {1}, "mla": {1}, "gqa": {1, 4}, "mqa": {1, 4, 8}}[variant]
