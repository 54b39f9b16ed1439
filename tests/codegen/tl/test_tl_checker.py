"""Each kind of fault is caught with its line and a remedy, all of them in one pass."""

from __future__ import annotations

import pytest

from codegen.tl.bind import bind
from codegen.tl.binding import assemble
from codegen.tl.checker import check, repaired
from codegen.tl.parser import parse, read
from codegen.tl.smem import smem_bytes as program_smem_bytes
from codegen.tl.source import Diagnostic
from llm_proposer.builtin import programs, sketches
from space.constraints import smem_bytes
from space.gpu import gpu_named
from space.params import Point
from space.variant import DType, Problem

CODE = """\
Param BM = 128
Param BN = 64
Allocate Q in global (M, D) with offset q_offset
Allocate K in global (N, D) with offset k_offset
Allocate V in global (N, D) with offset v_offset
Allocate O in global (M, D) with offset o_offset
Allocate S in register (BM, BN) as f32
Allocate O in register (BM, D) as f32
Copy Q (BM, D) in coordinate [L = block_idx] from global to shared
for i = 0:N / BN
  Copy K (BN, D) in coordinate [L = i] from global to shared
  Compute GEMM Q, K.T and get S
  Compute Scale S, scale
  Compute Mask S, causal
  Compute Softmax S
  Copy V (BN, D) in coordinate [L = i] from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
end
Copy O (BM, D) in coordinate [L = block_idx] from register to global
"""
SKETCH = sketches("mha", True)["forward"]
PROBLEM = Problem("mha", DType.FP16, 128, 128, True)


def found(
    text: str, problem: Problem | None = None, point: Point | None = None
) -> tuple[Diagnostic, ...]:
    reading = read(text)
    assert reading.diagnostics == ()
    return check(reading.sketch, problem, None, point)


def changed(text: str, *pairs: tuple[str, str]) -> str:
    for before, after in pairs:
        assert before in text, before
        text = text.replace(before, after)
    return text


def line_of(text: str, part: str) -> int:
    return next(n for n, line in enumerate(text.splitlines(), 1) if part in line)


RESHAPE = "  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)\n"
COPY_K = "  Copy K (BN, D) in coordinate [L = i] from global to shared\n"
COPY_V = "  Copy V (BN, D) in coordinate [L = i] from global to shared\n"
STORE = "Copy O (BM, D) in coordinate [L = block_idx] from register to global\n"
SOFTMAX = "  Compute Softmax S\n"


@pytest.mark.parametrize("text", [CODE, SKETCH])
def test_the_program_before_each_change_is_clean(text: str) -> None:
    assert found(text) == ()
    assert found(text, PROBLEM, Point.of({"BM": 128, "BN": 64})) == ()


