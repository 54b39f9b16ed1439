"""TL text, as models write it, to a `Sketch`: every fault is collected, none stops the reading."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from codegen.errors import TLError
from codegen.tl import foreign
from codegen.tl.ast import Allocate, Expr, For, If, Param, Refused, Sketch, Stmt
from codegen.tl.lexer import MAX_TEXT, Line, first_word, is_statement, source_lines
from codegen.tl.source import Diagnostic, Span
from codegen.tl.statements import read_statement
from codegen.tl.tokens import Cursor, Fault, expression
from codegen.tl.vocabulary import SCHEDULE_WORDS

MAX_BLOCKS = 16  #: loops and branches inside each other
MAX_STATEMENTS = 500  #: of a program
MAX_FAULTS = 100  #: after so many the rest of a text is not read


@dataclass(frozen=True, slots=True)
class Reading:
    """What could be read of a text: the sketch, what is wrong, and the words of unread lines."""

    sketch: Sketch
    diagnostics: tuple[Diagnostic, ...]
    doubtful: frozenset[str]


def parse(text: str) -> Sketch:
    """Parse TL text. Raises TLError with every diagnostic, the checker's on the rest included."""
    reading = read(text)
    if not reading.diagnostics:
        return reading.sketch
    # a model repairs all faults in one go, so what the checker sees in the readable part counts
    from codegen.tl.checker import check

    if not reading.sketch.statements:
        raise TLError(reading.diagnostics)
    words = reading.doubtful
    further = [d for d in check(reading.sketch) if not words & set(_words(d.message))]
    both = sorted([*reading.diagnostics, *further], key=lambda d: (d.span.line, d.span.column))
    raise TLError(both)


def read(text: str) -> Reading:
    """Read what can be read of a text, never raising."""
    if len(text) > MAX_TEXT:
        what = f"the text has {len(text)} characters; at most {MAX_TEXT} are read"
        fault = Diagnostic(Span(1), "too-long", what, "Send the program alone")
        return Reading(Sketch(()), (fault,), frozenset())
    return _Reader(source_lines(text), text).reading()


def _rest_unread(line: Line, read: int) -> Diagnostic:
    what = f"{read} statements with more faults than are listed, the rest is not read"
    if read >= MAX_STATEMENTS:
        what = f"a program of more than {MAX_STATEMENTS} statements, the rest is not read"
    return Diagnostic(Span(line.number), "too-long", what, "Send one program and nothing else")


def _words(text: str) -> list[str]:
    return [w.strip("`,.;:()[]") for w in text.split()]


@dataclass(slots=True)
class _Open:
    """A block not yet closed: its head, where it starts and what stands in it so far."""

    line: Line
    colon: bool
    head: tuple[str, Expr, Expr] | Expr | None  # None is the outermost level
    body: list[Stmt] = field(default_factory=list)
    first_branch: tuple[Stmt, ...] | None = None

    def close(self) -> For | If:
        span = Span(self.line.number, self.line.indent + 1)
        if isinstance(self.head, tuple):
            return For(*self.head, tuple(self.body), span)
        assert self.head is not None
        if self.first_branch is None:
            return If(self.head, tuple(self.body), (), span)
        return If(self.head, self.first_branch, tuple(self.body), span)


