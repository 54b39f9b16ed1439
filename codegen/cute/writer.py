"""Lines of C++ with indentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from codegen.errors import PlanError


class Writer:
    """Collects indented lines."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0

    def line(self, text: str = "") -> None:
        """Append one line at the current depth.

        Raises PlanError on what would be more than one line to a compiler: names come from texts
        that others wrote, and a comment must end where it seems to.
        """
        if not text.isprintable() or text.endswith("\\") or "??/" in text:
            raise PlanError(f"not one line of C++: {text[:80]!a}")
        self._lines.append("  " * self._depth + text if text else "")

    def lines(self, text: str) -> None:
        """Append each line of a block of text."""
        for line in text.strip("\n").splitlines():
            self.line(line)

    def parameters(self, parts: Sequence[str]) -> None:
        """Append the parameters of a function, one to a line; the parentheses are the caller's."""
        for k, part in enumerate(parts):
            self.line(f"    {part}{',' if k < len(parts) - 1 else ''}")

    @contextmanager
    def block(self, head: str, tail: str = "}") -> Iterator[None]:
        """Write `head {`, the body one level deeper, and the closing brace."""
        self.line(f"{head} {{")
        self._depth += 1
        yield
        self._depth -= 1
        self.line(tail)

    @contextmanager
    def unrolled(self, var: str, count: int, start: int = 0) -> Iterator[None]:
        """Write a fully unrolled loop over start <= var < count."""
        self.line("#pragma unroll")
        with self.block(f"for (int {var} = {start}; {var} < {count}; ++{var})"):
            yield

    def text(self) -> str:
        """Return everything written, with a final newline."""
        return "\n".join(self._lines) + "\n"
