"""Propose, check, repair at most N times. What goes wrong becomes a note, never an exception."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from codegen.tl.source import Diagnostic
from llm_proposer.client import Client, Prompt
from llm_proposer.describe import known_points
from llm_proposer.errors import Pending, ProposerError
from llm_proposer.prompt import (
    Question,
    Task,
    code_prompt,
    one_step_prompt,
    repair_prompt,
    seeds_prompt,
    sketch_prompt,
)
from llm_proposer.reply import ProgramReply, read_program
from llm_proposer.seed_reply import Proposal, SeedReply, read_seeds
from runs.record import Rejected

REPAIRS = 2


class Way(StrEnum):
    """How a program is asked for."""

    SKETCH = "sketch"  # the dataflow alone: the search fills in the sizes
    TWO_STAGE = "two_stage"  # the paper's: a sketch, then its code
    ONE_STEP = "one_step"  # the paper's ablation: code at once


@dataclass(frozen=True, slots=True)
class Programmed:
    """A program without faults, or none; what happened on the way.

    `pending`: the reply is still to come, ask the same again later. `failure` is what the model
    or its endpoint answered instead of a reply.
    """

    text: str = ""
    notes: tuple[str, ...] = ()
    repairs: int = 0
    first_faults: tuple[Diagnostic, ...] = ()  #: of the first answer, before any repair
    pending: bool = False
    failure: ProposerError | None = None


@dataclass(frozen=True, slots=True)
class Seeded:
    """Proposals of one request, in order; what happened on the way."""

    proposals: tuple[Proposal, ...] = ()
    notes: tuple[str, ...] = ()
    repeated: bool = False  #: nothing in the reply is new
    pending: bool = False
    failure: ProposerError | None = None


def propose_program(
    client: Client, task: Task, way: Way = Way.SKETCH, repairs: int = REPAIRS, sample: int = 0
) -> Programmed:
    """Ask for a program and have it repaired until it is without faults. Never raises."""
    if way is Way.ONE_STEP:
        return _program(client, task, one_step_prompt(task, sample), repairs)
    sketched = _program(client, task, sketch_prompt(task, sample), repairs)
    if way is Way.SKETCH or not sketched.text:
        return sketched
    coded = _program(client, task, code_prompt(task, sketched.text, sample), repairs)
    return replace(coded, notes=sketched.notes + coded.notes)


def mend_program(
    client: Client, task: Task, text: str, judged: Rejected, repairs: int = REPAIRS
) -> Programmed:
    """Ask for a program mended that was built and failed; the same again is noticed."""
    return _program(client, task, repair_prompt(task, text, judged=judged), repairs, before=text)


def propose_seeds(client: Client, question: Question, repairs: int = 1) -> Seeded:
    """Ask for points worth trying. Never raises.

    A reply without readable proposals is asked for again with what was wrong, `repairs` times.
    """
    notes: list[str] = []
    asked = question
    try:
        for attempt in range(repairs + 1):
            reply = client.complete(seeds_prompt(asked))
            found = _read(reply.text, question)
            if reply.truncated:
                notes.append("the reply with seeds was cut off by its length limit")
            if not found.fault:
                return _seeded(found, notes)
            notes.append(found.fault)
            asked = replace(
                question,
                remarks=(*question.remarks, f"attempt {attempt + 1}: {found.fault}"),
            )
    except Pending as error:
        return Seeded(notes=(*notes, str(error)), pending=True)
    except ProposerError as error:
        return Seeded(notes=(*notes, _said(error)), failure=error)
    return Seeded(notes=tuple(notes))


def take_seeds(client: Client, prompt: Prompt, question: Question) -> Seeded:
    """Take in the reply to a request of an earlier part of the run. Never raises."""
    try:
        reply = client.complete(prompt)
    except Pending as error:
        return Seeded(notes=(str(error),), pending=True)
    except ProposerError as error:
        return Seeded(notes=(_said(error),), failure=error)
    found = _read(reply.text, question)
    return Seeded(notes=(found.fault,)) if found.fault else _seeded(found, [])


def _read(text: str, question: Question) -> SeedReply:
    s = question.subject
    known = known_points(s.trials(question.history))
    return read_seeds(text, s.problem, s.gpu, s.space, question.base, known)


def _seeded(found: SeedReply, notes: Sequence[str]) -> Seeded:
    counts = [
        f"{n} {verdict}" for verdict, n in _counts(p.verdict for p in found.proposals).items()
    ]
    said = (*notes, f"{len(found.proposals)} seeds proposed: {', '.join(counts)}")
    repeated = all("already tried" in p.reason for p in found.proposals)
    if repeated:
        said = (*said, "the model repeats itself: every proposal was tried already")
    return Seeded(found.proposals, said, repeated)


def _counts(values: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts


def _program(
    client: Client, task: Task, prompt: Prompt, repairs: int, before: str = ""
) -> Programmed:
    """Ask, check, and feed the diagnostics back until none is left."""
    notes: list[str] = []
    first: tuple[Diagnostic, ...] = ()
    seen = {_bare(before)} if before else set()
    try:
        for attempt in range(repairs + 1):
            reply = client.complete(prompt)
            found = read_program(reply.text, task.problem, task.gpu, task.space)
            if reply.truncated:
                notes.append("the reply with a program was cut off by its length limit")
            if found.note:
                notes.append(f"the model's program was taken as mended: {found.note}")
            first = first if attempt else found.faults
            if _bare(found.text) in seen:
                notes.append("the model repeats itself: it answered with the same program again")
                return Programmed("", tuple(notes), attempt, first)
            if not found.faults:
                return Programmed(found.text, tuple(notes), attempt, first)
            seen.add(_bare(found.text))
            notes.append(_faulty(found, attempt))
            prompt = repair_prompt(task, found.text, found.faults)
    except Pending as error:
        return Programmed("", (*notes, str(error)), first_faults=first, pending=True)
    except ProposerError as error:
        return Programmed("", (*notes, _said(error)), first_faults=first, failure=error)
    notes.append(f"no usable program after {repairs} repairs")
    return Programmed("", tuple(notes), repairs, first)


def _faulty(found: ProgramReply, attempt: int) -> str:
    which = f"repair {attempt}" if attempt else "the first answer"
    more = f" (and {len(found.faults) - 1} more)" if len(found.faults) > 1 else ""
    return f"{which} has faults: {found.faults[0]}{more}"


def _bare(text: str) -> str:
    """A program without comments and spaces, to see whether it is the same."""
    lines = (line.split("#")[0].split("//")[0] for line in text.split("\n"))
    return "\n".join(" ".join(line.split()) for line in lines if line.strip())


def _said(error: ProposerError) -> str:
    return f"no reply from the model: {error}"
