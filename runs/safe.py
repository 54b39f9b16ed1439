"""Which names may become a file's."""

from __future__ import annotations

import re

MAX_NAME = 128  #: characters

_SAFE_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}")


def is_safe_name(name: str) -> bool:
    """Whether `name` can be a file's name: letters, digits, `.`, `_`, `-`, no `.` first."""
    return _SAFE_NAME.fullmatch(name) is not None
