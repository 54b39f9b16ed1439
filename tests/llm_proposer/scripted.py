"""Clients for tests: one that answers by a script, and a writer that keeps exchanges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from llm_proposer.client import Prompt, Reply
from llm_proposer.errors import ProposerError
from llm_proposer.exchange import Exchange

Entry = str | ProposerError | Callable[[Prompt], str]


def reply(text: str, tokens_in: int = 100, tokens_out: int = 20, request_id: str = "") -> Reply:
    return Reply(text, tokens_in, tokens_out, 0.5, "scripted", request_id)


@dataclass
class Scripted:
    """Answers in order; the last entry answers all that follow."""

    script: list[Entry]
    prompts: list[Prompt] = field(default_factory=list)

    def complete(self, prompt: Prompt) -> Reply:
        entry = self.script[min(len(self.prompts), len(self.script) - 1)]
        self.prompts.append(prompt)
        if isinstance(entry, ProposerError):
            raise entry
        return reply(entry if isinstance(entry, str) else entry(prompt))


@dataclass
class Kept:
    """A writer that keeps exchanges in a list."""

    exchanges: list[Exchange] = field(default_factory=list)

    def write(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
