"""Prompts: golden texts, and that what they say of language, space and rules is true."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from searches import (
    BASE,
    GQA,
    HISTORY,
    HOPPER_BASE,
    HOPPER_SPACE,
    MLA,
    PEERS,
    SHAPES,
    SKETCH,
    SUBJECT,
    SYNC_SPACE,
)

from codegen.errors import TLError
from codegen.tl.bind import bind
from codegen.tl.checker import check
from codegen.tl.parser import parse
from llm_proposer.client import Kind, Prompt
from llm_proposer.describe import (
    RULES,
    Subject,
    base_of,
    memory_text,
    problem_text,
    ranked,
    rules_text,
)
from llm_proposer.language import CODE_EXAMPLE, SKETCH_EXAMPLE, guide
from llm_proposer.prompt import (
    Question,
    Task,
    code_prompt,
    one_step_prompt,
    repair_prompt,
    seeds_prompt,
    seeds_schema,
    sketch_prompt,
)
from runs.record import History, Rejected, Stage, TrialClass
from space.constraints import CONSTRAINTS, violated
from space.decode import DECODE_CONSTRAINTS
from space.decode_mma import DECODE_MMA_CONSTRAINTS
from space.gpu import GPUS
from space.hopper import HOPPER_CONSTRAINTS
from space.params import Point
from space.variant import DType, Phase, Problem

GOLDEN = Path(__file__).parents[1] / "golden" / "prompts"
REFERENCE = """\
def attention(q, k, v):
    s = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    return torch.sigmoid(s - math.log(k.shape[-2])) @ v
