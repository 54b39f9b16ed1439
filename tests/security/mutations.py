"""Real texts and JSON documents, and how the fuzzers damage them."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

from hostile import NAMES, NUMBERS, PLACES

from llm_proposer.builtin import programs

HERE = Path(__file__).parent
REPLIES = [p.read_text() for p in sorted((HERE.parent / "codegen/tl/replies").glob("*.txt"))]
TEXTS = [*REPLIES, *programs(True).values(), *programs(False).values(), *PLACES.values()]
LINES = sorted({line for text in TEXTS for line in text.splitlines()})
WORDS = sorted({w for line in LINES for w in re.findall(r"\w+|[^\w\s]", line)})
ODD = (
    *NAMES, *NUMBERS, "```", "/*", "*/", "//", "#", "\\", "\r", "\t", "\0", "\u2028", "\ud800",
    "\x1b[2J", "(", ")", "[", "]", "{", "}", ".T", "end", "for", "if", "else", "Param", "range(",
    '{"a": [', "<think>", "</think>", " " * 3000, "(" * 300, "-" * 300, "\n" * 50,
)  # fmt: skip


def mutated_text(rng: random.Random, texts: list[str] = TEXTS) -> str:
    """A real text with some characters, words or lines changed, cut, moved, repeated or spliced."""
    text = rng.choice(texts)
    for _ in range(rng.choice((1, 1, 2, 3, 5, 20))):
        if not text:
            return rng.choice(ODD)
        at, to = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        near = min(to, at + rng.randrange(8))
        match rng.randrange(10):
            case 0:
                text = text[:at] + text[near:]
            case 1:
                text = text[:at] + rng.choice(ODD) + text[near:]
            case 2:
                text = text[:at] + rng.choice(WORDS) + text[near:]
            case 3:
                text = text[:at] + chr(rng.choice((rng.randrange(128), rng.randrange(0xFFFF))))
                text += rng.choice(texts)[near:] if rng.random() < 0.2 else ""
            case 4:
                text = text[:at] + text[at:to][:400] * rng.choice((2, 3, 50)) + text[to:]
            case 5:
                text = text[:at] + rng.choice(texts)[at:]
            case 6:
                text = text[:at] + "\n" + rng.choice(LINES) + "\n" + text[at:]
            case 7:
                lines = text.split("\n")
                rng.shuffle(lines)
                text = "\n".join(lines)
            case 8:
                text = text[at:to] or text
            case _:
                words = re.split(r"(\W)", text)
                words[rng.randrange(len(words))] = rng.choice(WORDS)
                text = "".join(words)
    return text[:300_000]


SCALARS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**63, 2**64, 10**30, -(10**400), 0.5, -0.0, 1e308,
    "", "x", "../../x", "/etc/passwd", "a\nb", "\ud800", "\0", "é", "x" * 400, "9" * 30, [], {},
    [[]], [None], {"": 0}, {"outcome": "measured"}, {"v": 1},
)  # fmt: skip


def mutated_json(rng: random.Random, value: Any) -> Any:
    """A JSON value with some of its parts replaced, dropped, repeated or renamed."""
    if rng.random() < 0.08 or not isinstance(value, dict | list) or not value:
        return rng.choice(SCALARS)
    if isinstance(value, list):
        items = list(value)
        at = rng.randrange(len(items))
        match rng.randrange(5):
            case 0:
                del items[at]
            case 1:
                items.append(items[at])
            case _:
                items[at] = mutated_json(rng, items[at])
        return items
    changed = dict(value)
    key = rng.choice(list(changed))
    match rng.randrange(8):
        case 0:
            del changed[key]
        case 1:
            changed[rng.choice((key + "x", "", "__class__"))] = changed.pop(key)
        case 2:
            changed[key] = changed[rng.choice(list(changed))]
        case _:
            changed[key] = mutated_json(rng, changed[key])
    return changed


def replaced(rng: random.Random, value: Any) -> Any:
    """A JSON value with one part, any as likely as any other, replaced."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        node = waiting.pop()
        keys = (
            node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        )
        places += [(node, key) for key in keys]
        waiting += [node[key] for key in keys]
    if not places:
        return rng.choice(SCALARS)
    node, key = rng.choice(places)
    node[key] = rng.choice(SCALARS)
    return value


def mutated_document(rng: random.Random, value: Any) -> bytes:
    """The bytes of a JSON document, changed by structure, by bytes, or both."""
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        value = mutated_json(rng, value) if rng.random() < 0.5 else replaced(rng, value)
    data = bytearray(json.dumps(value, separators=(",", ":")).encode("ascii"))
    for _ in range(rng.choice((0, 0, 0, 1, 2, 8))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + rng.randrange(20)]
            case 2:
                data[at:at] = rng.choice((b"NaN", b"1e999", b"[" * 3000, b"9" * 5000, b"\n", b"\0"))
            case _:
                data[at:at] = data[at : at + rng.randrange(60)]
    return bytes(data)