FAULTS = [
    # 1 Reshape
    ([(RESHAPE, "")], "missing-reshape", "GEMM S, V", "Reshape S from (MMA_C, MMA_M, MMA_N)"),
    ([("from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)", "from accumulator to operand")],
     "bad-fragment", "Reshape S", "(MMA_A, MMA_M, MMA_N_new)"),
    ([("(MMA_C, MMA_M, MMA_N) to", "(MMA_A, MMA_M, MMA_N) to")], "bad-fragment", "Reshape S",
     "Reshape S from (MMA_C"),
    # 2 transposes and shapes
    ([("Q, K.T", "Q, K")], "gemm-shapes", "GEMM Q, K", "Compute GEMM Q, K.T and get S"),
    ([("S, V", "S, V.T")], "gemm-shapes", "GEMM S, V.T", "Compute GEMM S, V and accumulate O"),
    ([("Q, K.T", "Q.T, K.T")], "gemm-shapes", "GEMM Q.T", "Compute GEMM Q, K.T and get S"),
    ([("Q, K.T", "K, Q.T")], "gemm-shapes", "GEMM K, Q.T", ""),
    ([("Allocate S in register (BM, BN)", "Allocate S in register (BN, BM)")], "gemm-shapes",
     "GEMM Q, K.T", "Give S the shape of the product"),
    ([("Allocate S in", "Allocate K in shared (BM, D)\nAllocate S in")], "shape-mismatch",
     "Copy K", "Copy K (BM, D)"),
    # 3 use before Copy or Allocate, wrong levels
    ([(COPY_K, "")], "still-global", "GEMM Q, K.T", "Copy K (BN, D) in coordinate [L = i]"),
    ([(COPY_V, ""), ("accumulate O\n", f"accumulate O\n{COPY_V}")], "use-before-copy",
     "GEMM S, V", "Move the Copy of V above"),
    ([("Allocate S in register (BM, BN) as f32\n", "")], "undeclared-output", "GEMM Q, K.T",
     "Allocate S in register (BM, BN)"),
    ([("from register to global", "from shared to global")], "wrong-level",
     "from shared to global", "from register"),
    ([("Compute Softmax S", "Compute Softmax T")], "undefined", "Softmax T", "Compute it above"),
    ([(SOFTMAX, "  Compute Exp P\n"), ("as f32\n", "as f32\nAllocate P in register (BM, BN)\n")],
     "never-written", "Exp P", "Compute Fill P, 0"),
    ([("Copy Q (BM, D) in coordinate [L = block_idx] from global to shared",
       "Copy Q (BM, D) in coordinate [L = block_idx] from global to global")], "same-level",
     "from global to global", "another memory"),
    # 4 global copies
    ([("Allocate V in global (N, D) with offset v_offset\n", "")], "global-not-allocated",
     "Copy V", "Allocate V in global (N, D) with offset v_offset"),
    ([("(BN, D) in coordinate [L = i] from global to shared\n  Compute GEMM Q",
       "(BN, D) from global to shared\n  Compute GEMM Q")], "missing-coordinate", "Copy K",
     "in coordinate [L = i]"),
    ([("Copy V (BN, D) in coordinate [L = i]", "Copy V (BN, D) in coordinate [L = j]")],
     "unknown-coordinate", "L = j", "variable of a loop"),
    ([("Copy V (BN, D) in", "Copy V in")], "missing-shape", "Copy V", "Copy V (BN, D)"),
    # 5 accumulators and outputs
    ([("Allocate O in register (BM, D) as f32\n", "")], "uninitialised-accumulator", "GEMM S, V",
     "Allocate O in register (BM, D)"),
    ([(STORE, "")], "never-stored", "GEMM S, V", "Copy O (BM, D)"),
    ([("with offset o_offset\n", "with offset o_offset\nAllocate L in global (M, D)\n")],
     "never-moved", "Allocate L", "Copy L"),
    # 6 softmax and masks
    ([("Compute Softmax S", "Compute Softmax Q")], "softmax-not-scores", "Softmax Q",
     "GEMM Q, K.T"),
    ([("accumulate O\n", "accumulate O\n  Compute Softmax O\n")], "softmax-not-scores",
     "Softmax O", "GEMM Q, K.T"),
    ([(SOFTMAX, SOFTMAX + "  Compute OnlineSoftmax S\n")], "softmax-twice", "OnlineSoftmax S",
     "Take one"),
    ([("  Compute Mask S, causal\n", ""), (SOFTMAX, SOFTMAX + "  Compute Mask S, causal\n")],
     "mask-after-softmax", "Mask S", "Move the Mask above"),
    ([("S, causal", "S, diagonal")], "unknown-mask", "Mask S", "window(l, r)"),
    ([("S, causal", "S, window(128)")], "unknown-mask", "Mask S", "window(l, r)"),
    ([("  Compute Scale S, scale\n", "  Compute Scale S, scale\n  Compute Multiply S, sm_scale"
       " and get new S\n")], "scale-twice", "sm_scale", "applied once"),
    ([("  Compute Scale S, scale\n", ""), (SOFTMAX, SOFTMAX + "  Compute Scale S, scale\n")],
     "scale-after-softmax", "Scale S", "Move the scaling above"),
    # 7 parameters, atoms
    ([("Param BN = 64\n", "")], "undeclared", "Allocate S", "Param BN in"),
    ([("Param BM = 128", "Param BM = 40")], "atom", "Param BM", "multiple of 16, such as 32"),
    ([("Param BN = 64", "Param BN in {64, 72}")], "atom", "Param BN", "such as 64"),
    ([("Copy V (BN, D)", "Copy V (BN, 130)")], "atom", "Copy V", "multiple of 8, such as 128"),
    ([("0:N / BN", "0:num_tiles")], "undeclared", "num_tiles", "Param num_tiles"),
    ([("Scale S, scale", "Scale S, factor")], "undeclared", "Scale S", "Param factor"),
    ([(SOFTMAX, "  Compute Add S, bias and get new S\n" + SOFTMAX)], "undeclared", "Add S, bias",
     "Param bias"),
    # loops that do not see every key
    ([("0:N / BN", "1:N / BN")], "bound-misses-keys", "for i", "for i = 0:N / BN"),
    ([("0:N / BN", "0:block_m + 1")], "bound-misses-keys", "for i", "(block_idx + 1) * BM / BN"),
    ([("0:N / BN", "0:block_m * BM / BN")], "bound-misses-keys", "for i", "0:N / BN"),
    ([("0:N / BN", "0:(block_m + 1) * BM / BN"), ("  Compute Mask S, causal\n", "")],
     "bound-misses-keys", "for i", "Compute Mask S, causal"),
    # arguments
    ([(SOFTMAX, "  Compute Relu S, 2\n")], "extra-argument", "Relu S", "Compute Relu S"),
    ([(SOFTMAX, "  Compute RowMax S\n" + SOFTMAX)], "missing-output", "RowMax", "and get m_new"),
]  # fmt: skip


