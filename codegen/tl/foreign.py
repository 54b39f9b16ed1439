"""What a reply holds that is not TL: JSON, CUDA, Python, invented statements, each by name."""

from __future__ import annotations

import json
import re

from codegen.tl.lexer import Line, first_word, raw_lines
from codegen.tl.source import Diagnostic, Span
from codegen.tl.vocabulary import STATEMENT_WORDS

_CUDA = re.compile(
    r"__\w+__|#\s*(include|define|pragma)|threadIdx|cute::|cutlass|<<<|\basm\b|\bconstexpr\b"
    r"|^\s*(float|half|int|auto|void|const|template|extern|unsigned|bool|uint32_t|using)\b"
    r"|cp_async|ldmatrix|wmma|nvcuda|^\s*[{}]\s*;?\s*$|\bstd::|\+\+\s*\)"
)
_PYTHON = re.compile(
    r"^\s*(import|from\s+\w+\s+import|def|class|return|while|with|print|elif|try|except|assert)\b"
    r"|\brange\(|\btorch\.|\btl\.|\btriton\b|\bnp\.|^\s*@\w+|\blambda\b\s*\w*\s*:|\bself\."
    r"|^\s*\w+(\[.*\])?\s*(\+|-|\*|/|@)?=[^=]"
)
_MOVES = re.compile(r"\b(from|to|in(to)?) (global|shared|registers?|smem|gmem)\b")
_REMEDIES = (
    (re.compile(r"store|write|save", re.I), "Write `Copy O from register to global`"),
    (
        re.compile(r"load|fetch|read|copy|cp_async|memcpy", re.I),
        "Write `Copy K (BN, D) in coordinate [L = i] from global to shared`",
    ),
    (re.compile(r"mma|gemm|matmul|dot|einsum|@", re.I), "Write `Compute GEMM Q, K.T and get S`"),
    (re.compile(r"softmax", re.I), "Write `Compute Softmax S`"),
    (re.compile(r"mask", re.I), "Write `Compute Mask S, causal`"),
    (re.compile(r"scale", re.I), "Write `Compute Scale S, scale`"),
    (
        re.compile(r"exp|relu|tanh|sigmoid|max|sum", re.I),
        "Write `Compute OP NAME`, for example `Compute Exp S`",
    ),
)
_STATEMENTS = (
    "TL has the statements Param, Allocate, Copy, Compute, Reshape, for ... end and if ... end"
)


def is_json(text: str) -> bool:
    """Whether the text between the first bracket and the last reads as JSON, commas forgiven."""
    first = re.search(r"[\[{]", text)
    last = max(text.rfind("]"), text.rfind("}"))
    if first is None or last < first.start():
        return False
    candidate = re.sub(r",(\s*[\]}])", r"\1", text[first.start() : last + 1])
    try:
        value = json.loads(candidate)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict | list) and bool(value)


def kind_of(text: str) -> str:
    """Return what a line that is not TL looks like: JSON, CUDA, Python, statement or prose."""
    if re.match(r'\s*[\[{\]}]*\s*("[\w ]+"\s*:|[\[{\]}],?\s*$)', text) and "=" not in text:
        return "JSON"
    if _CUDA.search(text):
        return "CUDA"
    if _PYTHON.search(text) and first_word(text) not in STATEMENT_WORDS:
        return "Python"
    word = first_word(text).lower()
    if word in (w.lower() for w in STATEMENT_WORDS) or _MOVES.search(text):
        return "statement"
    # a sentence ends like one and has many words, none of them a call or an assignment
    words = text.split()
    if len(words) >= 4 and not re.search(r"\w\(|=|\[|;", text):
        return "prose"
    return "statement"


def remedy_for(text: str) -> str:
    """Return the TL statement that does what an invented one seems to mean."""
    return next((hint for pattern, hint in _REMEDIES if pattern.search(text)), _STATEMENTS)


def describe(lines: list[Line]) -> list[Diagnostic]:
    """Describe lines that are not TL, neighbours of one kind in one message."""
    diagnostics: list[Diagnostic] = []
    group: list[Line] = []
    for line in [*lines, None]:
        kind = kind_of(line.text) if line else ""
        if group and (
            line is None or kind != kind_of(group[0].text) or line.number > group[-1].number + 1
            or kind == "statement"
        ):  # fmt: skip
            diagnostics.append(_describe_group(kind_of(group[0].text), group))
            group = []
        if line is not None:
            group.append(line)
    return diagnostics


def _describe_group(kind: str, group: list[Line]) -> Diagnostic:
    span = Span(group[0].number, group[0].indent + 1)
    text = group[0].text.strip()
    where = f" (lines {group[0].number} to {group[-1].number})" if len(group) > 1 else ""
    if kind == "statement":
        word = first_word(text) or text.split()[0]
        for known in STATEMENT_WORDS:
            if word.lower() == known.lower():
                return Diagnostic(
                    span, "keyword-case", f"`{word}` is not a TL keyword", f"Write `{known}`"
                )
        return Diagnostic(
            span, "invented-statement", f"`{word}` is not a TL statement", remedy_for(text)
        )
    if kind == "prose":
        return Diagnostic(
            span,
            "prose",
            f"this line is prose, not TL{where}: `{text[:60]}`",
            "Put a comment behind `#`, or leave it out",
        )
    hint = _STATEMENTS if kind == "JSON" else remedy_for(text)
    code = {"JSON": "json", "CUDA": "cuda", "Python": "python"}[kind]
    return Diagnostic(span, code, f"this is {kind}, not TL{where}: `{text[:60]}`", hint)


def nothing_there(text: str) -> Diagnostic:
    """Describe a reply that holds no TL statement at all."""
    lines = raw_lines(text)
    first = next((n for n, line in enumerate(lines, 1) if line.strip()), 1)
    if is_json(text):
        start = next((n for n, line in enumerate(lines, 1) if re.match(r"\s*[\[{]", line)), first)
        return Diagnostic(
            Span(start),
            "json",
            "this is JSON, not TL",
            "A program is TL text; parameter seeds belong in a reply to a request for seeds",
        )
    for code, name, pattern in (("cuda", "CUDA", _CUDA), ("python", "Python", _PYTHON)):
        hit = next((n for n, line in enumerate(lines, 1) if pattern.search(line)), None)
        if hit is not None:
            return Diagnostic(Span(hit), code, f"this is {name}, not TL", _STATEMENTS)
    return Diagnostic(Span(first), "empty", "there is no TL statement", _STATEMENTS)