class _Reader:
    def __init__(self, lines: tuple[Line, ...], text: str) -> None:
        self.lines = lines
        self.text = text
        self.diagnostics: list[Diagnostic] = []
        self.refused: list[Refused] = []
        self.doubtful: set[str] = set()
        self.stack = [_Open(Line(0, -1, ""), False, None)]
        # blocks without any `end` are closed by their indentation, as in the form with a colon
        self.by_indent = not any(first_word(line.text) in ("end", "endfor") for line in lines)

    def reading(self) -> Reading:
        if not any(is_statement(line.text) for line in self.lines):
            return Reading(Sketch(()), (foreign.nothing_there(self.text),), frozenset())
        others: list[Line] = []
        read = 0
        for line in self.lines:
            if len(self.diagnostics) >= MAX_FAULTS or read >= MAX_STATEMENTS:
                self.diagnostics.append(_rest_unread(line, read))
                break
            if self.by_indent:
                self._dedent(line)
            if not is_statement(line.text):
                others.append(line)
                self.doubtful.update(_words(line.text))
                continue
            read += 1
            try:
                self._line(line)
            except Fault as fault:
                self.diagnostics.append(fault.diagnostic)
                self.doubtful.update(_words(line.text))
        self.diagnostics += foreign.describe(others[:MAX_FAULTS])
        self._close_all()
        found = tuple(sorted(self.diagnostics, key=lambda d: (d.span.line, d.span.column)))
        sketch = Sketch(
            tuple(self.stack[0].body), tuple(self.refused), tuple(self.text.split("\n"))
        )
        return Reading(sketch, found, frozenset(self.doubtful))

    def _dedent(self, line: Line) -> None:
        while len(self.stack) > 1 and line.indent <= self.stack[-1].line.indent:
            if first_word(line.text) == "else" and line.indent == self.stack[-1].line.indent:
                return
            self._unclosed(self.stack[-1])
            self._close()

    def _unclosed(self, block: _Open) -> None:
        """Report a block that should have an `end` and has none."""
        if self.by_indent and block.colon:
            return
        self.diagnostics.append(
            Diagnostic(
                Span(block.line.number, block.line.indent + 1),
                "missing-end",
                f"`{block.line.text.strip()}` is never closed",
                "Write `end` after the last statement inside it",
            )
        )

    def _close(self) -> None:
        block = self.stack.pop()
        self.stack[-1].body.append(block.close())

    def _close_all(self) -> None:
        while len(self.stack) > 1:
            self._unclosed(self.stack[-1])
            self._close()

    def _line(self, line: Line) -> None:
        cursor = Cursor(line)
        word = first_word(line.text)
        if word in SCHEDULE_WORDS:
            remaining = self._schedule(line, word)
            if remaining is None:
                return
            cursor = remaining
            word = cursor.token.text
        if word in ("for", "if") and len(self.stack) > MAX_BLOCKS:
            raise cursor.fault(
                "too-deep", f"more than {MAX_BLOCKS} blocks inside each other", "Close some first"
            )
        match word:
            case "for":
                self.stack.append(self._for(cursor, line))
            case "if":
                cursor.accept("if")
                colon = line.text.rstrip().endswith(":")
                condition = expression(cursor)
                self._done(cursor, "Write one comparison: `if i == 0`")
                self.stack.append(_Open(line, colon, condition))
            case "else":
                self._else(line)
            case "end":
                if len(self.stack) == 1:
                    raise cursor.fault("syntax", "`end` closes nothing", "Take it out")
                self._close()
            case _:
                read = read_statement(cursor)
                self.diagnostics += read.diagnostics
                self.refused += read.refused
                for stmt in read.statements:
                    # sizes and memory are the whole program's, wherever they are written
                    top = isinstance(stmt, Param | Allocate)
                    self.stack[0 if top else -1].body.append(stmt)

    def _schedule(self, line: Line, word: str) -> Cursor | None:
        """Note a barrier or role; return a cursor on the TL statement that remains, if any."""
        cursor = Cursor(line)
        span = cursor.span
        names = tuple(t.text for t in cursor.tokens if t.kind == "name")
        cursor.at += 1
        if word in ("TMA", "Async", "WGMMA") and cursor.token.text in ("Copy", "Compute"):
            end = line.text.find(", arrive")
            text = line.text[:end] if end > 0 else line.text
            self.refused.append(Refused(line.text.strip(), names if end > 0 else (), span))
            rest = replace(line, text=text)
            cursor = Cursor(rest)
            cursor.at += 1
            return cursor
        self.refused.append(Refused(line.text.strip(), names, span))
        return None

    def _for(self, cursor: Cursor, line: Line) -> _Open:
        hint = "Write `for i = 0:N / BN`, statements, and `end`"
        cursor.accept("for")
        var = cursor.name("a loop variable", hint)
        if not cursor.accept("in"):
            cursor.expect("=", hint)
        if cursor.peek("range", "("):
            cursor.at += 2
            bounds = [expression(cursor)]
            while cursor.accept(","):
                bounds.append(expression(cursor))
            low = ("0", "lo")[len(bounds) > 1]
            self.diagnostics.append(
                Diagnostic(
                    Span(line.number, line.indent + 1),
                    "python",
                    f"`range` is Python: `{line.text.strip()}`",
                    f"Write `for {var} = {low}:hi` and close the block with `end`",
                )
            )
            lo, hi = expression(Cursor(Line(line.number, 0, "0"))), bounds[0]
            if len(bounds) > 1:
                lo, hi = bounds[:2]
            return _Open(line, True, (var, lo, hi))
        lo = expression(cursor)
        cursor.expect(":", hint)
        hi = expression(cursor)
        colon = cursor.token.text == ":"
        self._done(cursor, hint)
        return _Open(line, colon, (var, lo, hi))

    def _else(self, line: Line) -> None:
        block = self.stack[-1]
        if isinstance(block.head, tuple) or block.head is None or block.first_branch is not None:
            raise Cursor(line).fault("syntax", "`else` without an `if`", "Take it out")
        block.first_branch = tuple(block.body)
        block.body = []

    def _done(self, cursor: Cursor, hint: str) -> None:
        if not cursor.finished():
            raise cursor.fault("syntax", f"`{cursor.rest()}` does not belong here", hint)


def params_of(sketch: Sketch) -> tuple[Param, ...]:
    """Return the Param statements of a sketch in order."""
    return tuple(s for s in sketch.statements if isinstance(s, Param))
