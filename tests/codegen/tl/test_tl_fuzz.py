"""Whatever a model writes, the front end answers with a program or with diagnostics."""

from __future__ import annotations

import random
import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.errors import TLError
from codegen.tl.bind import bind
from codegen.tl.checker import check, repaired
from codegen.tl.parser import parse, read
from codegen.tl.printer import to_text
from llm_proposer.builtin import programs
from space.gpu import gpu_named
from space.params import Point
from space.variant import DType, Problem

REPLIES = [p.read_text() for p in sorted((Path(__file__).parent / "replies").glob("*.txt"))]
TEXTS = [*REPLIES, *programs(True).values(), *programs(False).values()]
LINES = [line for text in TEXTS for line in text.splitlines()]
WORDS = sorted({w for line in LINES for w in re.findall(r"\w+|[^\w\s]", line)})
POINT = Point.of({"BM": 64, "BN": 32})


def damaged(seed: int) -> str:
    """A real program with one to four lines dropped, moved, repeated or changed by a word."""
    chance = random.Random(seed)
    lines = chance.choice(TEXTS).splitlines()
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(lines))
        kind = chance.randrange(5)
        if kind == 0 and len(lines) > 1:
            del lines[at]
        elif kind == 1:
            lines.insert(at, chance.choice(LINES))
        elif kind == 2:
            other = chance.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        else:
            words = re.findall(r"\w+|[^\w\s]|\s+", lines[at])
            if words:
                words[chance.randrange(len(words))] = chance.choice(WORDS)
                lines[at] = "".join(words)
    return "\n".join(lines)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9))
def test_damaged_programs_give_diagnostics_or_programs(seed: int) -> None:
    text = damaged(seed)
    reading = read(text)
    diagnostics = reading.diagnostics + check(reading.sketch)
    lines = len(text.split("\n"))
    assert all(d.hint and d.message and 0 <= d.span.line <= lines for d in diagnostics)
    try:
        sketch = parse(text)
    except TLError as error:
        assert error.diagnostics
        return
    if sketch.statements:  # barriers alone are read, and refused by the checker
        assert parse(to_text(sketch)).statements == sketch.statements
    for causal in (False, True):
        problem = Problem("mha", DType.FP16, 64, 64, causal)
        check(sketch, problem, gpu_named("t4"), POINT)
        try:
            bind(sketch, problem, POINT)
        except TLError as error:
            assert error.diagnostics
    if (offered := repaired(sketch)) is not None:
        assert check(parse(offered)) == ()


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_read(text: str) -> None:
    reading = read(text)
    assert reading.diagnostics or reading.sketch.statements or reading.sketch.refused
