"""One request to a model and its reply; a client does nothing but turn the one into the other."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

MAX_REPLY_CHARS = 200_000  #: a longer reply is no program and no list of seeds


class Kind(StrEnum):
    """What is asked for."""

    SKETCH = "sketch"  # dataflow, from words or a reference
    CODE = "code"  # the paper's second stage: a sketch with every size filled in
    ONE_STEP = "one_step"  # TL code at once, without a sketch
    SEEDS = "seeds"  # parameter values worth trying
    REPAIR = "repair"  # a program mended by what is wrong with it


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request: pure text. `schema` is a JSON schema, as JSON text, that the reply should obey.

    `sample` tells independent askings of the same question apart. `max_output_tokens` is a limit
    and no part of the question. `about` says for whoever takes the reply in later what it was
    about: problem, sketch, base point.
    """

    kind: Kind
    system: str
    user: str
    schema: str = ""
    sample: int = 0
    max_output_tokens: int = 16384
    about: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @property
    def digest(self) -> str:
        """Stable name of the question: 32 hex digits."""
        parts = [self.kind.value, self.system, self.user, self.schema, self.sample]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model answered and what it took. `truncated`: it was cut off by a length limit."""

    text: str
    tokens_in: int
    tokens_out: int
    seconds: float
    model: str
    request_id: str = ""
    truncated: bool = False


class Client(Protocol):
    """Somebody who answers prompts."""

    def complete(self, prompt: Prompt) -> Reply:
        """Answer `prompt`. Raises ProposerError."""


def estimated_tokens(text: str) -> int:
    """Return about how many tokens `text` is, on the high side: three characters each."""
    return -(-len(text) // 3)
