"""The search's sampler: Optuna's multivariate TPE over the legal points. Only Optuna user."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Callable

import optuna
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import Trial, TrialState

from space.legal import LegalPoints
from space.params import Point

STARTUP = 8  #: told trials before TPE has a say; seeds count
DRAWS = 16  #: TPE draws for one ask; on a discrete space TPE repeats itself once it has settled
TRIES = 64  #: neighbours, or random points, looked at before the free points are listed
ELITE = 5  #: how many of the best points have their neighbours tried when TPE repeats itself
#: Sizes: drawn by their rank among the choices, so that TPE takes close ones to behave alike.
_SIZES = frozenset({"BM", "BN", "warps", "stages", "blocks_per_sm"})


class Sampler:
    """Ask and tell for one sketch and problem; only legal points that are not taken come out.

    The random state of an ask is derived from the seed, the points told and the points open, so
    a study that is filled again from the journal goes on as the one that was killed would have.
    """

    def __init__(self, legal: LegalPoints, seed: str) -> None:
        self._legal = legal
        self._seed = seed
        params = legal.space.params
        self._distributions = {
            p.name: IntDistribution(0, len(p.choices) - 1)
            if p.name in _SIZES
            else CategoricalDistribution(range(len(p.choices)))
            for p in params
        }
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._study = optuna.create_study(direction="minimize")
        self._open: dict[str, Trial] = {}
        self._told = 0
        self._best: list[tuple[float, Point]] = []

    def ask(self, taken: Callable[[Point], bool]) -> Point | None:
        """Return a legal point that is not `taken`, or None when the space is used up.

        It is open until told: constant liar keeps later asks away from it.
        """
        if self._told >= STARTUP:
            for draw in range(DRAWS):
                trial = self._draw(draw)
                point = self._point(trial)
                if point in self._legal and not taken(point):
                    self._open[point.key] = trial
                    return point
                self._study.tell(trial, state=TrialState.FAIL)  # TPE does not look at these
        rng = random.Random(self._salt("random"))
        found = self._neighbour(rng, taken) or self._at_random(rng, taken)
        if found is not None:
            self.open(found)
        return found

    def open(self, point: Point) -> None:
        """Take up a point that came from elsewhere (a seed), as if it had been asked for."""
        ranks = {p.name: p.choices.index(point[p.name]) for p in self._legal.space.params}
        self._study.enqueue_trial(ranks)
        self._open[point.key] = self._study.ask(self._distributions)

    def tell(self, point: Point, loss: float | None) -> None:
        """Report how an open point ended: its loss, or None for a bad kernel (pruned)."""
        trial = self._open.pop(point.key)
        self._told += 1
        if loss is None:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, loss)
            ranked = sorted([*self._best, (loss, point)], key=lambda b: (b[0], b[1].key))
            self._best = ranked[:ELITE]

    def drop(self, point: Point) -> None:
        """Close an open point about which nothing was learned (the machinery broke)."""
        self._study.tell(self._open.pop(point.key), state=TrialState.FAIL)

    def _draw(self, draw: int) -> Trial:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.sampler = optuna.samplers.TPESampler(
                seed=self._salt(f"draw {draw}"),
                multivariate=True,
                constant_liar=True,
                n_ei_candidates=max(1, 24 >> draw // 2),  # less greedy after every other repeat
                n_startup_trials=STARTUP,
            )
        return self._study.ask(self._distributions)

    def _point(self, trial: Trial) -> Point:
        params = self._legal.space.params
        return Point(tuple((p.name, p.choices[trial.params[p.name]]) for p in params))

    def _neighbour(self, rng: random.Random, taken: Callable[[Point], bool]) -> Point | None:
        """Return a free point one or two changes away from one of the best, if one is found."""
        if self._told < STARTUP or not self._best:
            return None
        for _ in range(TRIES):
            _, point = rng.choice(self._best)
            for param in rng.sample(self._legal.space.params, k=rng.choice((1, 2))):
                point = point.replace(**{param.name: rng.choice(param.choices)})
            if point in self._legal and not taken(point):
                return point
        return None

    def _at_random(self, rng: random.Random, taken: Callable[[Point], bool]) -> Point | None:
        for _ in range(TRIES if len(self._legal) else 0):
            if not taken(point := self._legal.draw(rng)):
                return point
        free = [p for p in self._legal if not taken(p)]
        return rng.choice(free) if free else None

    def _salt(self, what: str) -> int:
        text = f"{self._seed}/{self._told}/{sorted(self._open)}/{what}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])
