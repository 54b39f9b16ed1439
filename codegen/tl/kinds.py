"""What an axis of a tile runs along."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """What an axis of a tile runs along."""

    QUERY = "query rows"
    KEY = "key rows"
    FEATURE = "features"
    ONE = "one"
