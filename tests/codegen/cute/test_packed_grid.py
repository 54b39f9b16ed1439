"""Query heads packed into the rows of a Hopper tile: the grid, the bounds, and who may pack."""

from __future__ import annotations

from collections import Counter

import pytest

from codegen.cute import translate
from codegen.kernel import GridAxis, KernelSource
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import sketches
from llm_proposer.seeds import seeds
from runs.templates.launch import grid_size, problem_lengths
from space.constraints import space_for
from space.gpu import GPUS
from space.variant import DType, Problem

H200 = GPUS["h200"]


def emitted(causal: bool = True, text: str = "", **changes: int) -> KernelSource:
    problem = Problem("gqa", DType.BF16, 128, 128, causal)
    point = seeds(problem, H200, space_for(problem, H200))[0].replace(**changes)
    program = bind(parse(text or sketches("gqa", causal)["forward"]), problem, point)
    return translate(program, problem, H200)


def test_one_head_a_row_block_is_what_it_was() -> None:
    """Programs from before there was the choice have the same text."""
    assert "pack" not in emitted(pack_heads=1).text.replace("pack(", "")


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


def test_loop_bounds_of_a_causal_program_are_the_masks() -> None:
    """Whatever it writes of its row block, which packed heads would change."""
    text = sketches("gqa", True)["forward"]
    asked = text.replace("for i = 0:N", "for i = 0:(block_idx + 1) * BM / BN")
    assert asked != text
    assert emitted(text=asked, pack_heads=2).text == emitted(pack_heads=2).text


@pytest.mark.parametrize(("variant", "choices"), [
    ("mha", (1,)), ("mla", (1,)), ("gqa", (1, 2, 4, 8)), ("mqa", (1, 2, 4, 8)),
])  # fmt: skip
def test_only_heads_that_share_keys_are_packed(variant: str, choices: tuple[int, ...]) -> None:
    dims = (192, 128) if variant == "mla" else (128, 128)
    problem = Problem(variant, DType.BF16, *dims, True)
    assert space_for(problem, H200).param("pack_heads").choices == choices
    packed = {p["pack_heads"] for p in seeds(problem, H200, space_for(problem, H200))}
    assert packed == {"mha": {1}, "mla": {1}, "gqa": {1, 4}, "mqa": {1, 4, 8}}[variant]
