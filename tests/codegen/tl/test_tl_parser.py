"""What models write around and inside TL is read; what is not TL is named with a remedy."""

from __future__ import annotations

import pytest

from codegen.errors import TLError
from codegen.tl.ast import (
    Arith,
    BinOp,
    Call,
    Coord,
    Copy,
    Custom,
    For,
    Gemm,
    If,
    Memory,
    Name,
    Num,
    Operand,
    Param,
    Reshape,
    Slice,
)
from codegen.tl.parser import parse, read
from codegen.tl.source import Diagnostic
from llm_proposer.builtin import sketches

FORWARD = sketches("mha", True)["forward"]


def faults(text: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(TLError) as caught:
        parse(text)
    return caught.value.diagnostics


def codes(text: str) -> list[str]:
    return [d.code for d in faults(text)]


@pytest.mark.parametrize(
    "text",
    [
        f"```tl\n{FORWARD}```",
        f"```\n{FORWARD}```",
        f"```TL\n{FORWARD}",  # cut off before the closing fence
        f"Here is the sketch (K is streamed):\n\n```text\n{FORWARD}```\n\nIt uses 88 KB of shared.",
        f"Here is the sketch:\n\n{FORWARD}\nThe loop runs over key tiles.",
        FORWARD.replace("\n", ".\n"),
        FORWARD.replace("\n", ";\n"),
        FORWARD.replace("\n", "   # as FlashAttention-2 does\n"),
        FORWARD.replace("\n", "  // streamed\n"),
        "\n".join(line.strip() for line in FORWARD.splitlines()),
        FORWARD.replace("\n", "\r\n"),
        FORWARD.replace("for i = 0:N", "for i in 0:N:"),
        FORWARD.replace("for i = 0:N", "for i in 0:N:").replace("end\n", ""),
        "\n".join(f"- {line}" for line in FORWARD.splitlines()),
        "\n".join(f"{n}. {line.strip()}" for n, line in enumerate(FORWARD.splitlines(), 1)),
        FORWARD.replace("Compute Softmax S", "Compute OnlineSoftmax S"),
        FORWARD.replace("Compute Mask S, causal", "Compute CausalMask S"),
        FORWARD.replace(" from global to shared", "\n      from global memory to smem"),
        FORWARD.replace("K.T", "K^T"),
        "/* FlashAttention\n   forward */\n" + FORWARD,
    ],
)
def test_all_these_are_the_same_sketch(text: str) -> None:
    assert parse(text) == parse(FORWARD)


def test_lines_are_those_of_the_reply() -> None:
    sketch = parse(f"Of course!\n\n```\n{FORWARD}```\n")
    first, loop = sketch.statements[:2]
    assert first.span.line == 4
    assert isinstance(loop, For) and loop.body[1].span.line == 7
    assert sketch.lines[first.span.line - 1] == "Copy Q from global to shared"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "Copy K (BN, D) in coordinate [L = i] from global to shared",
            Copy("K", (Name("BN"), Name("D")), (Coord("L", Name("i")),), Memory.GLOBAL,
                 Memory.SHARED),
        ),
        (
            "Copy Q in coordinate [L = blockIdx.x, D = k] from global to shared",
            Copy("Q", (), (Coord("L", Name("blockIdx.x")), Coord("D", Name("k"))), Memory.GLOBAL,
                 Memory.SHARED),
        ),
        ("Copy S_next to S", Copy("S_next", target="S")),
        ("Copy K[page] from global to shared",
         Copy("K", src=Memory.GLOBAL, dst=Memory.SHARED, index=(Name("page"),))),
        ("Compute GEMM S, KV[:, 0:DV] and accumulate O",
         Gemm(Operand("S"), Operand("KV", (Slice(), Slice(Num(0), Name("DV")))), "O", True)),
        ("Compute GEMM Q, K[i].T and get S",
         Gemm(Operand("Q"), Operand("K", (Slice(Name("i"), BinOp("+", Name("i"), Num(1))),), True),
              "S", False)),
        ("Compute Multiply S, scale and get new S", Arith("Multiply", "S", "scale", "S", True)),
        ("Compute Subtract S, -1.5 and get P", Arith("Subtract", "S", -1.5, "P")),
        ("Compute Divide O, l", Arith("Divide", "O", "l", "O", True)),
        ("Compute RowMax S and get m_new", Custom("RowMax", "S", (), "m_new")),
        ("Compute SlidingWindowMask S", Custom("Mask", "S", (Call("window", ()),))),
        ("Compute SlidingWindowMask S, 128, 0",
         Custom("Mask", "S", (Call("window", (Num(128), Num(0))),))),
        ("Compute LengthMask S", Custom("Mask", "S", (Name("padding"),))),
        ("Compute GELU S", Custom("Gelu", "S")),
        ("Compute Fill m, -inf", Custom("Fill", "m", (Num(float("-inf")),))),
        ("Param BM in {64, 128}", Param("BM", (64, 128))),
        ("Param overlap = true", Param("overlap", (), Num(1))),
        ("Param N = kv_len // BN", Param("N", (), Name("kv_len"))),  # behind `//` is a comment
        ("Param N = kv_len//BN", Param("N", (), BinOp("/", Name("kv_len"), Name("BN")))),
        ("Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)",
         Reshape("S", ("MMA_C", "MMA_M", "MMA_N"), ("MMA_A", "MMA_M", "MMA_N_new"))),
    ],
)  # fmt: skip
def test_one_statement(line: str, expected: object) -> None:
    reading = read(line)
    assert reading.diagnostics == ()
    assert reading.sketch.statements == (expected,)


def test_several_names_in_one_copy() -> None:
    statements = read("Copy a, b, c from global to register").sketch.statements
    assert [s.name for s in statements if isinstance(s, Copy)] == ["a", "b", "c"]


