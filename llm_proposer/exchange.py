"""Every request and its reply or error, as one line of exchanges.jsonl in the run's folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from llm_proposer.budget import Ledger
from llm_proposer.client import MAX_REPLY_CHARS, Client, Kind, Prompt, Reply
from llm_proposer.errors import NotConfigured, Pending, ProposerError
from llm_proposer.redact import redacted
from runs.errors import StoreError
from runs.files import read_regular

EXCHANGES = "exchanges.jsonl"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and how it ended: `text` of the reply, or `error` when there was none."""

    kind: str
    digest: str
    date: str  #: UTC, ISO 8601
    model: str
    system: str
    user: str
    schema: str = ""
    sample: int = 0
    text: str = ""
    error: str = ""
    pending: bool = False  #: the reply may still come
    request_id: str = ""
    truncated: bool = False
    tokens_in: int = 0
    tokens_out: int = 0
    seconds: float = 0.0
    cost: float | None = None
    about: tuple[tuple[str, str], ...] = ()

    @property
    def prompt(self) -> Prompt:
        """The request again; its digest is the same."""
        kind = Kind(self.kind)
        return Prompt(kind, self.system, self.user, self.schema, self.sample, about=self.about)

    @property
    def answered(self) -> bool:
        """Whether a reply came."""
        return not self.error and not self.pending


def to_line(exchange: Exchange, secrets: Iterable[str] = ()) -> str:
    """Return an exchange as one line of JSON, without anything secret."""
    hidden = tuple(secrets)

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return redacted(value, hidden)
        if isinstance(value, list | tuple):
            return [clean(v) for v in value]
        return value

    return json.dumps({k: clean(v) for k, v in asdict(exchange).items()})


def from_line(line: str) -> Exchange | None:
    """Read one line; None when it is torn or no exchange."""
    try:
        data = json.loads(line)
        about = tuple((str(k), str(v)) for k, v in data.pop("about", ()))
        known = {f.name for f in fields(Exchange)}
        exchange = Exchange(about=about, **{k: v for k, v in data.items() if k in known})
        Kind(exchange.kind)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    return exchange if _is_sound(exchange) else None


def _is_sound(e: Exchange) -> bool:
    """Whether every field has its type and can be shown."""
    words = (e.kind, e.digest, e.date, e.model, e.system, e.user, e.schema, e.text, e.error,
             e.request_id)  # fmt: skip
    whole = (e.sample, e.tokens_in, e.tokens_out)
    rates = (e.seconds, 0.0 if e.cost is None else e.cost)
    return (
        all(type(w) is str for w in words)
        and all(type(n) is int for n in whole)
        and all(type(x) in (int, float) for x in rates)
        and type(e.pending) is bool
        and type(e.truncated) is bool
    )


def read_exchanges(path: Path) -> tuple[Exchange, ...]:
    """Return the exchanges kept in a file, in order, without a torn line; none without a file.

    Raises StoreError when it is there and cannot be read.
    """
    try:
        lines = read_regular(path).decode(errors="replace").split("\n")
    except (FileNotFoundError, IsADirectoryError):
        return ()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from None
    return tuple(e for line in lines if line and (e := from_line(line)) is not None)


def unanswered(exchanges: Iterable[Exchange]) -> tuple[Exchange, ...]:
    """Return the requests that still wait for a reply, oldest first."""
    waiting: dict[str, Exchange] = {}
    for exchange in exchanges:
        if exchange.pending:
            waiting.setdefault(exchange.digest, exchange)
        else:
            waiting.pop(exchange.digest, None)
    return tuple(waiting.values())


class Writer(Protocol):
    """Where exchanges are kept."""

    def write(self, exchange: Exchange) -> None:
        """Keep an exchange for good. Raises OSError."""


@dataclass(frozen=True, slots=True)
class ExchangeFile:
    """A writer that appends to a file; each line is on disk when `write` returns."""

    path: Path
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def write(self, exchange: Exchange) -> None:
        """Append one line and sync it. Raises OSError."""
        line = to_line(exchange, self.secrets).encode() + b"\n"
        with self.path.open("ab+") as file:
            if file.tell() and not _ends_line(file):
                line = b"\n" + line  # after a line that a kill tore
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def _ends_line(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) == b"\n")


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True)
class Recorded:
    """A client that keeps every exchange of another one and charges it to the ledger.

    `before` is what an earlier part of the run kept: it counts against the limits, and a reply
    that was kept then is not kept or charged again.
    """

    client: Client
    model: str
    writer: Writer
    ledger: Ledger = field(default_factory=Ledger)
    before: tuple[Exchange, ...] = ()
    now: Callable[[], datetime] = _now
    clock: Callable[[], float] = time.monotonic
    _waiting: set[str] = field(default_factory=set)
    _answered: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for e in self.before:
            if e.pending:
                self._waiting.add(e.digest)
            elif e.answered:
                self._answered.add((e.digest, e.request_id))
                self.ledger.count(e.tokens_in, e.tokens_out, e.seconds, e.cost)

    def complete(self, prompt: Prompt) -> Reply:
        """Answer `prompt`. Raises ProposerError, BudgetSpent before anything is sent."""
        paid = any(digest == prompt.digest for digest, _ in self._answered)
        admitted = prompt if paid else self.ledger.admit(prompt)
        started = self.clock()
        try:
            reply = self.client.complete(admitted)
        except Pending as error:
            if prompt.digest not in self._waiting:
                self._waiting.add(prompt.digest)
                self._keep(prompt, pending=True, error=str(error))
            raise
        except ProposerError as error:
            self._keep(
                prompt,
                error=str(error),
                text=error.text[:MAX_REPLY_CHARS],
                request_id=error.request_id,
                seconds=self.clock() - started,
            )
            raise
        # a folder of replies gives the same one again to whoever asks again: paid for once
        if reply.request_id and (prompt.digest, reply.request_id) in self._answered:
            return reply
        self._answered.add((prompt.digest, reply.request_id))
        self._keep(
            prompt,
            model=reply.model,
            text=reply.text,
            request_id=reply.request_id,
            truncated=reply.truncated,
            tokens_in=reply.tokens_in,
            tokens_out=reply.tokens_out,
            seconds=reply.seconds,
            cost=self.ledger.charge(reply),
        )
        return reply

    def _keep(self, prompt: Prompt, **facts: Any) -> None:
        exchange = Exchange(
            kind=prompt.kind.value,
            digest=prompt.digest,
            date=self.now().isoformat(timespec="seconds"),
            model=self.model,
            system=prompt.system,
            user=prompt.user,
            schema=prompt.schema,
            sample=prompt.sample,
            about=prompt.about,
        )
        try:
            self.writer.write(replace(exchange, **facts))
        except OSError as error:
            why = error.strerror or str(error)
            raise NotConfigured(f"an exchange with the model cannot be kept: {why}") from None
