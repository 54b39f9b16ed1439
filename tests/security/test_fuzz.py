"""A few seconds of every fuzzer, always the same ones; and texts made to be slow."""

from __future__ import annotations

import time
from collections.abc import Callable

import fuzz
import pytest

from codegen.errors import TLError
from codegen.tl.lexer import MAX_TEXT
from codegen.tl.parser import parse, read
from runs import codec

EXAMPLES = {
    "text": 150, "replies": 60, "proposals": 100, "codec": 400, "store": 25, "manifest": 150,
    "resume": 12,
}  # fmt: skip


@pytest.mark.parametrize("name", fuzz.FUZZERS)
def test_a_fuzzer_finds_nothing(name: str) -> None:
    fuzz.run(name, EXAMPLES[name], 20261130)


def test_a_fuzzer_finds_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that lets one exception through is caught by its fuzzer."""

    def careless(text: str) -> None:
        raise KeyError(text)

    monkeypatch.setattr(codec, "decode_event", careless)
    with pytest.raises(KeyError):
        fuzz.run("codec", 50, 1)
    monkeypatch.setattr(fuzz, "read", careless)
    with pytest.raises(KeyError):
        fuzz.run("text", 50, 1)


MB2 = 2 << 20
START = "Copy Q from global to shared\n"
#: name -> a text of about n characters that a careless reader takes long for, or falls over
SLOW: dict[str, Callable[[int], str]] = {
    "open comments": lambda n: START + "/*/" * (n // 3),
    "spaces": lambda n: START + "{" + " " * n + "x",
    "fence of spaces": lambda n: "```" + " " * n + "x y\n" + START,
    "backticks": lambda n: "`" * n + "!\n" + START,
    "brackets": lambda n: "[" * n,
    "braces in braces": lambda n: "{[" * (n // 2) + "]}" * 3,
    "parentheses": lambda n: START + "Param c = " + "(" * n + "1" + ")" * n,
    "signs": lambda n: START + "Param c = " + "-" * n + "1",
    "sums": lambda n: START + "Param c = 1" + " + 1" * (n // 4),
    "digits": lambda n: START + "Param c = " + "9" * n,
    "continuations": lambda n: START + "from global\n" * (n // 12),
    "divisions": lambda n: START + "Param c = 1" + "//1" * (n // 3),
    "blocks": lambda n: START + "for i = 0:N\n" * (n // 12),
    "blocks by indent": lambda n: START + "".join(f"{' ' * k}if i == 0:\n" for k in range(n // 99)),
    "statements": lambda n: START * (n // 29),
    "faults": lambda n: START + "Compute Frobnicate S\n" * (n // 21),
    "foreign lines": lambda n: START + "load_tile(Q, K)\n" * (n // 16) + START,
    "choices": lambda n: START + "Param BM in {" + "64, " * (n // 4) + "64}",
    "squares": lambda n: START + "Param c0 = 9\n" + "".join(
        f"Param c{k + 1} = c{k} * c{k}\n" for k in range(min(n // 20, 400))
    ),
    "names": lambda n: START + "Compute Softmax " + "S" * n,
    "line breaks": lambda n: START + "\n" * n + START,
    "carriage returns": lambda n: START + "\r" * n + START,
    "a long line of prose": lambda n: "Sure, here it is. " * (n // 18) + "\n" + START,
}  # fmt: skip


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("size", [MAX_TEXT - 200, MB2])
def test_no_text_is_slow(name: str, size: int) -> None:
    text = SLOW[name](size)
    started = time.process_time()
    reading = read(text)
    try:
        parse(text)
    except TLError as error:
        assert len(error.diagnostics) < 1000
    assert time.process_time() - started < 4
    if len(text) > MAX_TEXT:
        assert [d.code for d in reading.diagnostics] == ["too-long"]