@pytest.mark.parametrize(("pairs", "code", "line", "remedy"), FAULTS)
def test_faults_of_a_tl_code(
    pairs: list[tuple[str, str]], code: str, line: str, remedy: str
) -> None:
    text = changed(CODE, *pairs)
    hits = [d for d in found(text) if d.code == code]
    assert hits, found(text)
    assert hits[0].span.line == line_of(text, line)
    assert remedy in hits[0].hint
    assert "\n" not in str(hits[0])


@pytest.mark.parametrize(
    ("pairs", "code", "line"),
    [
        ([("Q, K.T", "Q, K")], "gemm-shapes", "GEMM Q, K"),
        ([("S, V", "S, V.T")], "gemm-shapes", "GEMM S, V.T"),
        ([("  Copy K from global to shared\n", "")], "undefined", "GEMM Q, K.T"),
        ([("Copy O from register to global\n", "")], "never-stored", "GEMM S, V"),
        ([("Compute Softmax S", "Compute Softmax S\n  Compute Softmax S")], "softmax-twice", ""),
        ([("Compute Scale S, scale", "Compute Multiply distance, slope and get bias")],
         "undefined", "distance"),
        ([("0:N", "0:block_idx")], "bound-misses-keys", "for i"),
        ([("  Copy V from global to shared\n", ""), ("accumulate O\n", "accumulate O\n  Copy V from"
          " global to shared\n")], "use-before-copy", "GEMM S, V"),
        ([("Copy K from global to shared\n", "Copy K from global to shared\n  Compute Exp S\n")],
         "use-before-definition", "Exp S"),
        ([("Copy K from", "Copy K in coordinate [X = i] from")], "unknown-axis", "Copy K"),
    ],
)  # fmt: skip
def test_faults_of_a_sketch(pairs: list[tuple[str, str]], code: str, line: str) -> None:
    text = changed(SKETCH, *pairs)
    hits = [d for d in found(text, PROBLEM, Point.of({"BM": 64, "BN": 64})) if d.code == code]
    assert hits
    assert not line or hits[0].span.line == line_of(text, line)


def test_a_program_that_computes_nothing() -> None:
    assert [d.code for d in found("Param BM = 64")] == ["no-output"]


def test_a_sketch_may_leave_these_open() -> None:
    text = changed(SKETCH, (RESHAPE, ""), ("  Compute Scale S, scale\n", ""))
    text = changed(text, ("Copy O", "Compute Divide O, l and get new O\nCopy O"))
    assert found(text) == ()


def test_all_eight_kinds_in_one_pass() -> None:
    text = changed(
        CODE,
        (RESHAPE, ""),  # 1
        ("Q, K.T", "Q, K"),  # 2
        (COPY_V, ""),  # 3
        ("[L = block_idx] from global", "[L = tile] from global"),  # 4
        (STORE, ""),  # 5
        (SOFTMAX, SOFTMAX + "  Compute Mask S, causal\n"),  # 6
        ("Param BM = 128", "Param BM = 100"),  # 7
        ("for i", "load_tile(Q)\nfor i"),  # 8
    )
    with pytest.raises(Exception, match="load_tile") as caught:
        parse(text)
    diagnostics: tuple[Diagnostic, ...] = caught.value.diagnostics  # type: ignore[attr-defined]
    assert {d.code for d in diagnostics} == {
        "missing-reshape", "gemm-shapes", "still-global", "unknown-coordinate", "never-stored",
        "mask-after-softmax", "atom", "invented-statement",
    }  # fmt: skip
    assert [d.span.line for d in diagnostics] == sorted(d.span.line for d in diagnostics)


def test_one_fault_is_one_message() -> None:
    for pairs, code, _, _ in FAULTS:
        codes = [d.code for d in found(changed(CODE, *pairs))]
        # an output of the wrong shape fails where it is made and where it is used
        assert codes.count(code) <= (2 if code == "gemm-shapes" else 1), (code, codes)
        assert len(set(codes)) <= 2, (code, codes)


# ---- against a problem, a point and a GPU --------------------------------------------------------


def test_masks_and_head_dims_are_those_of_the_problem() -> None:
    full = Problem("mha", DType.FP16, 128, 128, False)
    assert [d.code for d in found(CODE, full)] == ["mask-not-asked"]
    unmasked = changed(CODE, ("  Compute Mask S, causal\n", ""))
    assert [d.code for d in found(unmasked, PROBLEM)] == ["mask-missing"]
    assert found(unmasked, full) == ()
    sized = changed(CODE, ("Param BN = 64\n", "Param BN = 64\nParam D = 64\n"))
    assert found(sized) == ()
    assert {d.code for d in found(sized, PROBLEM)} == {"other-head-dim"}


