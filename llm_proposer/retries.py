"""Asking again: backoff with jitter where that can help, at once or never elsewhere."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from llm_proposer.client import Client, Prompt, Reply
from llm_proposer.errors import ProposerError, Stopped


@dataclass(frozen=True, slots=True)
class Backoff:
    """How often and how long: waits double from `base_s` to `cap_s`, each times 0.5 to 1.

    A wait that the endpoint asks for is honoured to the second, unless it is past `longest_s`:
    then the request is given up.
    """

    attempts: int = 5
    base_s: float = 1.0
    cap_s: float = 60.0
    longest_s: float = 300.0

    def wait_s(self, attempt: int, asked_s: float | None, rng: random.Random) -> float:
        """Return the wait after failed attempt number `attempt`, from 0."""
        own = min(self.cap_s, self.base_s * 2.0**attempt) * rng.uniform(0.5, 1.0)
        return own if asked_s is None else max(asked_s, 0.0) + rng.uniform(0.0, 0.1) * own


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@dataclass(slots=True)
class Retrying:
    """A client that asks another one again when its error says so.

    `wait` sleeps and returns True when the run has ended meanwhile (`threading.Event.wait`).
    """

    client: Client
    backoff: Backoff = Backoff()
    wait: Callable[[float], bool] = _sleep
    rng: random.Random = field(default_factory=random.Random)

    def complete(self, prompt: Prompt) -> Reply:
        """Answer `prompt`. Raises the last ProposerError, or Stopped."""
        attempt = 0
        while True:
            try:
                return self.client.complete(prompt)
            except ProposerError as error:
                attempt += 1
                asked = error.retry_after_s
                if not error.retryable or attempt >= self.backoff.attempts:
                    raise
                if asked is not None and asked > self.backoff.longest_s:
                    raise
                pause = self.backoff.wait_s(attempt - 1, asked, self.rng)
            if self.wait(pause):
                raise Stopped("the run ended before the model answered")
