"""JSON as models write it: inside prose and fences, with trailing commas, cut off at the end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_COMMA = re.compile(r",(\s*[\]}])")
_COMMENT = re.compile(r"(?m)^\s*(?://|#).*$|(?<=[,{\[\]}0-9])\s*//.*$")
_SPELLED = {"True": "true", "False": "false", "None": "null"}
_PYTHON = re.compile(r"\b(?:True|False|None)\b")
_WRAPPERS = ("params", "parameters", "config", "configuration", "changes", "values", "point")
_MAX_OBJECTS = 1000


def objects(text: str) -> list[dict[str, Any]]:
    """Return the flat objects that a reply lists, in order; none when there is no JSON in it.

    A reply that reads as a whole gives its objects with nested parameters drawn in. Of one that
    does not, every complete innermost object counts, so that a cut costs only the last one.
    """
    whole = _whole(text)
    if whole is not None:
        return list(_listed(whole))
    found = (_loads(part) for part in _innermost(text))
    return [f for f in found if isinstance(f, dict)]


def _whole(text: str) -> Any:
    starts = [n for n in (text.find("{"), text.find("[")) if n >= 0]
    end = max(text.rfind("}"), text.rfind("]"))
    if not starts or end < min(starts):
        return None
    return _loads(text[min(starts) : end + 1])


def _loads(text: str) -> Any:
    """Parse JSON, trailing commas, comments and Python's spelling forgiven; None when it is none.

    Of an object that names a key twice the last value counts, as everywhere.
    """
    tidy = _COMMA.sub(r"\1", _COMMENT.sub("", text))
    candidates = [text, tidy]
    if '"' not in text:
        candidates.append(_PYTHON.sub(lambda m: _SPELLED[m.group()], tidy).replace("'", '"'))
    for candidate in candidates:
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):
            continue
    return None


def _listed(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a document: those in its lists, or itself when it has none."""
    if isinstance(value, list):
        for entry in value:
            yield from _listed(entry)
    elif isinstance(value, dict):
        inner = [v for v in value.values() if isinstance(v, list) and _has_objects(v)]
        if inner:
            for entries in inner:
                yield from _listed(entries)
        else:
            yield _flat(value)


def _has_objects(entries: list[Any]) -> bool:
    return any(isinstance(e, dict) for e in entries)


def _flat(value: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, entry in value.items():
        if isinstance(entry, dict) and str(key).lower() in _WRAPPERS:
            flat |= entry
        else:
            flat[str(key)] = entry
    return flat


def _innermost(text: str) -> Iterator[str]:
    """Yield the texts of complete objects that hold no other, quotes respected."""
    start: int | None = None
    quoted = escaped = False
    count = 0
    for position, char in enumerate(text):
        if quoted and start is not None:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"' or char == "\n":
                quoted = False
        elif char == '"' and start is not None:
            quoted = True
        elif char == "{":
            start = position
        elif char == "}" and start is not None:
            yield text[start : position + 1]
            start = None
            count += 1
            if count == _MAX_OBJECTS:
                return
