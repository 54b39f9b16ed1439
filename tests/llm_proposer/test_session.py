"""The seam for the search: settings to a running advisor, and what is refused before."""

from __future__ import annotations

from pathlib import Path

import pytest
from searches import GQA, HISTORY, SHAPES, SKETCH, SUBJECT
from server import Server, completion
from test_advisor import EARLY, SEEDS, answer_all, settled, text_for, until

from llm_proposer.budget import Spent
from llm_proposer.errors import NotConfigured
from llm_proposer.exchange import EXCHANGES, read_exchanges
from llm_proposer.prompt import Task
from llm_proposer.session import ModelSettings, check_settings, open_session
from runs.record import History, Note
from space.gpu import GPUS

TASK = Task(GQA, GPUS["l40s"], SHAPES, "causal attention")
KEY = {"OPENAI_API_KEY": "sk-0123456789abcdef"}


@pytest.mark.parametrize(
    ("settings", "environ", "said"),
    [
        (ModelSettings("oracle"), {}, "unknown proposer 'oracle'; known proposers: builtin"),
        (ModelSettings("openai"), KEY, "no model named; say --model NAME"),
        (ModelSettings("openai", "m"), {}, "no key for the model; set OPENAI_API_KEY"),
        (ModelSettings("openai", "m", "host:1"), KEY, "base URL 'host:1' is no address"),
        (ModelSettings("batch:"), {}, "no folder in --proposer batch:"),
        (ModelSettings("batch:x", max_tokens=0), {}, "--max-tokens 0 is not at least 1"),
        (ModelSettings("batch:x", max_cost=-1.0), {}, "--max-cost -1 is not more than 0"),
        (ModelSettings("batch:x", max_cost=1.0), {}, "--max-cost needs the price of model"),
        (ModelSettings("batch:x", prices=("m",)), {}, "price 'm' is not MODEL=IN,OUT"),
    ],
)
def test_bad_settings_are_one_line_before_anything_is_written(
    settings: ModelSettings,
    environ: dict[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotConfigured) as caught:
        open_session(settings, tmp_path, environ)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_builtin_proposer_needs_nothing() -> None:
    check_settings(ModelSettings(), {})
    check_settings(ModelSettings("openai", "m", "http://127.0.0.1:1/v1"), {})


def test_a_run_with_a_server(server: Server, tmp_path: Path) -> None:
    server.script = [completion(EARLY, request_id="a"), completion(SEEDS, request_id="b")]
    settings = ModelSettings("openai", "m", server.url, prices=("m=10,20",), max_cost=1.0)
    session = open_session(settings, tmp_path, KEY)
    session.advisor.start([TASK], [SUBJECT])
    advice = settled(session.advisor)
    session.close()
    assert [s.text for s in advice.sketches] == [EARLY] and advice.points
    assert session.ledger.spent.tokens == 320
    assert session.ledger.spent.cost == pytest.approx((240 * 10 + 80 * 20) / 1e6)
    assert len(read_exchanges(tmp_path / EXCHANGES)) == 2
    assert KEY["OPENAI_API_KEY"] not in (tmp_path / EXCHANGES).read_text()


def test_what_was_spent_can_be_noted_in_a_journal() -> None:
    note = Note("model", Spent(1, 2, 3, 0.5, None).facts)
    assert note.as_dict() == {
        "requests": 1, "tokens_in": 2, "tokens_out": 3, "seconds": 0.5, "cost": None,
    }  # fmt: skip


def test_a_batch_run_goes_on_after_a_resume(tmp_path: Path) -> None:
    folder, run = tmp_path / "requests", tmp_path / "run"
    run.mkdir()
    settings = ModelSettings(f"batch:{folder}")
    first = open_session(settings, run, {})
    first.advisor.start([TASK], [SUBJECT], history=History(HISTORY.records[:2]))
    until(first.advisor, lambda _: len(read_exchanges(run / EXCHANGES)) == 2)
    first.close()
    assert answer_all(folder, text_for) == 2

    second = open_session(settings, run, {})
    second.advisor.start([TASK], [SUBJECT], history=HISTORY)
    second.advisor.recall(second.waiting, HISTORY)
    advice = until(second.advisor, lambda a: bool(a.sketches and a.points))
    second.close()
    assert advice.sketches[0].text == EARLY != SKETCH
    assert second.ledger.spent.requests == 2
