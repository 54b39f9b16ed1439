"""The paper's two stages against one step: how many of a model's programs get how far.

Each sample is one program of the model, with no feedback unless repairs are asked for. It is taken
through the checker, the interpreter, the compiler and, where the GPU is here, the judge, at one
known-good point of the space that its own Params leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from codegen.errors import TLError
from codegen.tl.bind import sketch_choices
from codegen.tl.parser import parse
from llm_proposer.client import Client
from llm_proposer.prompt import Task
from llm_proposer.proposer import Programmed, Way, propose_program
from llm_proposer.seeds import seeds
from runs.record import Basis, Broken, Measured, Rejected, RunSpec, Stage
from space.constraints import Backend, space_for
from space.gpu import GpuSpec
from space.legal import legal_points
from space.variant import Problem, SpaceError
from tuner.errors import UsageError
from tuner.lanes import Candidate
from tuner.loop import Bench
from tuner.reference import function_text
from tuner.reference_sketches import completed
from tuner.sketches import restricted

WAYS = {"sketch": Way.SKETCH, "two-stage": Way.TWO_STAGE, "one-step": Way.ONE_STEP}
USUAL_K = (1, 2, 5, 10, 20, 50, 100)
Say = Callable[[str], None]


class Level(IntEnum):
    """How far a sample got; each level has passed those before it."""

    PENDING = 0  # the reply is still to come
    UNANSWERED = 1
    ANSWERED = 2
    CHECKED = 3
    INTERPRETED = 4
    COMPILED = 5
    RIGHT = 6  # judged on the GPU

    @property
    def title(self) -> str:
        """Its word in tables."""
        return {"CHECKED": "checker", "INTERPRETED": "interpreter", "COMPILED": "compiler",
                "RIGHT": "GPU"}.get(self.name, self.name.lower())  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One program of the model and how far it got; `note` says what stopped it."""

    way: str
    problem: str
    number: int
    level: Level
    note: str = ""
    text: str = ""


def pass_at(k: int, samples: int, passed: int) -> float:
    """Return the unbiased estimate that one of `k` samples passes: 1 - C(n-c, k) / C(n, k).

    Raises ValueError unless 1 <= k <= samples and 0 <= passed <= samples.
    """
    if not (1 <= k <= samples and 0 <= passed <= samples):
        raise ValueError(f"pass@{k} of {passed} passed among {samples}")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def task_of(spec: RunSpec, problem: Problem, gpu: GpuSpec, words: str = "") -> Task:
    """Return what a model is asked to write for a problem of a run, with the user's own words."""
    function = "" if spec.reference is None else function_text(spec.reference)
    space = space_for(problem, gpu, Backend(spec.backend))
    return Task(problem, gpu, spec.shapes, words, function, space)


def sampled(
    spec: RunSpec, gpu: GpuSpec, ways: Sequence[str], samples: int, repairs: int, client: Client,
    bench: Bench, say: Say, words: str = "",
) -> Iterator[Sample]:  # fmt: skip
    """Ask for every sample of each way and problem, and yield how far it got.

    Ways take turns, so that a limit on tokens meets all of them alike. What `words` describe and
    no reference computes is not compared with anything: it gets to the checker at most.
    """
    known: dict[tuple[str, str], tuple[Level, str]] = {}
    for problem in spec.problems:
        task = task_of(spec, problem, gpu, words)
        for number in range(samples):
            for way in ways:
                found = propose_program(client, task, WAYS[way], repairs, number)
                level, note = _answered(found)
                if found.text and words and spec.reference is None:
                    level, note = Level.CHECKED, ""
                elif found.text:
                    key = (problem.key, found.text)
                    if key not in known:
                        known[key] = reached(found.text, problem, spec, gpu, bench)
                    level, note = known[key]
                say(f"{problem.key} {way} {number + 1}/{samples}: {level.title}  {note}".rstrip())
                yield Sample(way, problem.key, number, level, note, found.text)


def _answered(found: Programmed) -> tuple[Level, str]:
    note = found.notes[-1] if found.notes else ""
    if found.pending:
        return Level.PENDING, note
    if found.failure is not None:
        return Level.UNANSWERED, note
    faults = str(found.first_faults[0]) if found.first_faults else note
    return Level.ANSWERED, faults


def reached(
    text: str, problem: Problem, spec: RunSpec, gpu: GpuSpec, bench: Bench
) -> tuple[Level, str]:
    """Take a program without faults as far as it gets; return the level and what stopped it."""
    try:
        if spec.reference is not None:
            text = completed(text, replace(spec, shapes=spec.shapes_of(problem)), spec.reference)
        choices = sketch_choices(parse(text))
        space = restricted("sample", space_for(problem, gpu, Backend(spec.backend)), choices)
        legal = legal_points(problem, gpu, space)
        point = next((p for p in seeds(problem, gpu, space) if p in legal), None)
    except (UsageError, SpaceError, TLError) as error:
        return Level.CHECKED, str(error)
    if point is None:
        return Level.CHECKED, f"no configuration of it is legal on {gpu.name}"
    candidate = Candidate("sample", text, problem, point, "model")
    built = bench.build(candidate).result()
    if isinstance(built, Rejected | Broken):
        early = built.stage in (Stage.PARSE, Stage.CHECK, Stage.BIND)
        return (Level.CHECKED if early else Level.INTERPRETED), _head(built.reason)
    if spec.measure is Basis.PREDICTED:
        return Level.COMPILED, ""
    outcome = bench.judge(candidate, built).result()
    if isinstance(outcome, Measured):
        return Level.RIGHT, ""
    return Level.COMPILED, f"{outcome.trial_class}: {_head(outcome.reason)}"


def _head(reason: str) -> str:
    return next(iter(reason.strip().splitlines()), "")


# ---- what came of it -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rate:
    """One way at one level: samples that passed, and pass@k, the mean over the problems."""

    way: str
    level: Level
    samples: int
    passed: int
    pass_at: tuple[tuple[int, float], ...]


def rates(samples: Sequence[Sample], ways: Sequence[str], measured: bool) -> tuple[Rate, ...]:
    """Return pass@k of each way at each level that is known here. Raises ValueError on pending."""
    if any(s.level is Level.PENDING for s in samples):
        raise ValueError("samples are pending")
    levels = [Level.CHECKED, Level.INTERPRETED, Level.COMPILED]
    levels += [Level.RIGHT] if measured else []
    found = []
    for way in ways:
        mine = [s for s in samples if s.way == way]
        problems = dict.fromkeys(s.problem for s in mine)
        for level in levels:
            counts = [
                (sum(s.problem == p for s in mine),
                 sum(s.problem == p and s.level >= level for s in mine))
                for p in problems
            ]  # fmt: skip
            most = min((n for n, _ in counts), default=0)
            ks = sorted({k for k in USUAL_K if k <= most} | ({most} if most else set()))
            values = tuple(
                (k, math.fsum(pass_at(k, n, c) for n, c in counts) / len(counts)) for k in ks
            )
            found.append(Rate(way, level, len(mine), sum(s.level >= level for s in mine), values))
    return tuple(found)
