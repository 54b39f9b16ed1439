"""A cursor over the tokens of one line, and the expression grammar on it."""

from __future__ import annotations

from codegen.tl.ast import BinOp, Call, Compare, Expr, Index, Name, Num
from codegen.tl.identifiers import MAX_INT, MAX_NUMBER, name_fault
from codegen.tl.lexer import MAX_LINE, MAX_TOKENS, Line, Token, tokens_of
from codegen.tl.source import Diagnostic, Span
from codegen.tl.vocabulary import RESERVED, is_block_row

MAX_NESTING = 32  #: parentheses and signs around one term
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


class Fault(Exception):
    """One line cannot be read on; carries what is said about it."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(str(diagnostic))
        self.diagnostic = diagnostic


class Cursor:
    """Reads one line's tokens from left to right."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.tokens = tokens_of(line.text)
        self.at = 0
        self.depth = 0  #: of the term that is being read
        if len(line.text) > MAX_LINE or len(self.tokens) > MAX_TOKENS:
            raise self.fault(
                "too-long",
                f"a statement of more than {MAX_LINE} characters or {MAX_TOKENS} words and signs",
                "Name parts of it: `Param c = expression`",
            )

    @property
    def token(self) -> Token:
        """The next token."""
        return self.tokens[self.at]

    @property
    def span(self) -> Span:
        """Where the next token stands."""
        return Span(self.line.number, self.token.column)

    def rest(self) -> str:
        """The text from the next token to the end of the line."""
        return self.line.text[self.token.column - 1 :].strip()

    def fault(self, code: str, message: str, hint: str) -> Fault:
        """Return a fault at the next token."""
        return Fault(Diagnostic(self.span, code, message, hint))

    def peek(self, *texts: str) -> bool:
        """Whether the next tokens read `texts`."""
        ahead = self.tokens[self.at : self.at + len(texts)]
        return tuple(t.text for t in ahead) == texts

    def accept(self, *texts: str) -> bool:
        """Step over `texts` when they come next."""
        if not self.peek(*texts):
            return False
        self.at += len(texts)
        return True

    def expect(self, text: str, hint: str) -> None:
        """Step over `text`. Raises Fault with `hint` when something else stands there."""
        if not self.accept(text):
            found = f"`{self.token.text}`" if self.token.text else "the end of the line"
            raise self.fault("syntax", f"`{text}` expected, found {found}", hint)

    def name(self, what: str, hint: str) -> str:
        """Step over a name and return it. Raises Fault when none stands there."""
        if self.token.kind != "name" or self.token.text in RESERVED:
            found = f"`{self.token.text}`" if self.token.text else "the end of the line"
            raise self.fault("syntax", f"{what} expected, found {found}", hint)
        return self.identifier()

    def identifier(self) -> str:
        """Step over a name that can be one in C++ too. Raises Fault when it cannot."""
        text = self.token.text
        if (why := name_fault(text)) is not None and not is_block_row(text):
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            raise self.fault(
                "bad-name", f"`{ascii(shown)[1:-1]}` cannot be a name: {why}",
                "Use letters, digits and single `_`, such as `K_rope`",
            )  # fmt: skip
        self.at += 1
        return text

    def number(self) -> int | float:
        """Step over a number. Raises Fault when it is too large for a kernel."""
        text = self.token.text
        whole = text.isdigit()
        value: int | float = float(text)
        if value > (MAX_INT if whole else MAX_NUMBER):
            most = f"{MAX_INT}" if whole else f"{MAX_NUMBER:g}"
            raise self.fault(
                "bad-number", f"{text[:20]}{'...' * (len(text) > 20)} is larger than {most}",
                "Use a number that fits 32 bits; minus infinity is `-inf`",
            )  # fmt: skip
        self.at += 1
        return int(text) if whole else value

    def skip_trailing(self) -> None:
        """Step over the `.`, `;`, `,` and `:` that models put at the end of a line."""
        while self.token.text in (".", ";", ",", ":"):
            self.at += 1

    def finished(self) -> bool:
        """Whether the line is read to its end, trailing punctuation apart."""
        self.skip_trailing()
        return self.token.kind == "end"


def expression(cursor: Cursor) -> Expr:
    """Read an expression; a comparison only where the grammar has a condition or parentheses."""
    left = _sum(cursor)
    while cursor.token.text in COMPARISONS:
        op = cursor.token.text
        cursor.at += 1
        left = Compare(op, left, _sum(cursor))
    return left


def _sum(cursor: Cursor) -> Expr:
    left = _product(cursor)
    while cursor.token.text in ("+", "-"):
        op = cursor.token.text
        cursor.at += 1
        left = BinOp(op, left, _product(cursor))
    return left


def _product(cursor: Cursor) -> Expr:
    left = _unary(cursor)
    while cursor.token.text in ("*", "/", "%"):
        op = cursor.token.text
        cursor.at += 1
        left = BinOp(op, left, _unary(cursor))
    return left


def _unary(cursor: Cursor) -> Expr:
    if cursor.depth >= MAX_NESTING:
        raise cursor.fault(
            "too-deep", f"an expression more than {MAX_NESTING} levels deep",
            "Name parts of it: `Param c = expression`",
        )  # fmt: skip
    cursor.depth += 1
    try:
        return _signed(cursor)
    finally:
        cursor.depth -= 1


def _signed(cursor: Cursor) -> Expr:
    if not cursor.accept("-"):
        return _atom(cursor)
    operand = _unary(cursor)
    return Num(-operand.value) if isinstance(operand, Num) else BinOp("-", Num(0), operand)


def _atom(cursor: Cursor) -> Expr:
    token = cursor.token
    if token.kind == "number":
        return Num(cursor.number())
    if token.kind == "name":
        cursor.identifier()
        if token.text == "inf":
            return Num(float("inf"))
        if cursor.accept("("):
            return Call(token.text, arguments(cursor, ")"))
        if cursor.accept("["):
            return Index(token.text, arguments(cursor, "]"))
        return Name(token.text)
    if cursor.accept("("):
        inside = expression(cursor)
        cursor.expect(")", "Close the parenthesis")
        return inside
    found = f"`{token.text}`" if token.text else "the end of the line"
    raise cursor.fault(
        "syntax",
        f"a number or a name expected, found {found}",
        "Write an expression such as N / BN",
    )


def arguments(cursor: Cursor, close: str) -> tuple[Expr, ...]:
    """Read expressions separated by commas up to `close`, which is stepped over."""
    found: list[Expr] = []
    while not cursor.accept(close):
        found.append(expression(cursor))
        if not cursor.accept(","):
            cursor.expect(close, f"Separate by `,` and close with `{close}`")
            break
    return tuple(found)
