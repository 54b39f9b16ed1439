"""Propose, check, repair: what comes out, and that nothing is ever raised."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted import Scripted
from searches import BASE, GQA, HISTORY, SHAPES, SKETCH, SUBJECT

from llm_proposer.client import Kind
from llm_proposer.errors import BadRequest, BudgetSpent, Pending, ProposerError, Refused
from llm_proposer.language import CODE_EXAMPLE
from llm_proposer.prompt import Question, Task, seeds_prompt
from llm_proposer.proposer import (
    Way,
    mend_program,
    propose_program,
    propose_seeds,
    take_seeds,
)
from llm_proposer.seed_reply import Verdict
from runs.record import Rejected, Stage, TrialClass
from space.gpu import GPUS

TASK = Task(GQA, GPUS["l40s"], SHAPES, "causal attention")
QUESTION = Question(SUBJECT, BASE, HISTORY)
WRONG = SKETCH.replace("K.T", "K")
WORSE = SKETCH.replace("K.T", "K").replace("Softmax", "Foo")
JUDGED = Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, "row 3 is off by 0.2")


def kinds(client: Scripted) -> list[Kind]:
    return [p.kind for p in client.prompts]


# ---- programs ------------------------------------------------------------------------------------


def test_a_clean_sketch_is_taken_at_once() -> None:
    client = Scripted([f"Here:\n```\n{SKETCH}```"])
    found = propose_program(client, TASK)
    assert (found.text, found.notes, found.repairs, found.first_faults) == (SKETCH, (), 0, ())
    assert kinds(client) == [Kind.SKETCH]


def test_a_faulty_sketch_is_repaired_by_its_diagnostics() -> None:
    client = Scripted([WORSE, WRONG, SKETCH])
    found = propose_program(client, TASK)
    assert (found.text, found.repairs) == (SKETCH, 2)
    assert kinds(client) == [Kind.SKETCH, Kind.REPAIR, Kind.REPAIR]
    assert "`Foo` is not an operator" in client.prompts[1].user
    assert "Compute GEMM Q, K and get S" in client.prompts[2].user
    assert found.notes[0].startswith("the first answer has faults: line 4: ")
    assert found.notes[1].startswith("repair 1 has faults: ")
    assert {f.code for f in found.first_faults} == {"gemm-shapes", "unknown-operator"}


def test_repairs_have_an_end() -> None:
    answers = [SKETCH.replace("K.T", "K") + f"# {n}\n" * n for n in range(9)]
    client = Scripted([a.replace("Softmax", f"Foo{n}") for n, a in enumerate(answers)])
    found = propose_program(client, TASK, repairs=3)
    assert found.text == "" and found.repairs == 3 and len(client.prompts) == 4
    assert found.notes[-1] == "no usable program after 3 repairs"


def test_a_model_that_repeats_its_program_is_noticed() -> None:
    client = Scripted([WRONG, f"Of course!\n```\n# mended\n{WRONG}```"])
    found = propose_program(client, TASK, repairs=5)
    assert found.text == "" and len(client.prompts) == 2
    assert "repeats itself" in found.notes[-1]


def test_the_papers_two_stages() -> None:
    client = Scripted([SKETCH, CODE_EXAMPLE])
    found = propose_program(client, TASK, Way.TWO_STAGE)
    assert found.text == CODE_EXAMPLE and kinds(client) == [Kind.SKETCH, Kind.CODE]
    assert SKETCH.strip() in client.prompts[1].user


def test_without_a_sketch_there_is_no_second_stage() -> None:
    client = Scripted([WRONG])
    assert propose_program(client, TASK, Way.TWO_STAGE).text == ""
    assert Kind.CODE not in kinds(client)


def test_one_step() -> None:
    client = Scripted([CODE_EXAMPLE])
    assert propose_program(client, TASK, Way.ONE_STEP).text == CODE_EXAMPLE
    assert kinds(client) == [Kind.ONE_STEP]


def test_independent_samples_are_different_questions() -> None:
    client = Scripted([SKETCH])
    for sample in range(3):
        propose_program(client, TASK, sample=sample)
    assert len({p.digest for p in client.prompts}) == 3


def test_a_pipelined_answer_is_taken_as_mended_and_said() -> None:
    piped = SKETCH.replace("for i", "Wait full[0]\nfor i")
    found = propose_program(Scripted([piped]), TASK)
    assert found.text and "Wait" not in found.text
    assert "pipelines and roles were left out" in found.notes[0]


def test_a_judged_failure_is_mended() -> None:
    unscaled = SKETCH.replace("  Compute Scale S, scale\n", "")
    client = Scripted([SKETCH])
    found = mend_program(client, TASK, unscaled, JUDGED)
    assert found.text == SKETCH
    assert "row 3 is off by 0.2" in client.prompts[0].user


def test_the_failed_program_again_is_no_mending() -> None:
    found = mend_program(Scripted([SKETCH]), TASK, SKETCH, JUDGED)
    assert found.text == "" and "repeats itself" in found.notes[-1]


FAILURES = [
    Refused("the model declined"),
    BadRequest("the endpoint answered 401", hint="check OPENAI_API_KEY"),
    BudgetSpent("--max-tokens 10 leave no room"),
    ProposerError("something"),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda e: type(e).__name__)
def test_no_failure_is_raised(error: ProposerError) -> None:
    for found in (
        propose_program(Scripted([error]), TASK),
        propose_program(Scripted([WRONG, error]), TASK),
        propose_seeds(Scripted([error]), QUESTION),
        take_seeds(Scripted([error]), seeds_prompt(QUESTION), QUESTION),
    ):
        assert found.failure is error and not found.pending
        assert found.notes[-1] == f"no reply from the model: {error}"


def test_a_reply_to_come_is_pending_and_the_same_asking_goes_on() -> None:
    waits = Pending("waits")
    assert propose_program(Scripted([waits]), TASK).pending
    assert propose_seeds(Scripted([waits]), QUESTION).pending
    half = Scripted([WRONG, waits])
    assert propose_program(half, TASK).pending
    again = Scripted([WRONG, SKETCH])
    assert propose_program(again, TASK).text == SKETCH
    assert [p.digest for p in half.prompts] == [p.digest for p in again.prompts]


# ---- seeds ---------------------------------------------------------------------------------------


def test_seeds_are_counted_by_verdict() -> None:
    found = propose_seeds(Scripted(['[{"peel": 1}, {"BN": 48}, {"turbo": 1}]']), QUESTION)
    verdicts = [p.verdict for p in found.proposals]
    assert verdicts == [Verdict.ACCEPTED, Verdict.REJECTED, Verdict.REJECTED]
    assert found.notes == ("3 seeds proposed: 1 accepted, 2 rejected",)
    assert not found.repeated


def test_a_reply_without_json_is_asked_for_again_with_the_reason() -> None:
    client = Scripted(["Try BN=32 with two stages.", '[{"peel": 1}]'])
    found = propose_seeds(client, QUESTION)
    assert [p.point for p in found.proposals] == [BASE.replace(peel=1)]
    assert "no JSON object with proposals" in client.prompts[1].user
    assert "no JSON object" in found.notes[0]


def test_seeds_have_an_end_too() -> None:
    client = Scripted(["no"])
    found = propose_seeds(client, QUESTION, repairs=2)
    assert found.proposals == () and len(client.prompts) == 3 and found.failure is None


def test_a_model_that_knows_nothing_new_is_noticed() -> None:
    found = propose_seeds(Scripted(['[{"BN": 32}, {"stages": 2}]']), QUESTION)
    assert found.repeated and "repeats itself" in found.notes[-1]


def test_a_late_reply_is_read_against_the_base_it_was_asked_with() -> None:
    question = replace(QUESTION, base=BASE.replace(peel=1))
    found = take_seeds(Scripted(['[{"blocks_per_sm": 1, "warps": 4, "BM": 64}]']),
                       seeds_prompt(question), question)  # fmt: skip
    assert [p.point for p in found.proposals] == [BASE.replace(peel=1, warps=4, BM=64)]
