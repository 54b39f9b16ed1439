"""Positions in TL text and what is said about them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Where a node stands: 1-based line and column of the text the user gave."""

    line: int
    column: int = 1


NOWHERE = Span(0, 0)


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One fault: where, what, and what to write instead.

    `code` is a stable short name (`missing-reshape`), for tests and for counting by kind.
    """

    span: Span
    code: str
    message: str
    hint: str

    def __str__(self) -> str:
        return f"line {self.span.line}: {self.message}. {self.hint}"
