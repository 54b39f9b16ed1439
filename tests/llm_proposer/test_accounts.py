"""Budget, retries, kept exchanges and redaction."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest
from scripted import Kept, Scripted, reply

from llm_proposer.budget import Ledger, Limits, Price, Spent, parse_prices
from llm_proposer.client import Kind, Prompt
from llm_proposer.errors import (
    BudgetSpent,
    NotConfigured,
    Pending,
    ProposerError,
    Refused,
    Stopped,
    Unreachable,
)
from llm_proposer.exchange import (
    Exchange,
    ExchangeFile,
    Recorded,
    read_exchanges,
    to_line,
    unanswered,
)
from llm_proposer.redact import redacted
from llm_proposer.retries import Backoff, Retrying

PROMPT = Prompt(Kind.SEEDS, "s" * 150, "u" * 150, about=(("sketch", "forward"),))
NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)


def lost() -> Unreachable:
    return Unreachable("gone", retryable=True)


# ---- the digest ----------------------------------------------------------------------------------


def test_the_digest_is_of_the_question_alone() -> None:
    same = Prompt(Kind.SEEDS, "s" * 150, "u" * 150, max_output_tokens=5)
    assert PROMPT.digest == same.digest and len(same.digest) == 32
    others = [
        Prompt(Kind.CODE, PROMPT.system, PROMPT.user),
        Prompt(Kind.SEEDS, PROMPT.system, PROMPT.user, sample=1),
        Prompt(Kind.SEEDS, PROMPT.system, PROMPT.user, schema="{}"),
        Prompt(Kind.SEEDS, PROMPT.system + PROMPT.user, ""),
    ]
    assert len({p.digest for p in [PROMPT, *others]}) == 5


# ---- budget --------------------------------------------------------------------------------------


def test_prices_are_read_or_refused() -> None:
    assert parse_prices(["a=1.25,10", "org/b=0,0"]) == {"a": Price(1.25, 10), "org/b": Price(0, 0)}
    for word in ("a", "a=1", "=1,2", "a=1,x", "a=-1,2", "a=nan,1", "a=1,inf", "a=1,2,3"):
        with pytest.raises(NotConfigured, match="MODEL=IN,OUT"):
            parse_prices([word])


def test_a_cost_limit_needs_a_price() -> None:
    with pytest.raises(NotConfigured, match="--price"):
        Ledger.of("m", Limits(max_cost=1.0), {"other": Price(1, 1)})
    assert Ledger.of("m", Limits(max_cost=1.0), {"m": Price(1, 1)}).price == Price(1, 1)


def test_tokens_are_counted_and_the_last_request_is_kept_small() -> None:
    ledger = Ledger(Limits(max_tokens=1000))
    assert ledger.admit(PROMPT).max_output_tokens == 900  # 100 go in
    assert ledger.charge(reply("", 100, 400)) is None
    assert ledger.spent == Spent(1, 100, 400, 0.5, None)
    assert ledger.admit(PROMPT).max_output_tokens == 400
    ledger.charge(reply("", 100, 100))
    with pytest.raises(BudgetSpent, match=r"--max-tokens 1000 .* after 700 tokens"):
        ledger.admit(PROMPT)


def test_cost_is_counted_and_limited() -> None:
    ledger = Ledger(Limits(max_cost=0.01), Price(10.0, 20.0))
    assert ledger.admit(PROMPT).max_output_tokens == 450  # 0.001 goes in, 0.009 buys 450
    assert ledger.charge(reply("", 100, 400)) == pytest.approx(0.009)
    assert ledger.spent.cost == pytest.approx(0.009)
    with pytest.raises(BudgetSpent, match=r"--max-cost 0\.01"):
        ledger.admit(PROMPT)


def test_without_limits_nothing_is_refused() -> None:
    ledger = Ledger()
    ledger.charge(reply("", 10**9, 10**9))
    assert ledger.admit(PROMPT) == PROMPT


# ---- retries -------------------------------------------------------------------------------------


def test_waits_double_with_jitter_up_to_the_cap() -> None:
    backoff, rng = Backoff(base_s=1, cap_s=8), random.Random(1)
    for attempt, full in enumerate((1, 2, 4, 8, 8)):
        waits = [backoff.wait_s(attempt, None, rng) for _ in range(50)]
        assert full / 2 <= min(waits) < max(waits) <= full
        assert len(set(waits)) > 40


def test_it_gives_up_after_its_attempts() -> None:
    asked = Scripted([lost()])
    waits: list[float] = []
    with pytest.raises(Unreachable):
        Retrying(asked, Backoff(attempts=4), lambda s: bool(waits.append(s))).complete(PROMPT)
    assert len(asked.prompts) == 4 and len(waits) == 3


def test_a_wait_past_all_patience_is_not_begun() -> None:
    asked = Scripted([Unreachable("later", retryable=True, retry_after_s=3600)])
    with pytest.raises(Unreachable):
        Retrying(asked, wait=lambda s: pytest.fail("it waited")).complete(PROMPT)


def test_a_refusal_is_not_asked_again() -> None:
    asked = Scripted([Refused("no")])
    with pytest.raises(Refused):
        Retrying(asked, wait=lambda s: pytest.fail("it waited")).complete(PROMPT)
    assert len(asked.prompts) == 1


def test_the_end_of_the_run_ends_the_wait() -> None:
    with pytest.raises(Stopped):
        Retrying(Scripted([lost()]), wait=lambda s: True).complete(PROMPT)


# ---- exchanges -----------------------------------------------------------------------------------


def recorded(client: Scripted, writer: Kept, **others: object) -> Recorded:
    return Recorded(client, "m", writer, now=lambda: NOON, **others)  # type: ignore[arg-type]


def test_every_reply_is_kept_with_its_accounts() -> None:
    kept = Kept()
    asking = recorded(Scripted(["text"]), kept, ledger=Ledger(price=Price(10, 20)))
    asking.complete(PROMPT)
    (e,) = kept.exchanges
    assert (e.kind, e.digest, e.date) == ("seeds", PROMPT.digest, "2026-11-30T12:00:00+00:00")
    assert (e.text, e.error, e.model) == ("text", "", "scripted")
    assert (e.tokens_in, e.tokens_out, e.seconds) == (100, 20, 0.5)
    assert e.cost == pytest.approx(0.0014) and e.about == PROMPT.about
    assert e.prompt == PROMPT and e.prompt.digest == PROMPT.digest


def test_every_failed_attempt_is_kept_too() -> None:
    kept = Kept()
    asked = Scripted([lost(), ProposerError("bad", request_id="r9", text="raw"), "ok"])
    asking = recorded(asked, kept)
    for _ in range(2):
        with pytest.raises(ProposerError):
            asking.complete(PROMPT)
    asking.complete(PROMPT)
    assert [(e.error, e.text, e.request_id) for e in kept.exchanges] == [
        ("gone", "", ""),
        ("bad", "raw", "r9"),
        ("", "ok", ""),
    ]


def test_a_wait_is_kept_once_and_found_again_until_it_is_answered() -> None:
    kept = Kept()
    asking = recorded(Scripted([Pending("waits"), Pending("waits"), "ok"]), kept)
    for _ in range(2):
        with pytest.raises(Pending):
            asking.complete(PROMPT)
    assert [e.pending for e in kept.exchanges] == [True]
    assert [e.digest for e in unanswered(kept.exchanges)] == [PROMPT.digest]
    asking.complete(PROMPT)
    assert unanswered(kept.exchanges) == ()


def test_what_was_spent_before_a_resume_counts() -> None:
    kept = Kept()
    recorded(Scripted(["text"]), kept).complete(PROMPT)
    ledger = Ledger(Limits(max_tokens=400))
    asking = recorded(Scripted(["x"]), Kept(), before=tuple(kept.exchanges), ledger=ledger)
    assert ledger.spent.tokens == 120
    other = Prompt(Kind.SKETCH, "s" * 150, "u" * 150)
    with pytest.raises(BudgetSpent):
        asking.complete(other)
    asking.complete(PROMPT)  # asked and paid for before


def test_exchanges_survive_the_disk_and_a_torn_line(tmp_path: Path) -> None:
    kept = Kept()
    recorded(Scripted(["Σ \n end"]), kept).complete(PROMPT)
    path = tmp_path / "exchanges.jsonl"
    assert read_exchanges(path) == ()
    ExchangeFile(path).write(kept.exchanges[0])
    with path.open("ab") as file:
        file.write(b'{"kind": "seeds", "dig')
    ExchangeFile(path).write(kept.exchanges[0])
    assert read_exchanges(path) == (kept.exchanges[0], kept.exchanges[0])
    assert len(path.read_bytes().split(b"\n")) == 4


# ---- keys ----------------------------------------------------------------------------------------


def test_keys_are_taken_out_of_text() -> None:
    key = "my-company-key-1234"
    text = (
        f"key {key}; sk-proj-abcdefghijklmnop; Authorization: Bearer abcdefgh.ijkl-mnop; "
        "http://joe:secretword@host/v1; sk-ab1***9xyz"
    )
    clean = redacted(text, (key,))
    for secret in (key, "abcdefghijklmnop", "ijkl-mnop", "secretword", "9xyz"):
        assert secret not in clean
    assert clean.count("[redacted]") == 5 and "host/v1" in clean


def test_an_ordinary_program_is_left_as_it_is() -> None:
    text = "Compute Mask S, causal  # the task-specific mask; bearer of news"
    assert redacted(text, ("x", "")) == text


def test_no_key_gets_into_a_kept_exchange(tmp_path: Path) -> None:
    key = "local-secret-key"
    exchange = Exchange(
        "seeds", "d", "t", "m", f"s {key}", f"u {key}", text=f"{key}", error=f"e {key}",
        about=(("base", key),), request_id=key,
    )  # fmt: skip
    path = tmp_path / "exchanges.jsonl"
    writer = ExchangeFile(path, (key,))
    writer.write(exchange)
    assert key not in path.read_text() and key not in repr(writer)
    assert set(json.loads(to_line(exchange))) == set(json.loads(path.read_text()))
