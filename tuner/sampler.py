"""The search's sampler: Optuna's multivariate TPE over the legal points. Only Optuna user."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Callable, Sequence

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

    With several foci there is a study for each: all are told every point with a loss of their
    own, and asks take turns among them, since the best kernel for short rows is not the best for
    long ones.
    """

    def __init__(self, legal: LegalPoints, seed: str, foci: int = 1, guided: bool = True) -> None:
        """Make a sampler; without `guided` every legal point that is free is as likely."""
        self._guided = guided
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
        self._studies = tuple(optuna.create_study(direction="minimize") for _ in range(foci))
        self._open: dict[str, tuple[Trial, ...]] = {}
        self._told = 0
        self._best: list[list[tuple[float, Point]]] = [[] for _ in range(foci)]

    @property
    def foci(self) -> int:
        """How many losses a point is told with."""
        return len(self._studies)

    def ask(self, taken: Callable[[Point], bool]) -> Point | None:
        """Return a legal point that is not `taken`, or None when the space is used up.

        It is open until told: constant liar keeps later asks away from it.
        """
        focus = self._told % len(self._studies)
        if self._guided and self._told >= STARTUP:
            study = self._studies[focus]
            for draw in range(DRAWS):
                trial = self._draw(focus, draw)
                point = self._legal.mended(self._point(trial))
                study.tell(trial, state=TrialState.FAIL)  # TPE does not look at these
                if point is not None and not taken(point):
                    self.open(point)
                    return point
        rng = random.Random(self._salt("random"))
        found = self._neighbour(rng, focus, taken) or self._at_random(rng, taken)
        if found is not None:
            self.open(found)
        return found

    def open(self, point: Point) -> None:
        """Take up a point that came from elsewhere (a seed), as if it had been asked for."""
        ranks = {p.name: p.choices.index(point[p.name]) for p in self._legal.space.params}
        trials = []
        for study in self._studies:
            study.enqueue_trial(ranks)
            trials.append(study.ask(self._distributions))
        self._open[point.key] = tuple(trials)

    def tell(self, point: Point, losses: Sequence[float] | None) -> None:
        """Report how an open point ended: a loss for each focus, or None for a bad kernel."""
        trials = self._open.pop(point.key)
        self._told += 1
        for focus, (study, trial) in enumerate(zip(self._studies, trials, strict=True)):
            if losses is None:
                study.tell(trial, state=TrialState.PRUNED)
                continue
            study.tell(trial, losses[focus])
            ranked = sorted(
                [*self._best[focus], (losses[focus], point)], key=lambda b: (b[0], b[1].key)
            )
            self._best[focus] = ranked[:ELITE]

    def drop(self, point: Point) -> None:
        """Close an open point about which nothing was learned (the machinery broke)."""
        for study, trial in zip(self._studies, self._open.pop(point.key), strict=True):
            study.tell(trial, state=TrialState.FAIL)

    def _draw(self, focus: int, draw: int) -> Trial:
        study = self._studies[focus]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.sampler = optuna.samplers.TPESampler(
                seed=self._salt(f"draw {draw}"),
                multivariate=True,
                constant_liar=True,
                n_ei_candidates=max(1, 24 >> draw // 2),  # less greedy after every other repeat
                n_startup_trials=STARTUP,
            )
        return study.ask(self._distributions)

    def _point(self, trial: Trial) -> Point:
        params = self._legal.space.params
        return Point(tuple((p.name, p.choices[trial.params[p.name]]) for p in params))

    def _neighbour(
        self, rng: random.Random, focus: int, taken: Callable[[Point], bool]
    ) -> Point | None:
        """Return a free point one or two changes away from one of the best, if one is found."""
        best = self._best[focus]
        if not self._guided or self._told < STARTUP or not best:
            return None
        for _ in range(TRIES):
            _, point = rng.choice(best)
            for param in rng.sample(self._legal.space.params, k=rng.choice((1, 2))):
                point = point.replace(**{param.name: rng.choice(param.choices)})
            mended = self._legal.mended(point)
            if mended is not None and not taken(mended):
                return mended
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