def test_a_point_off_the_sketch_is_refused() -> None:
    (fault,) = found(CODE, PROBLEM, Point.of({"BM": 64, "BN": 64}))
    assert (fault.code, fault.span.line) == ("not-a-choice", 1)
    assert "BM = 64 is asked for, and the sketch allows 128" in fault.message


def test_shared_memory_says_bytes_wanted_there_and_which_buffers() -> None:
    text = changed(CODE, ("Param BN = 64\n", "Param BN = 64\nParam stages = 3\n"))
    (fault,) = check(parse(text), PROBLEM, gpu_named("l40s"))
    assert fault.code == "shared-memory"
    assert "131072 bytes of shared memory wanted, 101376 there on l40s" in fault.message
    assert "Q 32768, K 3 x 16384, V 3 x 16384" in fault.message
    assert "fewer stages" in fault.hint
    assert check(parse(text), PROBLEM, gpu_named("a100")) == ()


def test_shared_memory_without_a_problem_comes_from_the_code() -> None:
    text = changed(CODE, ("Param BN = 64\n", "Param BN = 64\nParam D = 256\n"))
    assert [d.code for d in check(parse(text), None, gpu_named("t4"))] == ["shared-memory"]
    assert check(parse(CODE), None, gpu_named("t4")) == ()  # D has no number: nothing to say


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (80, 80), (64, 64)])
def test_shared_memory_is_what_the_space_says(dims: tuple[int, int]) -> None:
    problem = Problem("mla", DType.FP16, *dims, True)
    for swizzle in (0, 32):
        for stages in (1, 2):
            for q in (0, 1):
                for p in (0, 1):
                    point = Point.of(
                        {"BM": 64, "BN": 32, "warps": 4, "stages": stages, "swizzle": swizzle,
                         "q_in_registers": q, "p_in_registers": p, "epilogue_smem": q}
                    )  # fmt: skip
                    program = bind(parse(SKETCH), problem, point)
                    wanted = program_smem_bytes(program, program.kernels[0])
                    assert wanted == smem_bytes(problem, point)


# ---- schedules -----------------------------------------------------------------------------------

PIPELINED = changed(
    CODE,
    (COPY_K, "  Wait full[i % 2]\n  TMA" + COPY_K[1:]),
    ("  Compute GEMM S, V and", "  WGMMA Wait 0\n  Compute GEMM S, V and"),
    ("accumulate O\n", "accumulate O\n  Arrive empty[i % 2]\n"),
    ("Allocate S", "Allocate full in barrier (2)\nAllocate S"),
)


def test_schedules_are_refused_in_one_message_and_the_dataflow_is_offered() -> None:
    sketch = parse(PIPELINED)
    (fault,) = check(sketch)
    assert fault.code == "schedule"
    assert fault.span.line == line_of(PIPELINED, "in barrier")
    assert "Param stages" in fault.hint and "Param overlap" in fault.hint
    offered = repaired(sketch)
    assert offered is not None
    assert parse(offered) == parse(CODE)


def test_warp_roles_are_refused_too() -> None:
    text = changed(CODE, ("for i", "if warpgroup == 0\nfor i"), ("end\n", "end\nend\n"))
    sketch = parse(text)
    assert [d.code for d in check(sketch)] == ["schedule"]
    offered = repaired(sketch)
    assert offered is not None and parse(offered) == parse(CODE)


def test_nothing_is_offered_where_nothing_was_refused_or_more_is_wrong() -> None:
    assert repaired(parse(CODE)) is None
    assert repaired(parse(changed(PIPELINED, ("Q, K.T", "Q, K")))) is None


def test_other_faults_of_a_refused_program_are_still_found() -> None:
    text = changed(PIPELINED, ("Q, K.T", "Q, K"), (RESHAPE, ""))
    assert {d.code for d in check(parse(text))} == {"schedule", "gemm-shapes", "missing-reshape"}


def test_assembling_what_was_offered_gives_the_same_program() -> None:
    offered = repaired(parse(PIPELINED))
    assert offered is not None
    point = Point.of({"BM": 128, "BN": 64})
    one, other = (assemble(parse(t), PROBLEM, point) for t in (offered, CODE))
    assert one.kernels == other.kernels


def test_every_hand_written_program_is_clean_against_its_problem() -> None:
    point = Point.of({"BM": 64, "BN": 32})
    for causal in (False, True):
        problem = Problem("mha", DType.FP16, 64, 64, causal)
        for name, text in programs(causal).items():
            assert check(parse(text), problem, gpu_named("t4"), point) == (), name
