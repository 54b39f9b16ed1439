"""Watches whether the card still is what it was: the first right kernel is timed again and again.

Times of one search are compared with each other though hours may lie between them. What heat, a
neighbour or a changed power limit did meanwhile shows in the kernel that did not change.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace

from runs.record import Measured, Note, Outcome
from tuner.job import EvalJob

EVERY = 25  #: judged trials between two times of the first kernel
WORTH_SAYING = 0.02

Submit = Callable[[EvalJob], "Future[Outcome]"]


class DriftWatch:
    """Submits the first right kernel of each problem again after every `EVERY` trials."""

    def __init__(self, submit: Submit, every: int = EVERY) -> None:
        self._submit = submit
        self._every = every
        self._lock = threading.Lock()  # futures report from the pool's threads
        self._trials = 0
        self._first: dict[str, tuple[EvalJob, Measured]] = {}
        self._again: list[tuple[int, str, Future[Outcome]]] = []

    def saw(self, job: EvalJob, future: Future[Outcome]) -> None:
        """Take note of a trial that was submitted."""
        future.add_done_callback(lambda done: self._keep_first(job, done))
        with self._lock:
            self._trials += 1
            due = self._trials % self._every == 0
            jobs = {key: first for key, (first, _) in self._first.items()} if due else {}
            for key, first in jobs.items():
                again = self._submit(replace(first, best_us=()))
                self._again.append((self._trials, key, again))

    def _keep_first(self, job: EvalJob, future: Future[Outcome]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        outcome = future.result()
        if isinstance(outcome, Measured) and outcome.timings:
            with self._lock:
                self._first.setdefault(job.problem.key, (job, outcome))

    def notes(self) -> tuple[Note, ...]:
        """Return one note for each time the first kernel was timed again, and forget them."""
        with self._lock:
            again, self._again = self._again, []
        found = []
        for trials, key, future in again:
            try:
                outcome = future.result()
            except CancelledError:  # the pool was closed before its turn
                continue
            if not isinstance(outcome, Measured):
                values = (("problem", key), ("trials", trials), ("class", str(outcome.trial_class)))
                found.append(Note("drift", values))
                continue
            first = {t.shape: t.median_us for t in self._first[key][1].timings}
            ratios = [t.median_us / first[t.shape] for t in outcome.timings if t.shape in first]
            found.append(
                Note(
                    "drift",
                    (
                        ("problem", key),
                        ("trials", trials),
                        ("median_ratio", round(statistics.median(ratios), 4)),
                        ("worst_ratio", round(_furthest(ratios), 4)),
                    ),
                )
            )
        return tuple(found)


def remark(notes: tuple[Note, ...]) -> str | None:
    """Return one line about the drift that the notes tell of, or None when none was looked for."""
    told = [n.as_dict().get("median_ratio") for n in notes]
    ratios = [r for r in told if isinstance(r, float)]
    if not ratios:
        return None
    worst = _furthest(ratios)
    text = (
        f"drift: the first kernel, timed again {len(ratios)} times, took {worst - 1:+.1%} at most"
    )
    if abs(worst - 1) > WORTH_SAYING:
        text += "; times of the search that lie apart do not compare that well, the final's do"
    return text


def _furthest(ratios: Sequence[float]) -> float:
    return max(ratios, key=lambda r: abs(r - 1))
