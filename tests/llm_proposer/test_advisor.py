"""The advisor: never waits, never raises, asks with what was learnt, gives up in one line."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from scripted import Kept, Scripted
from searches import BASE, GQA, HISTORY, PEERS, SHAPES, SKETCH, SUBJECT
from server import Server, completion, failure

from llm_proposer.advisor import Advice, Advisor
from llm_proposer.budget import Ledger
from llm_proposer.client import Client, Kind, Prompt, Reply
from llm_proposer.errors import BadRequest, Refused, Unreachable
from llm_proposer.exchange import ExchangeFile, Recorded, read_exchanges, unanswered
from llm_proposer.prompt import Task
from llm_proposer.providers import batch, openai
from llm_proposer.retries import Backoff, Retrying
from llm_proposer.seed_reply import Verdict
from runs.record import History, Rejected, Stage, TrialClass
from space.gpu import GPUS

TASK = Task(GQA, GPUS["l40s"], SHAPES, "causal attention")
SEEDS = '[{"head_group": 0, "why": "w"}, {"turbo": 1}]'


#: the same function as SKETCH by other dataflow
EARLY = SKETCH.replace("  Copy V from global to shared\n", "").replace(
    "  Copy K from global to shared\n",
    "  Copy K from global to shared\n  Copy V from global to shared\n",
)


def by_kind(prompt: Prompt) -> str:
    return SEEDS if prompt.kind is Kind.SEEDS else EARLY


def until(advisor: Advisor, enough: Callable[[Advice], bool]) -> Advice:
    """Collect advice until there is enough of it."""
    found = Advice()
    deadline = time.monotonic() + 20
    while not enough(found):
        assert time.monotonic() < deadline, found
        new = advisor.poll()
        found = Advice(
            found.sketches + new.sketches, found.seeds + new.seeds, found.notes + new.notes
        )
        time.sleep(0.01)
    return found


def settled(advisor: Advisor) -> Advice:
    found = until(advisor, lambda _: not advisor.waiting)
    new = advisor.poll()
    return Advice(found.sketches + new.sketches, found.seeds + new.seeds, found.notes + new.notes)


@pytest.fixture
def advise() -> object:
    made: list[Advisor] = []

    def make(client: Client, **others: float) -> Advisor:
        made.append(Advisor(client, **others))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for advisor in made:
        advisor.close()
        assert not advisor._thread.is_alive()


Make = Callable[..., Advisor]


def test_sketches_and_seeds_come_by_themselves(advise: Make) -> None:
    advisor = advise(Scripted([by_kind]))
    advisor.start([TASK], [SUBJECT], samples=2)
    advice = settled(advisor)
    assert [(s.name, s.text) for s in advice.sketches] == [("model-1-causal", EARLY)]
    assert "the model's program model-2-causal is the same as model-1-causal" in advice.notes
    assert [s.proposal.verdict for s in advice.seeds] == [Verdict.ACCEPTED, Verdict.REJECTED]
    ((sketch, problem, point),) = advice.points
    assert (sketch, problem, point["head_group"]) == ("forward", GQA, 0)
    assert not advisor.poll()


def test_the_program_that_is_searched_already_is_not_brought_again(advise: Make) -> None:
    advisor = advise(Scripted([f"# my own idea\n{SKETCH}"]))
    advisor.start([TASK], [SUBJECT])
    advice = settled(advisor)
    assert not advice.sketches
    assert "the model's program model-1-causal is the same as forward" in advice.notes


def test_a_search_may_say_where_its_proposals_start(advise: Make) -> None:
    client = Scripted([SEEDS])
    advisor = advise(client)
    advisor.start((), [replace(SUBJECT, start=BASE.replace(BN=32))])
    ((_, _, point),) = settled(advisor).points
    assert point == BASE.replace(BN=32, head_group=0)
    assert "Base (not tried yet): BM=128, BN=32," in client.prompts[0].user


def test_polling_and_telling_never_wait(advise: Make) -> None:
    gate = threading.Event()

    class Slow:
        def complete(self, prompt: Prompt) -> Reply:
            gate.wait(20)
            return Scripted([by_kind]).complete(prompt)

    advisor = advise(Slow())
    started = time.perf_counter()
    advisor.start([TASK], [SUBJECT])
    for _ in range(100):
        assert not advisor.poll()
        advisor.tell(HISTORY)
    assert time.perf_counter() - started < 1.0 and advisor.waiting
    gate.set()
    assert settled(advisor).sketches


def test_the_newest_history_replaces_what_was_not_asked_yet(advise: Make) -> None:
    gate = threading.Event()

    def slow(prompt: Prompt) -> str:
        gate.wait(20)
        return by_kind(prompt)

    client = Scripted([slow])
    advisor = advise(client)
    advisor.start([TASK], [SUBJECT])
    for count in range(1, len(HISTORY) + 1):
        advisor.tell(History(HISTORY.records[:count]), PEERS)
    gate.set()
    settled(advisor)
    asked = [p.user for p in client.prompts if p.kind is Kind.SEEDS]
    assert len(asked) == 1 and "1.028  BN=32" in asked[0] and "fa2" in asked[0]


def test_what_became_of_proposals_is_told_in_the_next_request(advise: Make) -> None:
    client = Scripted([SEEDS])
    advisor = advise(client)
    advisor.start((), [SUBJECT])
    settled(advisor)
    advisor.tell(HISTORY)
    settled(advisor)
    assert '{"turbo": 1} rejected: turbo is not a parameter here' in client.prompts[1].user


def test_a_judged_failure_comes_back_mended(advise: Make) -> None:
    advisor = advise(Scripted([SKETCH]))
    broken = SKETCH.replace("  Compute Scale S, scale\n", "")
    advisor.mend("model-1b", TASK, broken, Rejected(TrialClass.PRECISION, Stage.VERIFY, "x"))
    assert [s.name for s in settled(advisor).sketches] == ["model-1b"]


# ---- giving up -----------------------------------------------------------------------------------


def test_a_model_that_cannot_be_asked_is_left_alone_in_one_line(advise: Make) -> None:
    client = Scripted([BadRequest("the endpoint answered 401", hint="check OPENAI_API_KEY")])
    advisor = advise(client)
    advisor.start([TASK], [SUBJECT])
    notes = settled(advisor).notes
    assert [n for n in notes if n.startswith("the run goes on without the model: ")] == [
        "the run goes on without the model: the endpoint answered 401; check OPENAI_API_KEY"
    ]
    advisor.tell(HISTORY)
    assert not settled(advisor) and len(client.prompts) == 1


@pytest.mark.parametrize("error", [Unreachable("gone", retryable=True), Refused("no")])
def test_one_failure_that_may_pass_is_forgiven(advise: Make, error: Exception) -> None:
    client = Scripted([error, SEEDS])  # type: ignore[list-item]
    advisor = advise(client)
    advisor.start((), [SUBJECT])
    settled(advisor)
    advisor.tell(HISTORY)
    assert settled(advisor).seeds


def test_failures_in_a_row_are_not(advise: Make) -> None:
    client = Scripted([Unreachable("gone", retryable=True)])
    advisor = advise(client)
    for _ in range(5):
        advisor.start((), [SUBJECT])
        settled(advisor)
    assert len(client.prompts) == 2


def test_a_model_with_nothing_new_is_asked_no_more(advise: Make) -> None:
    client = Scripted(['[{"BN": 32}]'])
    advisor = advise(client)
    advisor.start((), [SUBJECT], history=HISTORY)
    notes = settled(advisor).notes
    for _ in range(4):
        advisor.tell(HISTORY)
        notes += settled(advisor).notes
    assert len(client.prompts) == 2
    assert sum("has nothing new for forward of gqa-bf16-d128-causal" in n for n in notes) == 1


def test_a_fault_of_the_program_ends_the_advice_and_not_the_run(advise: Make) -> None:
    class Faulty:
        def complete(self, prompt: Prompt) -> Reply:
            raise ZeroDivisionError("a bug")

    advisor = advise(Faulty())
    advisor.start([TASK], [SUBJECT])
    assert settled(advisor).notes == ("the model is left out: ZeroDivisionError: a bug",)


def test_closing_ends_the_waits_of_retries(advise: Make) -> None:
    stop = threading.Event()
    client = Retrying(
        Scripted([Unreachable("gone", retryable=True)]), Backoff(base_s=60), stop.wait
    )
    advisor = Advisor(client, stop=stop)
    advisor.start([TASK])
    time.sleep(0.05)
    started = time.perf_counter()
    advisor.close()
    assert time.perf_counter() - started < 1.0 and not advisor._thread.is_alive()


# ---- replies from a folder -----------------------------------------------------------------------


def answer_all(folder: Path, text: Callable[[dict[str, object]], str]) -> int:
    """Answer every request of a folder as a batch does; return how many there are."""
    lines = []
    for path in folder.glob("requests-*.jsonl"):
        for line in path.read_text().splitlines():
            request = json.loads(line)
            body = json.loads(completion(text(request)).body)
            lines.append({"custom_id": request["custom_id"],
                          "response": {"status_code": 200, "body": body}})  # fmt: skip
    (folder / "output.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return len(lines)


def text_for(request: dict[str, object]) -> str:
    return SEEDS if "response_format" in str(request) else EARLY


def test_replies_of_a_folder_are_taken_when_they_appear(advise: Make, tmp_path: Path) -> None:
    kept = Kept()
    client = Recorded(batch.connect(str(tmp_path), "m"), "m", kept)
    advisor = advise(client, poll_s=0.02)
    advisor.start([TASK], [SUBJECT])
    until(advisor, lambda _: len(kept.exchanges) == 2)
    assert advisor.waiting and not advisor.poll()
    assert answer_all(tmp_path, text_for) == 2
    advice = settled(advisor)
    assert advice.sketches and advice.points
    assert [e.pending for e in kept.exchanges] == [True, True, False, False]


def test_a_resumed_run_takes_in_what_came_meanwhile(advise: Make, tmp_path: Path) -> None:
    folder, path = tmp_path / "batch", tmp_path / "exchanges.jsonl"
    client = Recorded(batch.connect(str(folder), "m"), "m", ExchangeFile(path))
    first = advise(client, poll_s=0.02)
    first.start((), [SUBJECT], history=History(HISTORY.records[:1]))
    until(first, lambda _: len(read_exchanges(path)) == 1)
    first.close()
    answer_all(folder, text_for)

    before = read_exchanges(path)
    ledger = Ledger()
    client = Recorded(batch.connect(str(folder), "m"), "m", ExchangeFile(path), ledger, before)
    second = advise(client, poll_s=0.02)
    second.start([TASK], [SUBJECT], history=HISTORY)  # another history: another question
    second.recall(unanswered(before), HISTORY)
    advice = until(second, lambda a: bool(a.points))
    # the reply is a difference against the base that it was asked with
    ((_, _, point),) = advice.points
    assert point == BASE.replace(head_group=0, rescale_threshold=0)
    assert [e.answered for e in read_exchanges(path)].count(True) == 1
    assert ledger.spent.requests == 1


# ---- over HTTP, all layers -----------------------------------------------------------------------


def test_a_troubled_endpoint_over_http(advise: Make, server: Server, tmp_path: Path) -> None:
    key = "sk-live-0123456789abcdef"
    fenced = f"Certainly!\n```tl\n{EARLY}```\nHope that helps."
    server.script = [
        failure(429, "slow down", retry_after="0.01"),
        failure(500, f"internal, key {key}"),
        completion(EARLY.replace("Compute Softmax S", "softmax(S)"), request_id="a"),
        completion(fenced, request_id="b"),
        completion('{"proposals": [{"head_group": 0, "why": "x"}, {"BN": 3', finish="length"),
    ]
    path = tmp_path / "exchanges.jsonl"
    stop = threading.Event()
    asking = openai.connect("m", server.url, {"OPENAI_API_KEY": key})
    recorded = Recorded(asking, "m", ExchangeFile(path, asking.secrets))
    advisor = advise(Retrying(recorded, Backoff(base_s=0.01), stop.wait), stop=stop)
    advisor.start([TASK], [SUBJECT])
    advice = settled(advisor)
    assert [s.text for s in advice.sketches] == [EARLY]
    assert [p["head_group"] for _, _, p in advice.points] == [0]
    kept = read_exchanges(path)
    assert [e.kind for e in kept] == ["sketch", "sketch", "sketch", "repair", "seeds"]
    assert [bool(e.error) for e in kept] == [True, True, False, False, False]
    assert kept[-1].truncated and kept[2].tokens_in == 120
    assert key not in path.read_text() and "[redacted]" in kept[1].error
