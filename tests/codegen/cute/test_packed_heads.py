"""Query heads packed into the rows of a Hopper tile: maps, grid, masks and stores of the text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from codegen.cute import translate
from codegen.cute.packing import row_head
from codegen.cute.register_copies import element_row
from codegen.errors import PlanError
from codegen.kernel import ArgKind, KernelSource
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import programs, sketches
from llm_proposer.seeds import seeds
from space.constraints import space_for
from space.gpu import GPUS
from space.variant import DType, Problem

EXAMPLES = Path(__file__).parents[3] / "examples"
GPU = GPUS["h200"]


def emitted(text: str, causal: bool = True, **changes: int) -> KernelSource:
    problem = Problem("gqa", DType.BF16, 128, 128, causal)
    point = seeds(problem, GPU, space_for(problem, GPU))[0].replace(**changes)
    return translate(bind(parse(text), problem, point), problem, GPU)


def forward(causal: bool = True, **changes: int) -> KernelSource:
    return emitted(sketches("gqa", causal)["forward"], causal, **changes)


@pytest.mark.parametrize("pack", [2, 4, 8])
@pytest.mark.parametrize("rows", [128, 192])
def test_boxes_hold_the_packed_heads_of_fewer_queries(pack: int, rows: int) -> None:
    wide = {"BM": rows, "BN": 80, "consumer_warpgroups": rows // 64, "q_stages": 1}
    launch = forward(pack_heads=pack, **wide).launches[0]
    maps = {a.name: (a.box, a.pack) for a in launch.args if a.kind is ArgKind.TENSOR_MAP}
    assert maps["Q"] == ((64, rows // pack), pack)
    assert maps["O"] == ((64, 64 // pack), pack)  # each warpgroup stores its own
    assert maps["K"] == maps["V"] == ((64, 80), 1)
    assert [(a.length, a.tile) for a in launch.grid] == [
        ("M", rows // pack), ("kv_heads", 1), ("group", pack), ("batch", 1),
    ]  # fmt: skip


def test_a_cluster_spans_the_queries_of_both_its_blocks() -> None:
    source = forward(pack_heads=4, cluster=2, persistent=1)
    assert source.launches[0].grid[0].tile == 64
    assert "int const row_blocks = ceil_div(M, 64);" in source.text
    assert "int const cluster_row0 = first_block * 32;" in source.text


@pytest.mark.parametrize("pack", [2, 4, 8])
def test_rows_are_every_packed_head_of_every_query_once(pack: int) -> None:
    """The C++ of a row, worked out for all lanes; the box of TMA lays heads of a query first."""
    query = element_row(16, "row0", pack)
    head = row_head(pack, element_row(16))
    found = []
    for warp in range(8):
        for lane in range(32):
            for r in range(2):
                names = {"warp": warp, "lane": lane, "r": r, "m": 0, "row0": 100}
                names |= {"kv_head": 3, "group": 9, "first_head": pack}
                row, own = (eval(x.replace("/", "//"), {}, names) for x in (query, head))
                in_tile = warp * 16 + r * 8 + lane // 4
                assert (row, own) == (100 + in_tile // pack, 27 + pack + in_tile % pack)
                found.append((row, own))
    assert len(set(found)) == len(found) // 4 == 128  # four lanes share a row


def test_masks_and_loops_go_by_queries() -> None:
    text = forward(pack_heads=4).text
    assert "int const row0 = block_idx * 32;" in text
    assert "int const own_row0 = row0 + consumer * 16;" in text
    assert "min(row0 + 32, M) + diagonal" in text and "min(own_row0 + 16, M) + diagonal" in text
    assert "int const row = row0 + (warp * 16 + m * 16 + r * 8 + lane / 4) / 4;" in text
    assert "panel * 64, first_head, row0, kv_head, batch);" in text
    assert "panel * 64, first_head, own_row0, kv_head, batch);" in text
    assert "head, batch);" in text and " head / group" not in text


def test_a_window_goes_by_queries() -> None:
    text = emitted((EXAMPLES / "sliding_window.tl").read_text(), False, pack_heads=2).text
    assert "own_row0 + 32 - 1 + diagonal - window_left" in text
    assert "own_row0 + 64" not in text


def test_a_row_stored_from_registers_is_one_of_its_group() -> None:
    text = forward(pack_heads=4, out_buffer=2).text
    assert "int const row = row0 + packed / 4;" in text
    assert "int const head = kv_head * group + first_head + (packed) % 4;" in text
    assert "if (row < M && first_head + packed % 4 < group)" in text
    assert "int const row = (block_idx) * 128" not in text


def test_alibi_slopes_are_those_of_each_rows_head() -> None:
    text = emitted((EXAMPLES / "alibi.tl").read_text(), pack_heads=4).text
    slopes = re.findall(r"int const head = (.*);\n\s*float const alibi_slope = .*head \+ 1", text)
    assert slopes and all(s.startswith("kv_head * group + first_head + ") for s in slopes)
    assert len(slopes) == text.count("float const alibi_slope")


@pytest.mark.parametrize("pack", [0, 3, 128])
def test_packs_that_tear_a_query_apart_are_refused(pack: int) -> None:
    with pytest.raises(PlanError, match=f"pack_heads={pack}: the 64 rows of a warpgroup"):
        forward(pack_heads=pack)


def test_a_program_that_asks_for_its_row_block_is_not_packed() -> None:
    text = programs(False)["forward"]
    asking = text.replace("  Compute Softmax", "  Compute Add S, block_idx\n  Compute Softmax", 1)
    assert "+ block_idx" in emitted(asking, False).text
    with pytest.raises(PlanError, match="asks for block_idx, which packed heads change"):
        emitted(asking, False, pack_heads=2)
