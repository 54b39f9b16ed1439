"""What bind guarantees of a bound program, whatever the sketch left open or spelt differently."""

from __future__ import annotations

import numpy as np
import pytest
from tl_reference import attention, hidden_by, random_inputs

from codegen.errors import TLError
from codegen.tl.ast import (
    Arith,
    BinOp,
    Call,
    Copy,
    Custom,
    Elem,
    For,
    Gemm,
    If,
    Memory,
    Name,
    Num,
    Program,
    Reshape,
    Rows,
    Stmt,
    Tensor,
    Tile,
    walk,
)
from codegen.tl.bind import bind, sketch_choices
from codegen.tl.interpreter import run
from codegen.tl.parser import parse
from codegen.tl.printer import header
from llm_proposer.builtin import programs, sketches
from space.params import Point
from space.variant import DType, Problem

POINT = Point.of({"BM": 128, "BN": 64, "warps": 4, "stages": 2})
CAUSAL = Problem("mha", DType.FP16, 128, 128, True)
FULL = Problem("mha", DType.FP16, 128, 128, False)
FORWARD = sketches("mha", True)["forward"]
UNMASKED = sketches("mha", False)["forward"]


def body(text: str, problem: Problem = CAUSAL, point: Point = POINT) -> tuple[Stmt, ...]:
    return bind(parse(text), problem, point).kernels[0].body


def lines(program: Program) -> list[str]:
    return [header(s) for k in program.kernels for s in walk(k.body)]


def test_the_canonical_program() -> None:
    program = bind(parse(FORWARD), CAUSAL, POINT)
    assert lines(program) == [
        "Copy Q (128, 128) in coordinate [L = block_idx] from global to shared",
        "Compute Fill O, 0.0",
        "for i = 0:N / 64",
        "Copy K (64, 128) in coordinate [L = i] from global to shared",
        "Compute GEMM Q, K.T and get S",
        "Compute Scale S, scale",
        "Compute Mask S, causal",
        "Compute Softmax S",
        "Copy V (64, 128) in coordinate [L = i] from global to shared",
        "Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)",
        "Compute GEMM S, V and accumulate O",
        "Compute Normalize O, S",
        "Copy O (128, 128) in coordinate [L = block_idx] from register to global",
    ]
    (kernel,) = program.kernels
    assert kernel.tensors == (
        Tensor("Q", Rows.QUERY, 128, Elem.OPERAND, False),
        Tensor("K", Rows.KEY, 128, Elem.OPERAND, False),
        Tensor("V", Rows.KEY, 128, Elem.OPERAND, False),
        Tensor("O", Rows.QUERY, 128, Elem.OPERAND, True),
    )
    assert set(kernel.tiles) == {
        Tile("Q", Memory.SHARED, 128, 128, Elem.OPERAND),
        Tile("K", Memory.SHARED, 64, 128, Elem.OPERAND),
        Tile("V", Memory.SHARED, 64, 128, Elem.OPERAND),
        Tile("S", Memory.REGISTER, 128, 64, Elem.F32),
        Tile("O", Memory.REGISTER, 128, 128, Elem.F32),
    }
    assert program.params == (("BM", 128), ("BN", 64), ("stages", 2), ("warps", 4))
    assert program.scalars == ("scale",)
    assert program.lines[0] == "Copy Q from global to shared"


def test_spans_are_the_sketch_s_own_lines() -> None:
    text = f"Sure:\n\n```\n{FORWARD}```"
    program = bind(parse(text), CAUSAL, POINT)
    for stmt in walk(program.kernels[0].body):
        assert 4 <= stmt.span.line <= 15, stmt
    softmax = next(s for s in walk(program.kernels[0].body) if getattr(s, "op", "") == "Softmax")
    assert program.lines[softmax.span.line - 1].strip() == "Compute Softmax S"


