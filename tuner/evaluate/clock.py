"""Takes times: one cold window around each launch, between two events of the device.

The window is the referee's: the L2 cache is flushed, then event, launch, event, with no wait in
between; one full synchronisation comes at the end. Short kernels are timed as a graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tuner.evaluate.l2 import PersistingL2

Launcher = Callable[[], object]

FLUSH_BYTES = 256 << 20  #: more than the L2 of any card, and long enough to hide the host's part


@dataclass(frozen=True, slots=True)
class Batch:
    """Launches back to back: the time between two events around them, and by the wall clock."""

    event_us: float
    wall_us: float


class Clock(Protocol):
    """What `timing` needs to know of time."""

    def windows_us(
        self, calls: Sequence[Launcher], during: Launcher | None = None,
        before: Launcher | None = None,
    ) -> list[float]:  # fmt: skip
        """Return the time of each call in microseconds, L2 flushed before each.

        `during` is called once while the device is at work, `before` ahead of each window.
        """

    def batch(self, calls: Sequence[Launcher]) -> Batch:
        """Run the calls back to back, on an idle device and until it is idle again."""

    def tampered(self) -> str | None:
        """Return what was left set that falsifies a time, after putting it back; or None."""

    def graphed(self, calls: Sequence[Launcher]) -> Launcher:
        """Return one call that runs all of them without the host in between."""


class CudaClock:
    """The clock of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._device = device
        self._l2 = PersistingL2()

    def windows_us(
        self, calls: Sequence[Launcher], during: Launcher | None = None,
        before: Launcher | None = None,
    ) -> list[float]:  # fmt: skip
        """See `Clock.windows_us`. A fault of a kernel is raised here, by torch."""
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in calls
        ]
        for call, (start, stop) in zip(calls, events, strict=True):
            if before is not None:
                before()
            self._flush.zero_()
            start.record()
            call()
            stop.record()
        if during is not None:
            during()
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(stop) * 1e3 for start, stop in events]

    def batch(self, calls: Sequence[Launcher]) -> Batch:
        """See `Clock.batch`."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        start.record()
        for call in calls:
            call()
        stop.record()
        torch.cuda.synchronize(self._device)
        wall_us = (time.perf_counter() - began) * 1e6
        return Batch(start.elapsed_time(stop) * 1e3, wall_us)

    def tampered(self) -> str | None:
        """See `Clock.tampered`."""
        return self._l2.tampered()

    def graphed(self, calls: Sequence[Launcher]) -> Launcher:
        """See `Clock.graphed`. Raises RuntimeError where a call cannot be captured."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            calls[0]()  # lazy set-up must not be captured
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        replay: Launcher = graph.replay
        replay()
        torch.cuda.synchronize(self._device)
        return replay
