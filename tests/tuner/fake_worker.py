"""A worker without a process, for the tests of `tune verify`."""

from __future__ import annotations

from collections.abc import Callable

from tuner.job import DeviceCanary
from tuner.subjects import Subject


class FakeWorker:
    """Answers verify jobs from a function; counts what was started and closed."""

    def __init__(self, answer: Callable[[Subject], object], canary: object = True) -> None:
        self.answer, self.canary = answer, canary
        self.started = self.closed = 0

    def __call__(self, device: int) -> FakeWorker:
        self.started += 1
        return self

    def run(self, job: object) -> object:
        found = self.canary if isinstance(job, DeviceCanary) else self.answer(job.subject)
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self.closed += 1