@pytest.mark.parametrize("name", list(programs()))
def test_nothing_is_left_open(name: str) -> None:
    program = bind(parse(programs()[name]), FULL, POINT)
    for kernel in program.kernels:
        for stmt in walk(kernel.body):
            assert isinstance(stmt, Copy | Gemm | Arith | Custom | Reshape | For | If)
            if isinstance(stmt, Copy) and stmt.src is not None:
                assert all(isinstance(e, Num) and e.value > 0 for e in stmt.shape)
                assert len(stmt.shape) == 2
            if isinstance(stmt, Copy) and Memory.GLOBAL in (stmt.src, stmt.dst):
                assert stmt.coords[0].axis == "L"
                assert kernel.tensor(stmt.name) is not None
            for tile in kernel.tiles:
                assert tile.rows > 0 and tile.columns > 0
            written = getattr(stmt, "out", None)
            if isinstance(written, str):
                assert kernel.tile(written, Memory.REGISTER) is not None


@pytest.mark.parametrize(
    "spelling",
    ["block_idx", "block_m", "m_block", "bx", "blockIdx.x", "head_block", "pid", "block_row"],
)
def test_the_row_block_has_one_name(spelling: str) -> None:
    text = FORWARD.replace("Copy Q from", f"Copy Q in coordinate [L = {spelling}] from")
    text = text.replace("0:N", f"0:({spelling} + 1) * BM / BN")
    assert body(text) == body(FORWARD)


@pytest.mark.parametrize(
    "bound", ["N", "N / BN", "seq_len / BN", "ceil(N / BN)", "(N + BN - 1) / BN", "Tc", "64",
              "num_blocks", "(block_m + 1) * BM / BN", "min(N / BN, (bx + 1) * BM / BN)"],
)  # fmt: skip
def test_a_loop_over_keys_covers_them_all(bound: str) -> None:
    loop = next(s for s in body(FORWARD.replace("0:N", f"0:{bound}")) if isinstance(s, For))
    assert (loop.lo, loop.hi) == (Num(0), BinOp("/", Name("N"), Num(64)))


@pytest.mark.parametrize(
    "scaling",
    [
        "",
        "  Compute Scale S, scale\n",
        "  Compute Scale S\n",
        "  Compute Multiply S, scale and get new S\n",
        "  Compute Multiply S, softmax_scale and get S\n",
        "  Compute Multiply S, sm_scale\n",
        "  Compute Multiply scale, S and get new S\n",
        "  Compute Multiply S, scale_log2 and get new S\n",
        "  Compute Multiply S, 0.08838834764831845 and get new S\n",
        "  Compute Divide S, sqrt_d and get new S\n",
        "  Compute Multiply Q, scale and get new Q\n",
    ],
)
def test_the_scale_is_applied_once_behind_the_product(scaling: str) -> None:
    text = FORWARD.replace("  Compute Scale S, scale\n", scaling)
    assert body(text) == body(FORWARD)


def test_a_scale_that_does_not_commute_stays_where_it_is() -> None:
    text = FORWARD.replace(
        "  Compute Scale S, scale\n",
        "  Compute Softcap S, 3\n  Compute Multiply S, scale and get new S\n",
    )
    ops = [s.op for s in walk(body(text)) if isinstance(s, Custom)]
    assert ops == ["Fill", "Softcap", "Scale", "Mask", "Softmax", "Normalize"]


@pytest.mark.parametrize(
    "ending",
    [
        "Copy O from register to global\n",
        "Compute Divide O, l and get new O\nCopy O from register to global\n",
        "Compute Divide O, row_sum\nCompute Normalize O, S\nCopy O from register to global\n",
        "Compute Divide O, l and get O_final\nCopy O_final from register to global\n",
        "Copy O from register to shared\nCopy O from shared to global\n",
        "Copy O in coordinate [L = block_idx] from register to global\n",
    ],
)
def test_the_output_is_divided_once_and_stored_once(ending: str) -> None:
    text = FORWARD.replace("Copy O from register to global\n", ending)
    assert body(text) == body(FORWARD)


