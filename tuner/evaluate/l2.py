"""The share of the L2 cache that is set aside for data that must stay: none, while we measure.

A kernel whose inputs stay in L2 through the flush shows a time that no caller sees. Device code
cannot ask for it; host code can, by a limit of the context.
"""

from __future__ import annotations

import importlib
from typing import Any


class PersistingL2:
    """The current context's limit, put to its least value. Needs a CUDA context."""

    def __init__(self, driver: Any | None = None) -> None:
        self._driver: Any = driver or importlib.import_module("cuda.bindings.driver")
        self._limit = self._driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
        self._reset()
        self._least = self._bytes()

    def tampered(self) -> str | None:
        """Return how much was set aside since, after giving it back; or None."""
        now = self._bytes()
        if now == self._least:
            return None
        self._reset()
        return f"{now} bytes of L2 were set aside for data that persists"

    def _bytes(self) -> int:
        """Return the limit; 0 on a device that has none."""
        status, value = self._driver.cuCtxGetLimit(self._limit)
        return 0 if int(status) else int(value)

    def _reset(self) -> None:
        # a device without such a limit refuses both calls, and there is nothing to put back
        self._driver.cuCtxSetLimit(self._limit, 0)
        self._driver.cuCtxResetPersistingL2Cache()
