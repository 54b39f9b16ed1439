"""ALiBi, bias tensors and windows with sinks: what is emitted, and which key tiles it visits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from codegen.cute import translate
from codegen.errors import PlanError
from codegen.kernel import ArgKind, KernelSource
from codegen.nvrtc import compile_source
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.customs import CUSTOMS, Custom
from llm_proposer.seeds import seeds
from space.constraints import Backend, space_for
from space.gpu import GPUS
from space.variant import DType, Problem

EXAMPLES = Path(__file__).parents[3] / "examples"
COPY_B = "  Copy B in coordinate [L = block_idx, D = i] from global to shared\n"
ALIBI = (EXAMPLES / "alibi.tl").read_text()
BIAS = ALIBI.replace("  Compute Mask S, alibi\n", f"{COPY_B}  Compute Add S, B\n")
SINKS = (EXAMPLES / "sink_tokens.tl").read_text()


def emitted(text: str, gpu: str, backend: Backend, causal: bool, **changes: int) -> KernelSource:
    problem = Problem("mha", DType.FP16, 64, 64, causal)
    point = seeds(problem, GPUS[gpu], space_for(problem, GPUS[gpu], backend))[0].replace(**changes)
    return translate(bind(parse(text), problem, point), problem, GPUS[gpu])


CARDS = [("a100", Backend.MMA_SYNC), ("t4", Backend.MMA_SYNC), ("h200", Backend.WGMMA)]


@pytest.mark.parametrize(("gpu", "backend"), CARDS)
def test_alibi_takes_its_slope_from_head_and_heads(gpu: str, backend: Backend) -> None:
    source = emitted(ALIBI, gpu, backend, True)
    assert "alibi_slope = exp2_approx(-float(8) * float(head + 1) / float(heads))" in source.text
    assert "(lane & 3) * 2" in source.text and "int const diagonal = N - M" in source.text
    assert compile_source(source, GPUS[gpu].arch).image


@pytest.mark.parametrize(("gpu", "backend"), CARDS[:2])
def test_bias_is_read_in_place_guarded_at_both_lengths(gpu: str, backend: Backend) -> None:
    source = emitted(BIAS, gpu, backend, True)
    plain = emitted(ALIBI.replace("  Compute Mask S, alibi\n", ""), gpu, backend, True)
    assert "if (row < M && column + n * 8 + c < N) S[m][n][r * 2 + c] += unpack(gB[" in source.text
    assert ("B", "in") in source.tensors
    (launch,), (without,) = source.launches, plain.launches
    assert launch.smem_bytes == without.smem_bytes  # no tile of B anywhere
    names = [a.name for a in launch.args if a.kind in (ArgKind.POINTER, ArgKind.STRIDE)]
    assert {"B", "B.b", "B.s", "B.h"} <= set(names)
    assert compile_source(source, GPUS[gpu].arch).image


@pytest.mark.parametrize("custom", CUSTOMS.values(), ids=lambda c: c.name)
@pytest.mark.parametrize(("gpu", "backend"), [CARDS[0], CARDS[2]])
def test_each_example_compiles_with_its_numbers_in_it(
    custom: Custom, gpu: str, backend: Backend
) -> None:
    source = emitted(custom.sketch, gpu, backend, custom.causal)
    floats = [a.name for a in source.launches[0].args if a.kind is ArgKind.FLOAT]
    assert floats == ["scale"]
    assert compile_source(source, GPUS[gpu].arch).image


def test_bias_on_hopper_names_the_back_end_that_reads_it() -> None:
    with pytest.raises(PlanError, match=r"reads no bias tensor \(B\); use --backend mma_sync"):
        emitted(BIAS, "h200", Backend.WGMMA, True)


def test_bias_elsewhere_than_its_scores_is_refused() -> None:
    moved = BIAS.replace("[L = block_idx, D = i]", "[L = i, D = block_idx]")
    with pytest.raises(PlanError, match="B is not copied where its scores are"):
        emitted(moved, "a100", Backend.MMA_SYNC, True)


def test_bias_without_a_vanishing_operator_is_refused() -> None:
    linear = ALIBI.replace("  Compute Softmax S\n", "")
    with pytest.raises(PlanError, match="a bias on S needs a Softmax"):
        emitted(linear, "a100", Backend.MMA_SYNC, True)


def test_mask_before_a_softcap_goes_behind_it() -> None:
    text = (EXAMPLES / "softcap.tl").read_text() + "Param softcap = 30\n"
    mask, cap = "  Compute Mask S, causal\n", "  Compute Softcap S, softcap\n"
    swapped = text.replace(cap + mask, mask + cap)
    assert swapped != text
    emit = emitted(swapped, "a100", Backend.MMA_SYNC, True).text
    assert emit.index("Compute Softcap S") < emit.index("keys of tile i that a row must not see")


@pytest.mark.parametrize("gpu", ["a100", "h200"])
def test_a_parameter_in_the_arithmetic_of_a_cap_is_its_number(gpu: str) -> None:
    text = "Param twice = 7\n" + (EXAMPLES / "softcap.tl").read_text()
    cap = "Compute Softcap S, softcap"
    text = text.replace(cap, "Compute Softcap S, twice / 2")
    backend = Backend.WGMMA if gpu == "h200" else Backend.MMA_SYNC
    emit = emitted(text, gpu, backend, True).text
    assert "= 4.f * (1.f - " in emit and " / 4.f) * " in emit  # whole numbers are divided up
    assert "twice" not in emit.replace("twice=7", "")


NUMBERS = "Param window_left = {left}\nParam sinks = {sinks}\n"


def _python(line: str) -> str:
    """An emitted bound as Python: division of non-negative whole numbers rounds down."""
    return re.sub(r"\bint const |;.*", "", line).replace(" / ", " // ")


@pytest.mark.parametrize(
    ("gpu", "backend", "changes"),
    [*((*card, {}) for card in CARDS), ("h200", Backend.WGMMA, {"cluster": 2})],
)
@pytest.mark.parametrize(("left", "sinks"), [(100, 4), (0, 1), (1000, 70), (63, 200), (5, 0)])
def test_a_window_with_sinks_visits_every_visible_tile_once(
    gpu: str, backend: Backend, changes: dict[str, int], left: int, sinks: int
) -> None:
    """Blocks of a cluster visit the tiles that the rows of any of them see."""
    numbers = NUMBERS.format(left=left, sinks=sinks)
    text = emitted(SINKS + numbers, gpu, backend, False, **changes).text
    names = ("i_sinks", "i_jump", "i_lo", "i_hi")
    lines = {n: next(x for x in text.split("\n") if f"int const {n} = " in x) for n in names}
    rows, columns = (
        int(re.search(pattern, text)[1])  # type: ignore[index]
        for pattern in (r"row_blocks = ceil_div\(M, (\d+)\)", r"i_sinks = .*, (\d+)\)\);")
    )
    ceil_div: Callable[[int, int], int] = lambda a, b: -(-a // b)  # noqa: E731
    for m, n in ((1, 700), (300, 300), (257, 777), (500, 130)):
        for row0 in range(0, m, rows):
            at = {"M": m, "N": n, "row0": row0, "diagonal": n - m, "ceil_div": ceil_div}
            at |= {"min": min, "max": max, "cluster_row0": row0}
            for name in names:
                exec(_python(lines[name]).strip(), at)
            steps = range(at["i_lo"], at["i_hi"])
            tiles = [t if t < at["i_sinks"] else t + at["i_jump"] for t in steps]
            assert len(set(tiles)) == len(tiles)
            seen = {
                key // columns
                for row in range(row0, min(row0 + rows, m))
                for key in range(0, min(n, row + n - m + 1))
                if key >= row + n - m - left or key < sinks
            }
            assert seen <= set(tiles), (m, n, row0)
            assert len(tiles) <= len(seen) + 1
