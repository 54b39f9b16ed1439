"""Text to logical lines and tokens: fences, prose, bullets and comments go, line numbers stay."""

from __future__ import annotations

import re
from dataclasses import dataclass

from codegen.tl.vocabulary import SCHEDULE_WORDS, STATEMENT_WORDS


@dataclass(frozen=True, slots=True)
class Line:
    """One statement's text: where it stands, how far it is indented, comments removed."""

    number: int
    indent: int
    text: str


@dataclass(frozen=True, slots=True)
class Token:
    """A name, number or symbol, with its 1-based column."""

    kind: str  # "name", "number", "symbol", "end"
    text: str
    column: int


#: What is read of a text; programs are far smaller. Beyond a limit there is one diagnostic.
MAX_TEXT = 100_000  #: characters
MAX_LINE = 1_000  #: characters of one statement, its continuation lines included
MAX_TOKENS = 200  #: of one statement

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<transpose>\.T\b|\^T\b|\.transpose\b(?:\(\))?|ᵀ)"
    r"|(?P<name>[A-Za-z_]\w*(?:\.(?!T\b|transpose\b)[A-Za-z_]\w*)*)"
    r"|(?P<symbol>==|!=|<=|>=|//|[-+*/%<>=()\[\]{},:;.&|^~!?@'\"`$\\×·])"
    r"|(?P<other>\S))"
)
_FENCE = re.compile(r"^\s*(```+|~~~+)\s*([\w.+-]*)\s*$")
_BULLET = re.compile(r"^(\s*)(?:[-*•]|\d+[.)])\s+(?=[A-Za-z])")
_CONTINUES = re.compile(r"^\s*(from|to|in coordinate|and (get|accumulate)|with offset)\b")
_DIVISION_LINE = re.compile(r"^\s*(for|Param|if)\b")


def tokens_of(text: str) -> tuple[Token, ...]:
    """Split one line into tokens, with an end token last."""
    found: list[Token] = []
    position = 0
    while match := _TOKEN.match(text, position):
        kind = match.lastgroup or "other"
        if kind == "transpose":
            token = Token("symbol", ".T", match.start(kind) + 1)
        elif kind == "other":
            token = Token("symbol", match.group(kind), match.start(kind) + 1)
        else:
            symbol = {"×": "*", "·": "*", "//": "/"}.get(match.group(kind), match.group(kind))
            token = Token(kind, symbol, match.start(kind) + 1)
        found.append(token)
        position = match.end()
    return (*found, Token("end", "", len(text) + 1))


def first_word(text: str) -> str:
    """Return the leading name of a line, or an empty string."""
    match = re.match(r"\s*([A-Za-z_]\w*)", text)
    return match.group(1) if match else ""


def is_statement(text: str) -> bool:
    """Whether a line begins like a TL statement and does not read like a sentence."""
    word = first_word(text)
    if word not in STATEMENT_WORDS and word not in SCHEDULE_WORDS:
        return False
    rest = text.strip()[len(word) :].strip().rstrip(":;.")
    match word:
        case "for":
            return re.match(r"[A-Za-z_]\w*\s*(=|in\b)", rest) is not None
        case "if":
            return rest != "" and re.match(r"(you|the|a|this|it|we|not)\b", rest) is None
        case "end" | "else":
            return re.fullmatch(r"(for|if|loop)?", rest) is not None
        case "Copy" | "Compute" | "Reshape" | "Allocate" | "Param":
            article = r"(the|a|an|all|each|this|is|are|of)\s+(?!from\b|to\b|in\b|and\b)[A-Za-z]"
            return re.match(article, rest) is None and rest != ""
        case _:
            return re.match(r"(until|for|the|is|are|on the|a)\b", rest) is None


def strip_comment(text: str) -> str:
    """Remove `#` and `//` comments; a tight `a//b` in a bound or Param is a division."""
    cut = len(text)
    for match in re.finditer(r"#|//", text):
        tight = re.search(r"[\w)]$", text[: match.start()]) and re.match(
            r"[\w(]", text[match.end() :]
        )
        if match.group() == "//" and tight and _DIVISION_LINE.match(text):
            continue
        cut = match.start()
        break
    return text[:cut]


def _fenced(lines: list[str]) -> list[tuple[int, int]]:
    """Return (first, last + 1) of each fenced block's inside, as 0-based line indices."""
    blocks: list[tuple[int, int]] = []
    start: int | None = None
    for index, line in enumerate(lines):
        if not _FENCE.match(line):
            continue
        if start is None:
            start = index + 1
        else:
            blocks.append((start, index))
            start = None
    if start is not None:  # a reply cut off before its closing fence
        blocks.append((start, len(lines)))
    return blocks


def _blank_block_comments(text: str) -> str:
    """Blank out `/* ... */`, line breaks kept; one that is never closed stays."""
    kept: list[str] = []
    position = 0
    while (start := text.find("/*", position)) >= 0 and (end := text.find("*/", start + 2)) >= 0:
        kept += [text[position:start], re.sub(r"[^\n]", " ", text[start : end + 2])]
        position = end + 2
    return "".join([*kept, text[position:]])


def raw_lines(text: str) -> list[str]:
    """Return the lines of a text, each cut one character past the longest that is read.

    Odd white space becomes blanks and control characters U+FFFD: diagnostics quote the text, on
    terminals too.
    """
    return [_printable(line[: MAX_LINE + 1]) for line in text.split("\n")]


def _printable(line: str) -> str:
    if line.isprintable():
        return line
    shown = (c if c.isprintable() or c == "\t" else " " if c.isspace() else "\ufffd" for c in line)
    return "".join(shown)


def source_lines(text: str) -> tuple[Line, ...]:
    """Return the lines of a reply that are meant as TL, prose around them left out.

    Inside fences every line counts. Without fences, everything from the first line that begins
    like a statement to the last one counts; what stands before and after is prose.
    """
    raw = raw_lines(_blank_block_comments(text.replace("\r\n", "\n")))
    blocks = _fenced(raw)
    holding = [b for b in blocks if any(is_statement(line) for line in raw[b[0] : b[1]])]
    if holding:
        wanted = [index for lo, hi in holding for index in range(lo, hi)]
    elif blocks:
        wanted = [index for lo, hi in blocks for index in range(lo, hi)]
    else:
        wanted = [i for i, line in enumerate(raw)]
        statements = [i for i in wanted if is_statement(_BULLET.sub(r"\1", raw[i]).strip("`"))]
        if statements:
            wanted = list(range(statements[0], statements[-1] + 1))
    return _logical([(index, raw[index]) for index in wanted])


def _logical(numbered: list[tuple[int, str]]) -> tuple[Line, ...]:
    lines: list[Line] = []
    for index, raw in numbered:
        foreign_directive = re.match(r"\s*#\s*(include|define|pragma)\b", raw)
        text = raw if foreign_directive else strip_comment(raw)
        text = _BULLET.sub(r"\1", text.expandtabs(4)).rstrip()
        if text.strip().startswith("`") and text.strip().endswith("`"):
            text = text.replace("`", "")
        if not text.strip():
            continue
        indent = len(text) - len(text.lstrip())
        if _CONTINUES.match(text) and lines:
            last = lines[-1]
            if len(last.text) > MAX_LINE:
                continue  # too long already, and said so by the parser
            lines[-1] = Line(last.number, last.indent, f"{last.text} {text.strip()}")
            continue
        lines.append(Line(index + 1, indent, text))
    return tuple(lines)
