"""Collects diagnostics, one for each fault and place."""

from __future__ import annotations

from codegen.tl.source import NOWHERE, Diagnostic, Span


class Report:
    """Diagnostics in the order they were found; the same one twice is kept once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, Span, str], Diagnostic] = {}

    def add(self, span: Span, code: str, message: str, hint: str) -> None:
        """Note a fault at `span`; `hint` is what to write instead.

        An undeclared name is one fault wherever it is used, so its first line speaks for all.
        """
        new = Diagnostic(span, code, message, hint)
        if code != "undeclared":
            self._found.setdefault((code, span, message), new)
            return
        before = self._found.get((code, NOWHERE, message))
        if before is None or (span.line, span.column) < (before.span.line, before.span.column):
            self._found[code, NOWHERE, message] = new

    def has(self, code: str) -> bool:
        """Whether a fault of this kind was found."""
        return any(key[0] == code for key in self._found)

    def sorted(self) -> tuple[Diagnostic, ...]:
        """Return all diagnostics in order of their lines."""
        return tuple(
            sorted(self._found.values(), key=lambda d: (d.span.line, d.span.column, d.code))
        )
