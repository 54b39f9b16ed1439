"""Keys and tokens never reach a record, a message or a log."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "[redacted]"
_LOOKS_SECRET = (
    re.compile(r"\bsk-[A-Za-z0-9_*.-]{8,}"),
    re.compile(r"(?<=\bBearer )[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),  # user and password of a URL
)
_SHORTEST = 4  #: a shorter "secret" (a local server's "x") would tear ordinary words apart


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Return `text` without the given secrets and without anything shaped like a key."""
    for secret in sorted((s for s in secrets if len(s) >= _SHORTEST), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    for pattern in _LOOKS_SECRET:
        text = pattern.sub(HIDDEN, text)
    return text