def test_rescaling_beside_a_softmax_is_implied() -> None:
    said = "  Compute Softmax S\n  Compute Rescale O\n  Compute Multiply O, alpha and get new O\n"
    assert body(FORWARD.replace("  Compute Softmax S\n", said)) == body(FORWARD)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Compute Softmax S\n", "Compute Softmax S and get P\n"),
        ("Compute Softmax S\n", "Compute Softmax S\n  Compute Cast S and get P\n"),
        ("Compute Softmax S\n", "Compute Softmax S\n  Copy S to P\n"),
    ],
)
def test_a_result_under_another_name_is_the_same_tile(before: str, after: str) -> None:
    text = FORWARD.replace(before, after).replace("GEMM S, V", "GEMM P, V")
    assert body(text.replace("Reshape S", "Reshape P")) == body(FORWARD)


def test_reshapes_are_filled_in_right_before_the_product() -> None:
    reshape = next(line for line in FORWARD.splitlines(True) if "Reshape" in line)
    assert body(FORWARD.replace(reshape, "")) == body(FORWARD)
    early = FORWARD.replace(reshape, "").replace("  Copy V", f"{reshape}  Copy V")
    assert body(early) == body(FORWARD)


def test_scores_through_shared_memory_need_no_reshape() -> None:
    reshape = next(line for line in FORWARD.splitlines(True) if "Reshape" in line)
    program = bind(
        parse(FORWARD.replace(reshape, "  Copy S from register to shared\n")), CAUSAL, POINT
    )
    (kernel,) = program.kernels
    assert not any(isinstance(s, Reshape) for s in walk(kernel.body))
    assert kernel.tile("S", Memory.SHARED) == Tile("S", Memory.SHARED, 128, 64, Elem.OPERAND)


@pytest.mark.parametrize(
    ("mask", "causal", "expected"),
    [
        ("Mask S", True, [Name("causal")]),
        ("Mask S", False, [Name("padding")]),
        ("CausalMask S", True, [Name("causal")]),
        ("LengthMask S", False, [Name("padding")]),
        ("SlidingWindowMask S", False,
         [Call("window", (Name("window_left"), Name("window_right")))]),
        ("SlidingWindowMask S", True, [Call("window", (Name("window_left"), Num(0)))]),
        ("Mask S, window(128, 0)", False, [Call("window", (Num(128), Num(0)))]),
        ("Mask S, causal, window(64, 0)", True,
         [Name("causal"), Call("window", (Num(64), Num(0)))]),
    ],
)  # fmt: skip
def test_masks_have_one_kind_each(mask: str, causal: bool, expected: list[object]) -> None:
    text = UNMASKED.replace("  Compute Softmax", f"  Compute {mask}\n  Compute Softmax")
    found = body(text, CAUSAL if causal else FULL)
    assert [s.args[0] for s in walk(found) if isinstance(s, Custom) and s.op == "Mask"] == expected


def test_a_tensor_added_to_the_scores_is_a_bias() -> None:
    text = UNMASKED.replace(
        "  Compute Softmax",
        "  Copy bias from global to register\n  Compute Add S, bias and get new S\n"
        "  Compute Softmax",
    )
    program = bind(parse(text), FULL, POINT)
    (kernel,) = program.kernels
    assert kernel.tensor("bias") == Tensor("bias", Rows.QUERY, "N", Elem.OPERAND, False)
    assert kernel.tile("bias", Memory.REGISTER) is not None
    assert any(
        s.args == (Call("bias", (Name("bias"),)),)
        for s in walk(kernel.body)
        if isinstance(s, Custom)
    )


def test_a_scalar_loaded_from_global_is_a_run_time_number() -> None:
    text = UNMASKED.replace("for i", "Copy gate from global to register\nfor i")
    text = text.replace("Copy O", "Compute Multiply O, gate and get new O\nCopy O")
    program = bind(parse(text), FULL, POINT)
    assert program.scalars == ("scale", "gate")
    assert program.kernels[0].tensor("gate") is None


