"""The model's part in a search: overlap, feedback, stalls, competing sketches, errors, resume."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fake_machine import FULL, FakeMachine

import tuner.session
from llm_proposer.advisor import Advisor
from llm_proposer.budget import Ledger
from llm_proposer.client import Kind, Prompt, Reply
from llm_proposer.errors import NotConfigured, Unreachable
from llm_proposer.exchange import ExchangeFile, Recorded, read_exchanges
from llm_proposer.session import Session
from runs.record import Note, Outcome, Rejected, Stage, TrialClass
from runs.store import Replay, RunStore
from tuner.cli import main
from tuner.guide import STALL
from tuner.lanes import Candidate

SHAPE = "1,16,16,4096,4096,128,128"
COMMON = ["--variant", "mha", "--gpu", "a100", "--shapes", SHAPE, "--no-causal"]
ILLEGAL = {"BM": 256, "BN": 256, "warps": 4}
SEEDS = [{"BN": 32, "stages": 2, "why": "w"}, {"BM": 64, "warps": 4, "why": "w"}, ILLEGAL]
#: another dataflow of the same thing: V is fetched before the softmax
EARLY_V = FULL.replace("  Copy V from global to shared\n", "").replace(
    "  Compute Softmax S\n", "  Copy V from global to shared\n  Compute Softmax S\n"
)


@dataclass
class Model:
    """Answers by the kind of request, when it is let to."""

    seeds: Callable[[int], str] = lambda n: json.dumps({"proposals": SEEDS if n == 0 else []})
    sketch: Callable[[int], str] = lambda n: "I cannot."
    free: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    prompts: list[Prompt] = field(default_factory=list)

    def complete(self, prompt: Prompt) -> Reply:
        self.free.wait(20)
        if self.error is not None:
            raise self.error
        number = sum(p.kind == prompt.kind for p in self.prompts)
        self.prompts.append(prompt)
        answer = self.seeds if prompt.kind is Kind.SEEDS else self.sketch
        return Reply(answer(number), 100, 10, 0.5, "scripted", f"r{len(self.prompts)}")

    def asked(self, kind: Kind) -> list[Prompt]:
        return [p for p in self.prompts if p.kind is kind]


class Bench:
    """A fake A100 that can be held until the model has nothing more to say."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch, hold: int = 2) -> None:
        self.model = model
        self.hold = hold  #: the trial at which the bench lets the model answer and waits for it
        self.judged = 0
        self.advisor: Advisor | None = None
        self.bad: Callable[[Candidate], Outcome | None] = lambda c: None
        monkeypatch.setattr(tuner.session, "open_session", self.session)

    def session(self, settings: object, folder: Path, environ: object) -> Session:
        ledger = Ledger()
        path = folder / "exchanges.jsonl"
        client = Recorded(self.model, "scripted", ExchangeFile(path), ledger, read_exchanges(path))
        self.advisor = Advisor(client, poll_s=0.05)
        return Session(self.advisor, client, ledger, ())

    def verdict(self, candidate: Candidate) -> Outcome | None:
        self.judged += 1
        if self.judged == self.hold:
            self.model.free.set()
        if self.judged >= self.hold:
            assert self.advisor is not None
            end = time.monotonic() + 10
            while self.advisor.waiting and time.monotonic() < end:
                time.sleep(0.005)
        return self.bad(candidate)

    def tune(self, folder: Path, *words: str, sketch: str | None = FULL) -> int:
        fake = FakeMachine(("NVIDIA A100-SXM4-80GB",), self.verdict)
        if "--resume" in words:
            return main(list(words), fake.machine())
        args = [*COMMON, "--proposer", "openai", "--model", "m"]
        args += ["--runs-dir", str(folder / "runs")]
        if sketch is not None:
            (folder / "s.tl").write_text(sketch)
            args += ["--sketch", str(folder / "s.tl")]
        return main([*args, *words], fake.machine())


def run_of(folder: Path) -> Path:
    (run,) = (p for p in (folder / "runs").iterdir() if p.is_dir())
    return run


def replay(folder: Path) -> Replay:
    return RunStore.open(run_of(folder)).replay()


def notes(folder: Path, topic: str) -> list[dict[str, object]]:
    return [dict(n.as_dict()) for n in replay(folder).notes if n.topic == topic]


def test_the_bench_does_not_wait_for_the_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(Model(), monkeypatch, hold=99)
    started = time.monotonic()
    assert bench.tune(tmp_path, "--budget", "10") == 0
    said = [str(n["text"]) for n in notes(tmp_path, "model_said")]
    assert said == ["the search ended before the model had answered everything"]
    assert time.monotonic() - started < 10
    assert len(replay(tmp_path).history) == 10
    assert not bench.model.prompts


def test_seeds_are_tried_next_and_every_verdict_is_kept_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(Model(), monkeypatch)
    assert bench.tune(tmp_path, "--budget", "8") == 0
    history = replay(tmp_path).history
    assert [r.origin for r in history][:5] == ["first", "seed", "model", "model", "model"]
    assert [r.point["BN"] for r in history][2] == 32
    verdicts = [n["verdict"] for n in notes(tmp_path, "proposal")]
    assert verdicts == ["accepted", "accepted", "repaired"]
    shown = [line for line in capsys.readouterr().out.splitlines() if "seed of the model" in line]
    assert len(shown) == 1 and "repaired" in shown[0]
    assert notes(tmp_path, "model")[-1]["tokens_in"] == 100
    (exchange,) = read_exchanges(run_of(tmp_path) / "exchanges.jsonl")[:1]
    assert exchange.answered and "proposals" in exchange.text


