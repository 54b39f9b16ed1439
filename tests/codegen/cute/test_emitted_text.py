"""The emitted text: golden files, determinism, and that different dataflow gives other kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from codegen.cute import translate
from codegen.errors import PlanError
from codegen.kernel import ArgKind, KernelSource
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import programs, sketches
from llm_proposer.seeds import seeds
from space.constraints import Backend, smem_bytes, space_for
from space.gpu import GPUS
from space.legal import legal_points
from space.params import Point
from space.variant import DType, Phase, Problem

GOLDEN = Path(__file__).parents[2] / "golden" / "cute"


def seed(problem: Problem, gpu: str, backend: Backend, nth: int = 0) -> Point:
    space = space_for(problem, GPUS[gpu], backend)
    return seeds(problem, GPUS[gpu], space)[nth]


def emitted(
    text: str, problem: Problem, gpu: str, backend: Backend = Backend.AUTO, **changes: int
) -> KernelSource:
    point = seed(problem, gpu, backend).replace(**changes)
    return translate(bind(parse(text), problem, point), problem, GPUS[gpu])


def mha(head_dim: int = 64, causal: bool = False, dtype: DType = DType.FP16) -> Problem:
    return Problem("mha", dtype, head_dim, head_dim, causal)


GOLDENS = {
    "forward-causal-sm80": ("forward", mha(64, True), "a100", {}),
    "forward-causal-sm75": ("forward", mha(64, True), "t4", {}),
    "forward-d72-peeled-sm89": ("forward", mha(72, True), "l40s", {"peel": 1, "stages": 2}),
    "forward-causal-sm90": ("forward", mha(128, True, DType.BF16), "h200", {}),
    "gemm_epilogue-sm80": ("gemm_epilogue", mha(64), "a100", {}),
    "split_kv-sm80": ("split_kv", mha(64), "a100", {}),
    "forward-cluster-sm90": ("forward", mha(128, False, DType.BF16), "h200", {"cluster": 2}),
    "forward-d96-narrow-sm90": ("forward", mha(96, True, DType.BF16), "h200", {"swizzle": 64}),
    "forward-packed-sm90": (
        "forward", Problem("gqa", DType.BF16, 128, 128, True), "h200", {"pack_heads": 4},
    ),
    "sigmoid-sm90": ("sigmoid", mha(64), "h200", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDENS)
def test_text_is_the_golden_one(name: str, request: pytest.FixtureRequest) -> None:
    program, problem, gpu, changes = GOLDENS[name]
    text = emitted(programs(problem.causal)[program], problem, gpu, **changes).text
    path = GOLDEN / f"{name}.cu"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text(), f"{name} changed; pytest --update-golden shows how in git"


@pytest.mark.parametrize("gpu", ["t4", "a100", "l40s", "h200"])
def test_same_program_same_bytes(gpu: str) -> None:
    text = sketches("mha", True)["forward"]
    assert emitted(text, mha(64, True), gpu) == emitted(text, mha(64, True), gpu)


def test_a_point_from_before_there_was_a_choice_gives_the_same_kernel() -> None:
    problem, text = mha(96), parse(sketches("mha", False)["forward"])
    point = seed(problem, "h200", Backend.AUTO)
    later = {"cluster": 1, "swizzle": 128, "pack_heads": 1}
    assert {name: point[name] for name in later} == later
    older = Point(tuple(i for i in point.items if i[0] not in later))
    now, then = (translate(bind(text, problem, p), problem, GPUS["h200"]) for p in (point, older))
    assert now == then


def test_blocks_of_a_cluster_share_what_they_load() -> None:
    text = sketches("mha", False)["forward"]
    one, two = (emitted(text, mha(128), "h200", cluster=c).launches[0] for c in (1, 2))
    boxes = [{a.name: a.box for a in x.args if a.kind is ArgKind.TENSOR_MAP} for x in (one, two)]
    assert boxes[0]["K"] == (64, 128) and boxes[1]["K"] == boxes[1]["V"] == (64, 64)
    assert boxes[0]["Q"] == boxes[1]["Q"]
    assert (one.cluster, two.cluster) == (1, 2)
    assert two.grid[0].tile == 2 * one.grid[0].tile
    assert two.smem_bytes == one.smem_bytes


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_of_a_cluster_stores_its_own_rows_from_registers(causal: bool) -> None:
    """Rows of O are found by block_idx, which must be the block's own and not its cluster's."""
    text = emitted(
        sketches("mha", causal)["forward"], mha(128, causal), "h200", cluster=2, out_buffer=2,
        persistent=1,
    ).text  # fmt: skip
    assert text.count("int const block_idx = first_block + cluster_rank;") == 2  # of both roles
    assert text.count("int const row0 = block_idx * 128;") == 2
    assert "int const row = (block_idx) * 128 + warp" in text


def test_splits_that_nobody_counts_are_refused() -> None:
    """Found by the fuzzer: a decode program asked of prefill, where no launch chooses."""
    text = sketches("gqa", False, Phase.DECODE)["decode"]
    with pytest.raises(PlanError, match="num_splits is chosen at each launch of a decode kernel"):
        emitted(text, mha(128), "a100")


def test_a_cluster_that_draws_tickets_is_not_planned() -> None:
    with pytest.raises(PlanError, match="take their tiles together; use persistent = 0 or 1"):
        emitted(sketches("mha", True)["forward"], mha(128, True), "h200", cluster=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swizzle": 0}, "swizzle=0 is none that TMA and wgmma know: 128, 64, 32"),
        ({"cluster": 3}, "cluster=3: 1 to 8 blocks that each load a multiple of 8 of the 128 rows"),
        ({"cluster": 0}, "cluster=0: 1 to 8 blocks"),
    ],
)
def test_panels_and_clusters_that_no_card_has_are_refused(
    changes: dict[str, int], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        emitted(sketches("mha", False)["forward"], mha(128), "h200", **changes)


def code(source: KernelSource) -> str:
    """The text without comments, in one spelling of white space."""
    return re.sub(r"\s+", " ", re.sub(r"//.*", "", source.text))


@pytest.mark.parametrize("other", ["q_in_registers", "v_early"])
def test_other_dataflow_is_another_kernel(other: str) -> None:
    texts = sketches("mha", False)
    assert code(emitted(texts[other], mha(), "a100")) != code(
        emitted(texts["forward"], mha(), "a100")
    )


@pytest.mark.parametrize("gpu", ["a100", "h200"])
def test_a_softmax_spelt_by_hand_is_the_same_kernel(gpu: str) -> None:
    by_hand = code(emitted(programs()["explicit_softmax"], mha(), gpu))
    stated = code(emitted(programs()["forward"], mha(), gpu))
    # the hand-spelt program calls the scores P from the exponential on
    assert re.sub(r"\bP(?=\b|_)", "S", by_hand) == re.sub(r"\bP(?=\b|_)", "S", stated)


def test_the_statement_stands_above_what_it_became() -> None:
    lines = emitted(sketches("mha", True)["forward"], mha(64, True), "a100").text.splitlines()
    stated = [line.strip() for line in lines if line.strip().startswith("// TL")]
    for statement in ("Compute GEMM Q, K.T and get S", "Compute Softmax S", "Copy V"):
        assert any(statement in line for line in stated), statement


@pytest.mark.parametrize("gpu", ["t4", "a100", "l40s", "h200"])
@pytest.mark.parametrize("backend", [Backend.MMA_SYNC, Backend.AUTO])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (72, 72), (192, 128), (256, 256)])
def test_planned_shared_memory_is_what_the_space_predicts(
    gpu: str, backend: Backend, dims: tuple[int, int]
) -> None:
    problem = Problem("mla", DType.FP16, *dims, True)
    legal = legal_points(problem, GPUS[gpu], space_for(problem, GPUS[gpu], backend))
    text = parse(sketches("mha", True)["forward"])
    step = max(1, len(legal.cores) // 12)
    rest = {p.name: p.choices[0] for p in legal.space.params}
    for core in legal.cores[::step]:
        values = rest | core.as_dict()
        point = Point(tuple((n, values[n]) for n in legal.space.names))
        source = translate(bind(text, problem, point), problem, GPUS[gpu])
        assert source.launches[0].smem_bytes == smem_bytes(problem, point), point.key


def test_names_that_c_plus_plus_or_the_frame_uses_are_changed() -> None:
    text = programs()["explicit_softmax"].replace("alpha", "row").replace("l_cur", "S_max")
    source = emitted(text.replace("Compute Exp P", "Compute Exp2 P"), mha(), "a100")
    assert "float row_[" in source.text and "float row[" not in source.text


@pytest.mark.parametrize("gpu", ["a100", "h200"])
def test_a_scalar_with_a_name_of_the_frame_is_refused(gpu: str) -> None:
    text = programs(False)["forward"]
    capped = text.replace("  Compute Softmax", "  Compute Softcap S, cap\n  Compute Softmax", 1)
    assert "float cap" in emitted(capped, mha(), gpu).text
    with pytest.raises(PlanError, match="a scalar cannot be called n: the kernel uses the name"):
        emitted(capped.replace("S, cap", "S, n"), mha(), gpu)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Compute Softcap S, 1e-5", "1e-05f * ("), ("Compute Softcap S, 30", "30.f * ("),
        ("Compute Softcap S, 7 / 2", "4.f * ("), ("Compute Add S, 2", " + 2.f;"),
        ("Compute Add S, 1e-5", " + 1e-05f;"),
        ("Compute Add S, 0.5", " + 0.5f;"),
    ],
)  # fmt: skip
def test_numbers_are_floats_of_cxx(line: str, said: str) -> None:
    """Neither `1e-05.f` nor `2f` is one, and `7 / 2` is 4 in TL and 3 in C++."""
    text = sketches("mha", False)["forward"]
    text = text.replace("  Compute Softmax", f"  {line}\n  Compute Softmax", 1)
    assert said in emitted(text, mha(), "a100").text