def test_params_are_numbers_and_restrict_the_search() -> None:
    text = "Param BM in {64, 128}\nParam BLOCK_N = 64\nParam num_stages = 2\nParam cap = 30\n"
    text += "Param scale = 0.125\nParam HeadDim = 128\nParam QHeads = 32\nParam seq_len = 4096\n"
    text += FORWARD.replace("  Compute Mask", "  Compute Softcap S, cap\n  Compute Mask")
    sketch = parse(text)
    assert sketch_choices(sketch) == {"BM": (64, 128), "BN": (64,), "stages": (2,)}
    program = bind(sketch, CAUSAL, POINT)
    (cap,) = [s for s in walk(program.kernels[0].body) if getattr(s, "op", "") == "Softcap"]
    assert isinstance(cap, Custom) and cap.args == (Num(30),)
    assert program.scalars == ("scale",)
    with pytest.raises(TLError, match="BN = 32 is asked for, and the sketch allows 64"):
        bind(sketch, CAUSAL, Point.of({"BM": 64, "BN": 32}))


def test_a_loop_over_row_blocks_is_the_grid() -> None:
    inner = "".join(f"  {line}\n" for line in UNMASKED.splitlines())
    assert body(f"for b = 0:M / BM\n{inner}end\n", FULL) == body(UNMASKED, FULL)
    assert body(f"for h = 0:num_heads\n{inner}end\n", FULL) == body(UNMASKED, FULL)


def test_lower_case_tensors_are_the_problem_s() -> None:
    text = UNMASKED
    for name in "QKVO":
        text = text.replace(f" {name} ", f" {name.lower()} ").replace(
            f" {name},", f" {name.lower()},"
        )
        text = text.replace(f" {name}.T", f" {name.lower()}.T").replace(
            f"accumulate {name}\n", f"accumulate {name.lower()}\n"
        )
    assert " k.T" in text and "Copy q from" in text
    assert body(text, FULL) == body(UNMASKED, FULL)


def test_results_of_splits_are_workspaces() -> None:
    program = bind(parse(programs()["split_kv"]), FULL, POINT)
    partial, combine = program.kernels
    assert partial.tensor("O_s") == Tensor(
        "O_s", Rows.QUERY, 128, Elem.F32, False, ("splits",), True
    )
    assert partial.tensor("lse_s") == Tensor(
        "lse_s", Rows.QUERY, 1, Elem.F32, False, ("splits",), True
    )
    assert combine.tensor("O") == Tensor("O", Rows.QUERY, 128, Elem.OPERAND, True)
    loop = next(s for s in partial.body if isinstance(s, For))
    assert (loop.lo, loop.hi) == (Name("split_start"), Name("split_end"))
    assert program.param("num_splits") == 2
    fills = {s.name: s.args for s in walk(partial.body) if getattr(s, "op", "") == "Fill"}  # type: ignore[union-attr]
    assert fills == {"O_s": (Num(0.0),), "l": (Num(0.0),), "m": (Num(float("-inf")),)}


def test_all_faults_are_raised_at_once() -> None:
    text = FORWARD.replace("K.T", "K").replace("  Compute Mask S, causal\n", "")
    with pytest.raises(TLError) as caught:
        bind(parse(text), CAUSAL, POINT)
    assert {d.code for d in caught.value.diagnostics} == {"gemm-shapes", "mask-missing"}


def test_a_point_without_tiles_is_refused() -> None:
    with pytest.raises(TLError, match="no value for BM"):
        bind(parse(FORWARD), CAUSAL, Point.of({"BN": 64}))


def test_persistent_state_over_a_whole_row_block_is_reset_per_block() -> None:
    program = bind(parse(UNMASKED), FULL, Point.of({"BM": 16, "BN": 16}))
    tensors = random_inputs((1, 1, 1, 50, 20, 128, 128))
    found = run(program, tensors, {"scale": 0.1}, DType.FP16, exact=True)["O"]
    np.testing.assert_allclose(found, attention(tensors, 0.1, hidden_by(50, 20)), atol=1e-12)
