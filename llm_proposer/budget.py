"""What the model may cost and what it has cost so far."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from llm_proposer.client import Prompt, Reply, estimated_tokens
from llm_proposer.errors import BudgetSpent, NotConfigured

LEAST_OUTPUT_TOKENS = 256  #: with less room than this a reply is cut off before it says anything
_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Price:
    """Cost of a million tokens, in the user's currency."""

    per_million_in: float
    per_million_out: float

    def of(self, tokens_in: int, tokens_out: int) -> float:
        """Return the cost of one request."""
        total = tokens_in * self.per_million_in + tokens_out * self.per_million_out
        return total / _MILLION


def parse_prices(words: Iterable[str]) -> dict[str, Price]:
    """Read prices given as `MODEL=IN,OUT`, per million tokens. Raises NotConfigured."""
    prices: dict[str, Price] = {}
    for word in words:
        model, _, numbers = word.rpartition("=")
        try:
            per_in, per_out = (float(n) for n in numbers.split(","))
        except ValueError:
            per_in = per_out = math.nan
        if not model or not (0 <= per_in < math.inf and 0 <= per_out < math.inf):
            raise NotConfigured(
                f"price {word!r} is not MODEL=IN,OUT",
                hint="give the cost of a million tokens in and out, such as my-model=1.25,10",
            )
        prices[model] = Price(per_in, per_out)
    return prices


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use; None is no limit."""

    max_tokens: int | None = None
    max_cost: float | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """What was used so far. `cost` is None when the model has no price."""

    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    seconds: float = 0.0
    cost: float | None = 0.0

    @property
    def tokens(self) -> int:
        """Tokens in and out."""
        return self.tokens_in + self.tokens_out

    @property
    def facts(self) -> tuple[tuple[str, int | float | None], ...]:
        """Everything by name, for a note in the run's journal."""
        return (
            ("requests", self.requests),
            ("tokens_in", self.tokens_in),
            ("tokens_out", self.tokens_out),
            ("seconds", round(self.seconds, 3)),
            ("cost", self.cost),
        )


@dataclass(slots=True)
class Ledger:
    """Counts what requests took, and refuses the one that would pass a limit."""

    limits: Limits = Limits()
    price: Price | None = None
    spent: Spent = field(default_factory=Spent)

    @classmethod
    def of(cls, model: str, limits: Limits, prices: Mapping[str, Price]) -> Ledger:
        """Return the ledger of a run. Raises NotConfigured when a cost limit has no price."""
        price = prices.get(model)
        if limits.max_cost is not None and price is None:
            raise NotConfigured(
                f"--max-cost needs the price of {model}",
                hint=f"say --price {model}=IN,OUT, the cost of a million tokens in and out",
            )
        return cls(limits, price)

    def admit(self, prompt: Prompt) -> Prompt:
        """Return `prompt` with its output limited to what is left. Raises BudgetSpent."""
        tokens_in = estimated_tokens(prompt.system + prompt.user + prompt.schema)
        room = float(prompt.max_output_tokens)
        if self.limits.max_tokens is not None:
            room = min(room, self.limits.max_tokens - self.spent.tokens - tokens_in)
        if self.limits.max_cost is not None and self.price is not None:
            left = self.limits.max_cost - (self.spent.cost or 0.0) - self.price.of(tokens_in, 0)
            if self.price.per_million_out > 0:
                room = min(room, left / self.price.per_million_out * _MILLION)
            elif left < 0:
                room = 0
        if room < min(LEAST_OUTPUT_TOKENS, prompt.max_output_tokens):
            raise BudgetSpent(self._why())
        return replace(prompt, max_output_tokens=int(room))

    def charge(self, reply: Reply) -> float | None:
        """Count one reply and return its cost, None without a price."""
        cost = None if self.price is None else self.price.of(reply.tokens_in, reply.tokens_out)
        self.count(reply.tokens_in, reply.tokens_out, reply.seconds, cost)
        return cost

    def count(self, tokens_in: int, tokens_out: int, seconds: float, cost: float | None) -> None:
        """Count one request of this run or of the part before a resume."""
        before = self.spent
        total = None if cost is None or before.cost is None else before.cost + cost
        self.spent = Spent(
            before.requests + 1,
            before.tokens_in + tokens_in,
            before.tokens_out + tokens_out,
            before.seconds + seconds,
            total,
        )

    def _why(self) -> str:
        used = f"{self.spent.tokens} tokens"
        if self.spent.cost:
            used += f" at a cost of {self.spent.cost:.4g}"
        parts = []
        if self.limits.max_tokens is not None:
            parts.append(f"--max-tokens {self.limits.max_tokens}")
        if self.limits.max_cost is not None:
            parts.append(f"--max-cost {self.limits.max_cost:g}")
        return f"{' and '.join(parts)} leave no room for another request after {used}"