"""
TASK = Task(
    GQA, GPUS["l40s"], SHAPES, words="causal attention with a softcap of 30", space=SYNC_SPACE
)
FAULTY = SKETCH.replace("K.T", "K").replace("  Compute Softmax S\n", "  Compute Foo S\n")
JUDGED = Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, "worst row 17: 0.31 off\ncosine 0.97")


def faults(text: str) -> tuple[object, ...]:
    try:
        return check(parse(text))
    except TLError as error:
        return error.diagnostics


PROMPTS: dict[str, Prompt] = {
    "sketch-words": sketch_prompt(TASK),
    "sketch-reference": sketch_prompt(replace(TASK, words="", reference=REFERENCE)),
    "code": code_prompt(TASK, SKETCH),
    "one-step": one_step_prompt(TASK),
    "seeds": seeds_prompt(
        Question(SUBJECT, BASE, HISTORY, PEERS, ('{"BN": 7} repaired: BN=7 is not offered',))
    ),
    "seeds-first": seeds_prompt(Question(SUBJECT, BASE)),
    "repair-faults": repair_prompt(TASK, FAULTY, faults(FAULTY)),  # type: ignore[arg-type]
    "repair-judged": repair_prompt(TASK, CODE_EXAMPLE, judged=JUDGED),
}


@pytest.mark.parametrize("name", list(PROMPTS))
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    prompt = PROMPTS[name]
    text = f"=== system\n{prompt.system}\n=== user\n{prompt.user}\n=== schema\n{prompt.schema}\n"
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-golden", default=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_no_golden_file_is_left_over() -> None:
    assert {p.stem for p in GOLDEN.glob("*.txt")} == set(PROMPTS)


# ---- the language is told as it is ---------------------------------------------------------------


@pytest.mark.parametrize("problem", [GQA, MLA], ids=lambda p: p.variant)
def test_the_examples_are_clean_and_bind(problem: Problem) -> None:
    point = {"BM": 64, "BN": 32}
    for text in (SKETCH_EXAMPLE, CODE_EXAMPLE):
        sketch = parse(text)
        assert check(sketch, problem) == ()
        assert bind(sketch, problem, Point.of(point)).kernels


def test_every_statement_of_the_guide_is_one() -> None:
    body = SKETCH_EXAMPLE.split("  Compute Mask")[0]
    tail = SKETCH_EXAMPLE[SKETCH_EXAMPLE.index("  Compute Softmax") :]
    for line in (
        "Compute Softcap S, c",
        "Compute Mask S, window(l, r)",
        "Compute Mask S, padding",
        "Compute Relu S",
        "Compute Add S, 3 and get new S",
    ):
        assert check(parse(f"{body}  {line}\n{tail}")) == (), line
        word = line.split()[1]
        assert word in guide(sizes=False), word


def test_the_bias_of_the_guide_is_clean() -> None:
    text = CODE_EXAMPLE.replace(
        "Allocate O in global",
        "Allocate B in global (M, N) with offset b_offset\nAllocate O in global",
    ).replace(
        "  Compute Mask S, causal\n",
        "  Copy B (BM, BN) in coordinate [L = block_idx, D = i] from global to shared\n"
        "  Compute Mask S, bias(B)\n  Compute Mask S, causal\n",
    )
    assert check(parse(text), GQA) == ()


def test_the_guide_says_that_pipelines_are_not_written() -> None:
    for sizes in (False, True):
        assert "Pipelines, stages, barriers, TMA, waits, warps and warp roles are NOT" in guide(
            sizes
        )


# ---- the space is told as it is ------------------------------------------------------------------


def test_every_rule_of_the_space_has_words() -> None:
    own = (*CONSTRAINTS, *HOPPER_CONSTRAINTS, *DECODE_MMA_CONSTRAINTS, *DECODE_CONSTRAINTS)
    assert {c.name for c in own} == set(RULES)


def test_the_parameters_are_told_with_their_choices() -> None:
    user = PROMPTS["seeds"].user
    for p in SUBJECT.space.params:
        assert f"  {p.name} in {{{', '.join(map(str, p.choices))}}}: {p.meaning}" in user


def test_changes_that_are_called_illegal_are_the_illegal_ones() -> None:
    for subject, base in (
        (SUBJECT, BASE),
        (Subject("s", SKETCH, MLA, GPUS["h200"], HOPPER_SPACE, ()), HOPPER_BASE),
    ):
        said = memory_text(subject.problem, subject.gpu, subject.space, base).split("\n")
        named = {line.strip().split(":")[0] for line in said if line.startswith("  ")}
        illegal = {
            f"{param.name}={choice}"
            for param in subject.space.params
            for choice in param.choices
            if choice != base[param.name]
            and violated(subject.problem, base.replace(**{param.name: choice}), subject.gpu)
        }
        assert named == illegal and illegal


def test_what_hoppers_switches_need_is_true() -> None:
    """Each sentence of the rules about one switch names a point that it forbids."""
    subject = Subject("s", SKETCH, MLA, GPUS["h200"], HOPPER_SPACE, ())
    said = rules_text(subject.space)
    lone = HOPPER_BASE.replace(BM=64, consumer_warpgroups=1)
    for point, sentence in (
        (lone.replace(pingpong=1), "pingpong = 1 needs consumer_warpgroups > 1"),
        (lone.replace(skip=1), "skip = 1 needs consumer_warpgroups > 1"),
        (HOPPER_BASE.replace(integer_max=1), "integer_max = 1 needs rescale_threshold > 0"),
        (HOPPER_BASE.replace(q_stages=2, stages=1), "q_stages = 2 needs persistent > 0"),
    ):
        assert sentence in said
        found = violated(MLA, point, subject.gpu)
        assert found is not None and found[0] == "takes_effect", sentence


def test_the_schema_is_strict_and_admits_sparse_proposals() -> None:
    schema = seeds_schema(SUBJECT.space)
    item = schema["properties"]["proposals"]["items"]
    assert item["required"] == [*SUBJECT.space.names, "why"]
    assert item["additionalProperties"] is schema["additionalProperties"] is False
    assert item["properties"]["BN"] == {"type": ["integer", "null"], "enum": [32, 64, 128, None]}
    assert json.loads(PROMPTS["seeds"].schema) == schema


# ---- the history is told as it is ----------------------------------------------------------------


def test_trials_are_ranked_over_all_shapes() -> None:
    order = [r.index for _, r in ranked(SUBJECT.trials(HISTORY))]
    assert order == [1, 2, 0]
    assert base_of(SUBJECT, HISTORY, HOPPER_BASE) == BASE
    assert base_of(SUBJECT, History(), HOPPER_BASE) == HOPPER_BASE


def test_the_model_hears_why_trials_failed_and_not_of_broken_machines() -> None:
    user = PROMPTS["seeds"].user
    assert "compile_error: 272 bytes of spills [BN=128 q_in_registers=1; " in user
    assert "wrong_output: row 17 differs by 0.3 [stages=2]" in user
    assert "driver" not in user


def test_each_shape_has_its_best_and_the_best_peer() -> None:
    user = PROMPTS["seeds"].user
    assert "4,32,8,4096,4096,128,128c: 1850.0 us" in user
    assert "by BN=32 | best peer fa2 1880.0 us" in user
    assert "by (base) | best peer fa2 6900.0 us" in user


def test_trials_of_another_search_are_not_told() -> None:
    other = replace(SUBJECT, sketch="another")
    assert "No trial has ended yet." in seeds_prompt(Question(other, BASE, HISTORY)).user


def test_long_histories_stay_short() -> None:
    first = HISTORY.records[1]
    many = History(tuple(replace(first, index=n) for n in range(5000)))
    user = seeds_prompt(Question(SUBJECT, BASE, many)).user
    assert len(user) < 9000 and "4960 slower ones are left out" in user


# ---- requests are pure ---------------------------------------------------------------------------


def test_the_same_state_is_the_same_question() -> None:
    assert sketch_prompt(TASK) == PROMPTS["sketch-words"]
    digests = [p.digest for p in PROMPTS.values()]
    assert len(set(digests)) == len(digests)
    assert sketch_prompt(TASK, sample=1).digest != sketch_prompt(TASK).digest


def test_kinds_are_those_asked_for() -> None:
    kinds = [p.kind for p in PROMPTS.values()]
    assert [k for k, _ in itertools.groupby(kinds)] == [
        Kind.SKETCH, Kind.CODE, Kind.ONE_STEP, Kind.SEEDS, Kind.REPAIR,
    ]  # fmt: skip


def test_a_repair_shows_the_lines_that_its_faults_name() -> None:
    user = PROMPTS["repair-faults"].user
    assert "  4 |   Compute GEMM Q, K and get S" in user
    assert "line 4: " in user and "line 7: `Foo` is not an operator" in user
    user = PROMPTS["repair-judged"].user
    assert "failed at the stage `verify` as `wrong_output`" in user and "cosine 0.97" in user


def test_decode_is_told_as_such() -> None:
    problem = Problem("mla", DType.BF16, 576, 512, False, Phase.DECODE, 64)
    said = problem_text(problem, ())
    assert "in pages of 64 keys" in said
    assert "V is the first 512 columns of K" in said
    assert "prefill" not in said
    plain = problem_text(Problem("gqa", DType.BF16, 128, 128, False), ())
    assert "Decode" not in plain