def test_branches_and_bounds() -> None:
    text = "for i = 0:(block_idx + 1) * BM / BN\n  if i == 0\n    Compute Exp S\n  else\n"
    text += "    Compute Relu S\n  end\nend\n"
    (loop,) = read(text).sketch.statements
    assert isinstance(loop, For) and isinstance(loop.body[0], If)
    assert loop.body[0].orelse == (Custom("Relu", "S"),)
    reach = BinOp("*", BinOp("+", Name("block_idx"), Num(1)), Name("BM"))
    assert loop.hi == BinOp("/", reach, Name("BN"))


def test_declarations_inside_a_loop_are_the_programs() -> None:
    (param, loop) = read("for i = 0:N\n  Param BM = 64\n  Compute Exp S\nend").sketch.statements
    assert isinstance(param, Param) and isinstance(loop, For)


def test_barriers_are_set_apart_from_the_dataflow() -> None:
    text = "TMA Copy K from global to shared, arrive full[i]\nWait full[i]\nWGMMA Wait 0\n"
    reading = read(text)
    assert reading.diagnostics == ()
    assert reading.sketch.statements == (Copy("K", src=Memory.GLOBAL, dst=Memory.SHARED),)
    assert [r.span.line for r in reading.sketch.refused] == [1, 2, 3]


@pytest.mark.parametrize(
    ("line", "code", "remedy"),
    [
        ("load_tile(K, smem_k, i);", "invented-statement", "Copy K (BN, D)"),
        ("mma_op(Q, K, S)", "invented-statement", "Compute GEMM Q, K.T and get S"),
        ("store_tile(O)", "invented-statement", "Copy O from register to global"),
        ("Load K from global to shared", "invented-statement", "Copy K"),
        ("__shared__ half sK[64][128];", "cuda", "TL has the statements"),
        ("cute::copy(tiled_copy, gK, sK);", "cuda", "Copy K"),
        ("S = torch.matmul(Q, K.T)", "python", "Compute GEMM Q, K.T and get S"),
        ("m_new = max(m, rowmax(S))", "python", "Compute OP NAME"),
        ('{"BM": 128, "BN": 64}', "json", "TL has the statements"),
        ("copy K from global to shared", "keyword-case", "`Copy`"),
        ("Compute CastFP8 S and get P", "unknown-operator", "`Cast`"),
        ("Compute Sofmax S", "unknown-operator", "`Softmax`"),
        ("Compute S = Q * K", "invented-statement", "Compute GEMM"),
        ("Copy K (BN, D from global to shared", "syntax", "close"),
        ("Copy K from global", "syntax", "Copy K"),
        ("Copy K from L2 to shared", "unknown-memory", "Copy K"),
        ("Compute GEMM Q, K.T", "syntax", "and get S"),
        ("Compute Multiply S, 1/8 and get S", "syntax", "Param c"),
        ("Allocate S in register", "missing-shape", "Allocate Q in global (M, D)"),
        ("Param BM in {x, 64}", "syntax", "Param BM in"),
        ("Reshape S from (MMA_C, MMA_M) to (MMA_A, MMA_M, MMA_N_new)", "bad-fragment", "Reshape S"),
        ("Compute Mask S where col > row", "unknown-clause", "causal"),
        ("Copy V from global to shared with zero fill", "unknown-clause", "give zeros"),
        ("this line tells what comes next in words", "prose", "#"),
    ],
)
def test_what_is_not_tl_is_named_with_a_remedy(line: str, code: str, remedy: str) -> None:
    body = FORWARD.splitlines()
    text = "\n".join([*body[:2], line, *body[2:]])
    found = [d for d in read(text).diagnostics if d.span.line == 3]
    assert [d.code for d in found] == [code]
    assert remedy in found[0].hint


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "empty"),
        ("I cannot do that.", "empty"),
        ('{"BM": 128}', "json"),
        ('[\n {"BM": 128},\n]', "json"),
        ("#include <cute/tensor.hpp>\n__global__ void f() {}", "cuda"),
        ("import torch\ndef f(q, k):\n    return q @ k", "python"),
    ],
)
def test_a_reply_without_tl_is_one_fault(text: str, code: str) -> None:
    assert codes(text) == [code]


def test_cuda_beside_tl_is_one_fault_for_its_lines() -> None:
    body = FORWARD.splitlines()
    cuda = ["__shared__ float s[64];", "int t = threadIdx.x;", "__syncwarp(0xff);"]
    found = faults("\n".join([*body[:1], *cuda[:2], *body[1:]]))
    assert [(d.span.line, d.code) for d in found] == [(2, "cuda")]
    assert "lines 2 to 3" in found[0].message


def test_python_loops_are_named() -> None:
    text = FORWARD.replace("for i = 0:N", "for i in range(0, N):")
    assert codes(text) == ["python"]
    assert "for i = lo:hi" in faults(text)[0].hint


def test_every_fault_is_found_in_one_pass_those_of_the_checker_too() -> None:
    text = FORWARD.replace("Copy K from", "load_tile(K)\n  Copy K from", 1)
    text = text.replace("Compute Softmax S", "Compute Sotfmax S\n  Compute Mask S, diagonal")
    text = text.replace("GEMM Q, K.T", "GEMM Q, K").replace("end\n", "")
    found = faults(text)
    assert {d.code for d in found} == {
        "invented-statement", "unknown-operator", "missing-end", "unknown-mask", "gemm-shapes",
    }  # fmt: skip
    assert [d.span.line for d in found] == sorted(d.span.line for d in found)
    assert all(d.hint for d in found)


def test_end_without_a_loop() -> None:
    assert "syntax" in codes(FORWARD + "end\n")