def test_a_search_that_stalls_asks_again_with_what_was_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(Model(), monkeypatch)
    wrong = Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, "off by a lot in row 7")
    bench.bad = lambda c: wrong if c.point["BN"] == 32 else None
    assert bench.tune(tmp_path, "--budget", str(8 + 3 * STALL)) == 0
    asked = bench.model.asked(Kind.SEEDS)
    assert len(asked) >= 2
    assert "No trial has ended yet" in asked[0].user
    assert "off by a lot in row 7" in asked[1].user
    assert "repaired" in asked[1].user  # what became of its own proposals


def test_measurements_train_the_sampler_whoever_proposed_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    honest = tuner.lanes.Sampler.tell

    def tell(self: object, point: object, losses: object) -> None:
        told.append(point.key)  # type: ignore[attr-defined]
        honest(self, point, losses)  # type: ignore[arg-type]

    monkeypatch.setattr(tuner.lanes.Sampler, "tell", tell)
    Bench(Model(), monkeypatch).tune(tmp_path, "--budget", "8")
    proposed = [r.point.key for r in replay(tmp_path).history if r.origin == "model"]
    assert proposed and set(proposed) <= set(told)


def with_sketch() -> Model:
    return Model(sketch=lambda n: f"```\n{EARLY_V}```", seeds=lambda n: '{"proposals": []}')


def test_a_sketch_of_the_model_competes_and_a_resume_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Bench(with_sketch(), monkeypatch).tune(tmp_path, "--budget", "12", sketch=None) == 0
    names = {r.sketch for r in replay(tmp_path).history}
    assert len(names) == 2 and "model-1" in names
    (kept,) = notes(tmp_path, "sketch")
    assert kept["name"] == "model-1" and "Softmax" in str(kept["text"])
    again = Bench(with_sketch(), monkeypatch, hold=1)
    assert again.tune(tmp_path, "--resume", str(run_of(tmp_path)), "--budget", "18") == 0
    history = replay(tmp_path).history
    assert history.spent() == 18
    assert {r.sketch for r in history} == names
    assert len(notes(tmp_path, "sketch")) == 1


def test_a_weak_sketch_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(with_sketch(), monkeypatch)
    precise = Rejected(TrialClass.TIMEOUT, Stage.LAUNCH, "hangs")
    bench.bad = lambda c: precise if c.sketch == "model-1" else None
    assert bench.tune(tmp_path, "--budget", "50", sketch=None) == 0
    assert sum(r.sketch == "model-1" for r in replay(tmp_path).history) <= 11
    said = [str(n["text"]) for n in notes(tmp_path, "model_said")]
    assert any("model-1" in s and "dropped" in s and "no right kernel" in s for s in said)


def test_a_sketch_that_fails_is_asked_to_be_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(with_sketch(), monkeypatch)
    wrong = Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, "NaN in row 3")
    bench.bad = lambda c: wrong if c.sketch == "model-1" else None
    assert bench.tune(tmp_path, "--budget", "20", sketch=None) == 0
    (repair,) = bench.model.asked(Kind.REPAIR)
    assert "NaN in row 3" in repair.user


def test_an_error_of_the_model_is_one_line_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(error=Unreachable("no connection to the endpoint", retryable=False))
    assert Bench(model, monkeypatch).tune(tmp_path, "--budget", "10") == 0
    out = capsys.readouterr().out
    assert out.count("the run goes on without the model") == 1
    assert len(replay(tmp_path).history) == 10
    said = [str(n["text"]) for n in notes(tmp_path, "model_said")]
    assert any("no connection to the endpoint" in s for s in said)


def test_without_a_key_the_run_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> Session:
        raise NotConfigured("no key for the model", hint="set OPENAI_API_KEY")

    bench = Bench(Model(), monkeypatch, hold=99)
    monkeypatch.setattr(tuner.session, "open_session", refuse)
    assert bench.tune(tmp_path, "--budget", "4") == 0
    assert "without the model: no key for the model; set OPENAI_API_KEY" in capsys.readouterr().out
    assert Note("model_said", (("text", "the run goes on without the model: no key for the model; "
                                "set OPENAI_API_KEY"),)) in replay(tmp_path).notes  # fmt: skip


def test_batch_replies_that_appear_later_are_taken_in_by_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "batch"
    fake = FakeMachine(("NVIDIA A100-SXM4-80GB",), lambda c: time.sleep(0.05))
    (tmp_path / "s.tl").write_text(FULL)
    args = [*COMMON, "--proposer", f"batch:{folder}", "--runs-dir", str(tmp_path / "runs")]
    args += ["--sketch", str(tmp_path / "s.tl")]
    assert main([*args, "--budget", "6"], fake.machine()) == 0
    assert not any(r.origin == "model" for r in replay(tmp_path).history)
    (request,) = (json.loads(x) for x in (folder / "requests-0001.jsonl").open())
    content = json.dumps({"proposals": [{"BN": 32, "why": "w"}]})
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    body = {
        "choices": [choice],
        "model": "m",
        "usage": {"prompt_tokens": 9, "completion_tokens": 3},
    }
    reply = {"custom_id": request["custom_id"], "response": {"status_code": 200, "body": body}}
    (folder / "out.jsonl").write_text(json.dumps(reply) + "\n")
    assert main(["--resume", str(run_of(tmp_path)), "--budget", "12"], fake.machine()) == 0
    (tried,) = (r for r in replay(tmp_path).history if r.origin == "model")
    assert tried.point["BN"] == 32
