"""From what the user said about a model to an advisor beside a run: the seam for the search."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llm_proposer.advisor import Advisor
from llm_proposer.budget import Ledger, Limits, parse_prices
from llm_proposer.client import Client
from llm_proposer.errors import NotConfigured
from llm_proposer.exchange import (
    EXCHANGES,
    Exchange,
    ExchangeFile,
    Recorded,
    read_exchanges,
    unanswered,
)
from llm_proposer.providers import batch, openai
from llm_proposer.retries import Retrying

BATCH = "batch:"
KNOWN = "builtin, openai, batch:DIR"


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The options about a model: `--proposer`, `--model`, `--base-url`, limits and prices."""

    proposer: str = "builtin"
    model: str | None = None
    base_url: str | None = None
    max_tokens: int | None = None
    max_cost: float | None = None
    prices: tuple[str, ...] = ()  #: MODEL=IN,OUT for a million tokens

    @property
    def asks_a_model(self) -> bool:
        """Whether anybody is asked at all."""
        return self.proposer != "builtin"


@dataclass(frozen=True, slots=True)
class Session:
    """A model that one run asks: the advisor, what it has cost, and what still waits."""

    advisor: Advisor
    client: Client  #: asks in the caller's own thread; do not mix with the advisor
    ledger: Ledger
    waiting: tuple[Exchange, ...]  #: requests of an earlier part of the run: `advisor.recall`

    def close(self) -> None:
        """Stop asking."""
        self.advisor.close()


def check_settings(settings: ModelSettings, environ: Mapping[str, str]) -> None:
    """Raise NotConfigured for settings that cannot work, before anything is written or sent."""
    proposer = settings.proposer
    if proposer not in ("builtin", "openai") and not proposer.startswith(BATCH):
        raise NotConfigured(f"unknown proposer {proposer!r}", hint=f"known proposers: {KNOWN}")
    if settings.max_tokens is not None and settings.max_tokens < 1:
        raise NotConfigured(f"--max-tokens {settings.max_tokens} is not at least 1")
    if settings.max_cost is not None and not 0 < settings.max_cost < float("inf"):
        raise NotConfigured(f"--max-cost {settings.max_cost:g} is not more than 0")
    prices = parse_prices(settings.prices)
    if settings.asks_a_model:
        Ledger.of(_model(settings), _limits(settings), prices)
    if proposer == "openai":
        openai.check(settings.model, settings.base_url, environ)
    elif proposer == BATCH:
        raise NotConfigured("no folder in --proposer batch:", hint="say --proposer batch:DIR")


def open_session(
    settings: ModelSettings,
    folder: Path,
    environ: Mapping[str, str],
    stop: threading.Event | None = None,
) -> Session:
    """Connect to the model and start its advisor; exchanges are kept in `folder`.

    What an earlier part of the run kept there counts against the limits. Raises NotConfigured.
    """
    check_settings(settings, environ)
    if not settings.asks_a_model:
        raise NotConfigured("the builtin proposer asks no model")
    ending = stop or threading.Event()
    provider: openai.OpenAIClient | batch.BatchClient
    secrets: tuple[str, ...] = ()
    if settings.proposer == "openai":
        provider = openai.connect(settings.model, settings.base_url, environ)
        secrets = provider.secrets
    else:
        provider = batch.connect(settings.proposer.removeprefix(BATCH), settings.model)
    model = _model(settings)
    path = folder / EXCHANGES
    before = read_exchanges(path)
    ledger = Ledger.of(model, _limits(settings), parse_prices(settings.prices))
    recorded = Recorded(provider, model, ExchangeFile(path, secrets), ledger, before)
    client = Retrying(recorded, wait=ending.wait)
    return Session(Advisor(client, stop=ending), client, ledger, unanswered(before))


def _model(settings: ModelSettings) -> str:
    return settings.model or batch.ANY_MODEL


def _limits(settings: ModelSettings) -> Limits:
    return Limits(settings.max_tokens, settings.max_cost)
