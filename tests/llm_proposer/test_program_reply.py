"""Programs out of replies: real ones, several in one, wrapped, foreign and hostile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from searches import GQA, SKETCH, SYNC_SPACE

from llm_proposer.language import CODE_EXAMPLE
from llm_proposer.reply import ProgramReply, read_program
from space.gpu import GPUS
from space.variant import DType, Problem

REPLIES = Path(__file__).parents[1] / "codegen" / "tl" / "replies"
FULL = Problem("mha", DType.BF16, 128, 128, False)
MLA = Problem("mla", DType.BF16, 192, 128, True)
H200 = GPUS["h200"]


def causal(text: str) -> ProgramReply:
    return read_program(text, GQA, H200)


def real(name: str, problem: Problem = FULL) -> ProgramReply:
    return read_program((REPLIES / f"{name}.txt").read_text(encoding="utf-8"), problem, H200)


@pytest.mark.parametrize("name", ["code-03", "code-16", "sketch-04", "sketch-05", "sketch-12"])
def test_a_clean_reply_is_its_program(name: str) -> None:
    found = real(name)
    assert found.faults == () and not found.note
    assert "```" not in found.text and found.text.startswith(("Param", "Copy", "//", "for j"))


def test_prose_round_a_program_goes_and_comments_stay() -> None:
    found = real("code-06", MLA)
    assert found.faults == ()
    assert "head dim" not in found.text and found.text.startswith("Param BM = 128")
    assert "# 1000 = 15 * 64 + 40" in real("code-08").text


@pytest.mark.parametrize("name", ["code-15", "tune-18"])
def test_pipelines_are_left_out_and_that_is_said(name: str) -> None:
    found = real(name)
    assert found.faults == () and found.note
    for word in ("Wait", "Arrive", "TMA", "SetMaxNReg", "barrier", "if warpgroup"):
        assert word not in found.text
    assert read_program(found.text, FULL, H200) == ProgramReply(found.text, ())


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("tune-11", {"global-not-allocated"}),
        ("tune-16", {"gemm-shapes", "missing-reshape", "global-not-allocated"}),
        ("tune-04", {"json"}),
        ("sketch-15", {"unknown-operator"}),
    ],
)
def test_faults_are_those_of_the_checker(name: str, codes: set[str]) -> None:
    found = real(name)
    assert {f.code for f in found.faults} == codes


def test_lines_of_faults_are_lines_of_the_program_kept() -> None:
    text = f"Sure! Here it is:\n\n```tl\n{SKETCH.replace('K.T', 'K')}```\nEnjoy."
    found = causal(text)
    (fault,) = found.faults
    assert "GEMM Q, K and" in found.text.split("\n")[fault.span.line - 1]


def test_of_a_wrong_and_a_corrected_program_the_right_one_is_taken() -> None:
    wrong = SKETCH.replace("K.T", "K")
    text = f"First try:\n```\n{wrong}```\nThat lacks a transpose. Corrected:\n```\n{SKETCH}```\n"
    assert causal(text) == ProgramReply(SKETCH, ())
    text = f"```\n{SKETCH}```\nA worse one:\n```\n{wrong}```\n"
    assert causal(text) == ProgramReply(SKETCH, ())


def test_a_program_in_two_blocks_is_one() -> None:
    head, tail = SKETCH.split("for i")
    assert causal(f"Load:\n```\n{head}```\nLoop:\n```\nfor i{tail}```").faults == ()


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"program": SKETCH}),
        f"```json\n{json.dumps({'tl': SKETCH, 'notes': 'x'})}\n```",
        f"<think>Copy Q from nowhere?\nend</think>\n{SKETCH}",
        f"reasoning without a start</think>{SKETCH}",
        "\n".join(f"{n:3d} | {line}" for n, line in enumerate(SKETCH.split("\n")[:-1], 1)),
        "```\n"
        + "\n".join(f"{n}: {x}" for n, x in enumerate(SKETCH.split("\n")[:-1], 1))
        + "\n```",
        SKETCH.replace("\n", "\r\n"),
        f"Here is the sketch you asked for:\n\n{SKETCH}\nIt is the canonical forward pass.",
    ],
)
def test_the_same_program_is_found_in_every_wrapping(text: str) -> None:
    assert causal(text) == ProgramReply(SKETCH, ())


def test_a_comment_above_a_bare_program_stays() -> None:
    assert causal(f"Here:\n# forward pass\n{SKETCH}").text == f"# forward pass\n{SKETCH}"


def test_code_in_another_language_is_named() -> None:
    (fault,) = causal("```python\nimport triton\nq = tl.load(ptr)\n```").faults
    assert fault.code == "python"
    assert causal("I am sorry, I cannot do that.").faults


def test_a_reply_cut_off_has_faults() -> None:
    cut = CODE_EXAMPLE[: CODE_EXAMPLE.index("  Reshape")]
    assert causal(f"```tl\n{cut}").faults


def test_the_mask_must_be_the_problems() -> None:
    assert read_program(SKETCH, FULL, H200).faults
    assert causal(SKETCH.replace("  Compute Mask S, causal\n", "")).faults


def test_a_program_too_large_for_the_card_is_faulty() -> None:
    text = CODE_EXAMPLE.replace("{64, 128}", "{256}").replace("{32, 64, 128}", "{192}")
    assert {f.code for f in read_program(text, GQA, GPUS["t4"]).faults} == {"shared-memory"}


def searched(text: str) -> tuple[str, ...]:
    found = read_program(text, GQA, GPUS["l40s"], SYNC_SPACE)
    assert {f.code for f in found.faults} <= {"param-choices"}
    return tuple(str(f) for f in found.faults)


def test_params_must_leave_the_search_something() -> None:
    assert searched(SKETCH) == searched(CODE_EXAMPLE) == ()
    one = CODE_EXAMPLE.replace("{64, 128}", "{96, 64}").replace("{32, 64, 128}", "{64}")
    assert searched(one) == ()
    none = CODE_EXAMPLE.replace("{64, 128}", "{96}").replace("{32, 64, 128}", "{80, 48}")
    assert searched(none) == (
        "line 1: BM = 96 is not offered on l40s. Use some of 64, 128",
        "line 2: BN = 80, 48 is not offered on l40s. Use some of 32, 64, 128",
    )


def test_params_must_leave_the_search_something_legal() -> None:
    many = CODE_EXAMPLE.replace("{64, 128}", "{64}") + "Param warps = 8\nParam stages = 3\n"
    many = "".join(sorted(many.splitlines(True), key=lambda x: not x.startswith("Param")))
    (fault,) = searched(many)
    assert "is legal on l40s: BM/warps = 8 rows a warp is not 16, 32, 48 or 64" in fault


def test_hostile_text_is_answered_at_once() -> None:
    deep = SKETCH.replace("0:N", "0:" + "(" * 20_000 + "N" + ")" * 20_000)
    assert causal(deep).faults
    (fault,) = causal(SKETCH * 400).faults
    assert fault.code == "unreadable"


@settings(max_examples=100, deadline=None)
@given(st.text() | st.text(alphabet="Copy QKVfromglbaltshed\n`{}[]()=0:end "))
def test_no_text_makes_it_fail(text: str) -> None:
    found = causal(text)
    assert found.faults or found.text
