"""A clock without a device: each call says how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tuner.evaluate.clock import Batch, Launcher


class ScriptedClock:
    """Runs the calls and adds up what they say; `default_us` for calls that say nothing."""

    def __init__(self, first_factor: float = 1.0, default_us: float = 1000.0) -> None:
        self.log: list[str] = []
        self.graphs: list[int] = []
        self.first_factor = first_factor
        self.default_us = default_us
        self.left: str | None = None  #: what a kernel left set
        self._elapsed: float | None = None
        self._aside = 0.0

    def call(
        self, name: str, us: float, then: Callable[[], object] = lambda: None, aside_us: float = 0.0
    ) -> Launcher:
        """Make a call of a given length, and of work that no event sees."""

        def run() -> None:
            self.log.append(name)
            self._elapsed = (self._elapsed or 0.0) + us
            self._aside += aside_us
            then()

        return run

    def windows_us(
        self, calls: Sequence[Launcher], during: Launcher | None = None,
        before: Launcher | None = None,
    ) -> list[float]:  # fmt: skip
        """See `Clock.windows_us`."""
        if during is not None:
            during()
        times = []
        for n, call in enumerate(calls):
            if before is not None:
                before()
            self._elapsed = None
            call()
            us = self.default_us if self._elapsed is None else self._elapsed
            times.append(us * (self.first_factor if n == 0 else 1.0))
        return times

    def batch(self, calls: Sequence[Launcher]) -> Batch:
        """See `Clock.batch`."""
        self._elapsed, self._aside = None, 0.0
        for call in calls:
            call()
        event_us = self._elapsed or 0.0
        return Batch(event_us, event_us + self._aside + 40.0)

    def tampered(self) -> str | None:
        """See `Clock.tampered`."""
        left, self.left = self.left, None
        return left

    def graphed(self, calls: Sequence[Launcher]) -> Launcher:
        """See `Clock.graphed`."""
        self.graphs.append(len(calls))

        def replay() -> None:
            for call in calls:
                call()

        return replay
