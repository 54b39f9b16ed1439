"""What goes wrong with a model, through the command line and HTTP: the run goes on and says so."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_machine import FULL, FakeMachine

from llm_proposer.exchange import EXCHANGES, read_exchanges
from llm_proposer.retries import Backoff
from runs.store import Replay, RunStore
from tuner.cli import main

sys.path.insert(0, str(Path(__file__).parents[1] / "llm_proposer"))
from server import Answer, Server, completion, failure

SHAPE = "1,16,16,4096,4096,128,128"
JOB = ["--variant", "mha", "--gpu", "a100", "--shapes", SHAPE, "--no-causal", "--budget", "14"]
KEY = "sk-a-key-of-these-tests"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server on 127.0.0.1; the key is set, retries wait for milliseconds."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(Backoff, "wait_s", lambda *_: 0.001)
    with Server() as running:
        yield running


def tune(folder: Path, url: str | None, *more: str, sketch: bool = True) -> int:
    """Run the main job with a model; trials are slow enough for it to answer."""
    machine = FakeMachine(("NVIDIA A100-SXM4-80GB",), lambda candidate: time.sleep(0.08))
    words = [*JOB, "--proposer", "openai", "--model", "m", "--runs-dir", str(folder / "runs")]
    if sketch:
        (folder / "s.tl").write_text(FULL)
        words += ["--sketch", str(folder / "s.tl")]
    words += [] if url is None else ["--base-url", url]
    return main([*words, *more], machine.machine())


def replayed(folder: Path) -> Replay:
    (run,) = (folder / "runs").iterdir()
    return RunStore.open(run).replay()


def said(folder: Path) -> list[str]:
    notes = replayed(folder).notes
    return [str(n.as_dict()["text"]) for n in notes if n.topic == "model_said"]


def check_it_went_on(folder: Path) -> None:
    """All of the budget was used, and the key is nowhere in the run's folder."""
    assert replayed(folder).history.spent() == 14
    for path in (folder / "runs").rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


def seeds(*proposals: dict[str, object]) -> Answer:
    return completion(json.dumps({"proposals": list(proposals)}))


def test_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert tune(tmp_path, None) == 0
    (text,) = said(tmp_path)
    assert text.startswith("the run goes on without the model: ") and "OPENAI_API_KEY" in text
    assert capsys.readouterr().out.count("goes on without the model") == 1
    check_it_went_on(tmp_path)


FAULTS = {
    "wrong address": (failure(404, "no such page"), "404"),
    "unknown model": (failure(404, "The model `m` does not exist", "model_not_found"), "`m`"),
    "wrong key": (failure(401, "Incorrect API key provided", "invalid_api_key"), "401"),
    "server down": (failure(503, "overloaded"), "503"),
    "no JSON": (Answer(200, "<html>It works!</html>", content_type="text/html"), "JSON"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_endpoint_that_does_not_answer(
    name: str, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer, word = FAULTS[name]
    server.script = [answer]
    assert tune(tmp_path, server.url) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("no reply from the model") == 1
    assert text.count("goes on without the model") <= 1
    assert any("no reply from the model" in line and word in line for line in said(tmp_path))
    check_it_went_on(tmp_path)


def test_a_port_where_nobody_listens(server: Server, tmp_path: Path) -> None:
    assert tune(tmp_path, "http://127.0.0.1:1/v1") == 0
    assert any("no reply from the model" in line for line in said(tmp_path))
    check_it_went_on(tmp_path)


def test_a_reply_that_is_not_tl(server: Server, tmp_path: Path) -> None:
    poem = completion("Roses are red, violets are blue, attention is all you ever knew.")
    server.script = [poem]
    assert tune(tmp_path, server.url, sketch=False) == 0
    lines = said(tmp_path)
    assert any("no usable program" in x or "repeats itself" in x for x in lines), lines
    (run,) = (tmp_path / "runs").iterdir()
    kept = read_exchanges(run / EXCHANGES)
    assert kept and all("violets" in e.text for e in kept if e.answered)
    check_it_went_on(tmp_path)


def test_a_reply_of_seeds_that_is_none(server: Server, tmp_path: Path) -> None:
    server.script = [completion("Try larger tiles, they are usually faster.")]
    assert tune(tmp_path, server.url) == 0
    assert any("proposals" in x or "JSON" in x for x in said(tmp_path)), said(tmp_path)
    assert not any(r.origin == "model" for r in replayed(tmp_path).history)
    check_it_went_on(tmp_path)


def test_a_model_that_repeats_itself_is_noticed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.guide.STALL", 2)
    server.script = [seeds({"BN": 32, "why": "small"})]
    assert tune(tmp_path, server.url) == 0
    tried = [r for r in replayed(tmp_path).history if r.origin == "model"]
    assert len(tried) == 1 and tried[0].point["BN"] == 32
    assert any("the model repeats itself" in x for x in said(tmp_path)), said(tmp_path)
    check_it_went_on(tmp_path)
