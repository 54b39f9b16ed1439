"""How a case ended."""

from __future__ import annotations

from dataclasses import dataclass

PASS, FAIL, NOT_IN_SCOPE = "pass", "fail", "not in scope"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One of the three states, and why."""

    state: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.state} ({self.why})" if self.why else self.state
