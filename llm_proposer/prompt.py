"""State → Prompt, pure: sketch, code, one step, seeds and repair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from codegen.tl.source import Diagnostic
from llm_proposer.client import Kind, Prompt
from llm_proposer.describe import (
    Subject,
    backend_text,
    gpu_text,
    memory_text,
    point_text,
    problem_text,
    rules_text,
    shapes_text,
    space_text,
    trials_text,
)
from llm_proposer.language import guide
from runs.record import Finalist, History, Rejected
from space.gpu import GpuSpec
from space.params import Point, Space
from space.variant import Problem, Shape

PROPOSALS = 10  #: seeds asked for in one request

_ROLE = "You write attention kernels for NVIDIA GPUs in TL, a small language for tiled dataflow."
_ANSWER_TL = (
    "Answer with the program alone, in one fenced block, and nothing outside it. "
    "One program; a remark goes behind `#` inside it."
)
_TUNER = (
    "You tune attention kernels for NVIDIA GPUs. A search measures what you propose, next to its "
    "own proposals; legal and different proposals are worth most."
)


@dataclass(frozen=True, slots=True)
class Task:
    """A kernel to be written: what it computes, where it runs, and the user's own words or code."""

    problem: Problem
    gpu: GpuSpec
    shapes: tuple[Shape, ...] = ()
    words: str = ""
    reference: str = ""  #: source text of a PyTorch function of q, k, v
    space: Space | None = None  #: what the search offers; a program's own Params must fit into it


@dataclass(frozen=True, slots=True)
class Question:
    """What a request for seeds tells: the search, its trials, and what became of earlier advice."""

    subject: Subject
    base: Point  #: what proposals are differences against
    history: History = field(default_factory=History)
    peers: tuple[Finalist, ...] = ()
    #: how earlier proposals were repaired or rejected, a line each
    remarks: tuple[str, ...] = ()
    count: int = PROPOSALS
    sample: int = 0


def sketch_prompt(task: Task, sample: int = 0) -> Prompt:
    """Ask for the dataflow alone: the paper's first stage."""
    wish = (
        "Write the TL sketch of this kernel: which tiles move where and what is computed, with no "
        "sizes, no coordinates and no Allocate."
    )
    return _program(Kind.SKETCH, guide(sizes=False), f"{wish}\n\n{_task_text(task)}", sample)


def code_prompt(task: Task, sketch: str, sample: int = 0) -> Prompt:
    """Ask for the sketch with parameters, allocations, coordinates and reshapes: the second."""
    wish = (
        "Complete this TL sketch to TL code for the card and the shapes below: Params with the "
        "tile sizes worth searching, Allocates, tile shapes and coordinates, and a Reshape where "
        "one is needed. Keep its dataflow."
    )
    user = f"{wish}\n\n{_block(sketch)}\n\n{_task_text(task)}{_tiles_text(task)}"
    return _program(Kind.CODE, guide(sizes=True), user, sample)


def one_step_prompt(task: Task, sample: int = 0) -> Prompt:
    """Ask for TL code at once, without a sketch."""
    wish = "Write the TL code of this kernel, complete with sizes, for the card and the shapes."
    user = f"{wish}\n\n{_task_text(task)}{_tiles_text(task)}"
    return _program(Kind.ONE_STEP, guide(sizes=True), user, sample)


def repair_prompt(
    task: Task, program: str, faults: Sequence[Diagnostic] = (), judged: Rejected | None = None
) -> Prompt:
    """Ask for a program mended by the checker's diagnostics or by the evidence of its judge."""
    parts = ["Mend this program. Change only what is wrong.", _numbered(program)]
    if faults:
        parts.append("Faults, by line:\n" + "\n".join(f"  {d}" for d in faults))
    if judged is not None:
        evidence = "\n".join(f"  {line}" for line in judged.reason.strip().splitlines()[:20])
        parts.append(
            f"It was built and failed at the stage `{judged.stage}` as "
            f"`{judged.trial_class}`. Evidence:\n{evidence}"
        )
    parts.append(_task_text(task))
    sizes = "Allocate" in program
    return _program(Kind.REPAIR, guide(sizes), "\n\n".join(parts), 0)


def seeds_prompt(question: Question) -> Prompt:
    """Ask for points worth trying, as sparse differences against the base."""
    subject, base = question.subject, question.base
    trials = subject.trials(question.history)
    state = "the best so far" if any(r.point == base for r in trials) else "not tried yet"
    parts = [
        problem_text(subject.problem, subject.shapes),
        gpu_text(subject.gpu),
        f"Dataflow (TL):\n\n{_block(subject.text)}",
        f"{backend_text(base)}\nParameters and their choices; there are no others:\n"
        f"{space_text(subject.space)}",
        f"A configuration is legal when\n{rules_text(subject.space)}",
        f"Base ({state}): {point_text(base)}\n"
        f"{memory_text(subject.problem, subject.gpu, subject.space, base)}",
    ]
    if shapes := shapes_text(subject, trials, question.peers, base):
        parts.append(f"Best by shape (B,Hq,Hkv,Sq,Sk,D,Dv, c = causal):\n{shapes}")
    parts.append(trials_text(trials, base))
    if question.remarks:
        listed = "\n".join(f"  {r}" for r in question.remarks)
        parts.append(f"What became of your earlier proposals that were not as they should be:\n"
                     f"{listed}")  # fmt: skip
    parts.append(
        f"Propose {question.count} configurations that were not tried yet, most promising first: "
        "for the whole set of shapes or for one that lags behind its peer. Learn from the times "
        "and from the reasons of failure; make them differ from one another."
    )
    rules = (
        'Answer with one JSON object: {"proposals": [{"BN": 64, "stages": 3, "why": "..."}, ...]}. '
        "Each proposal names only the parameters that differ from the base, with whole numbers "
        "from their choices, and `why` in at most 15 words. In a form that wants every parameter, "
        "null means as in the base. No other names, no comments, nothing outside the object."
    )
    return Prompt(
        Kind.SEEDS,
        f"{_TUNER}\n\n{rules}",
        "\n\n".join(parts),
        schema=json.dumps(seeds_schema(subject.space)),
        sample=question.sample,
        about=(
            ("sketch", subject.sketch),
            ("problem", subject.problem.key),
            ("base", json.dumps(base.as_dict())),
        ),
    )


def seeds_schema(space: Space) -> dict[str, Any]:
    """Return the JSON schema of a reply with seeds, in the strict form: all keys, null for none."""
    values: dict[str, Any] = {
        p.name: {"type": ["integer", "null"], "enum": [*p.choices, None]} for p in space.params
    }
    fields = values | {"why": {"type": "string"}}
    item = {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"proposals": {"type": "array", "items": item}},
        "required": ["proposals"],
        "additionalProperties": False,
    }


def _program(kind: Kind, language: str, user: str, sample: int) -> Prompt:
    return Prompt(kind, f"{_ROLE}\n\n{language}\n{_ANSWER_TL}", user, sample=sample)


def _task_text(task: Task) -> str:
    parts = []
    if task.words:
        parts.append(f"Wanted: {task.words.strip()}")
    if task.reference:
        parts.append(
            "It must compute what this PyTorch function computes (its layouts are the "
            f"function's own; only the mathematics counts):\n\n{_block(task.reference, 'python')}"
        )
    parts += [f"Problem: {problem_text(task.problem, task.shapes)}", f"Card: {gpu_text(task.gpu)}"]
    return "\n\n".join(parts)


def _tiles_text(task: Task) -> str:
    """Say which tile sizes the search offers, when that is known."""
    if task.space is None:
        return ""
    tiles = [p for p in task.space.params if p.name in ("BM", "BN")]
    said = "; ".join(f"{p.name} in {{{', '.join(map(str, p.choices))}}}" for p in tiles)
    return f"\n\nTile sizes that can be searched: {said}. Offer several."


def _block(text: str, language: str = "") -> str:
    return f"```{language}\n{text.strip()}\n```"


def _numbered(program: str) -> str:
    """The program with its line numbers in front, as the diagnostics count them."""
    lines = program.rstrip("\n").split("\n")
    return "\n".join(f"{n:3d} | {line}" for n, line in enumerate(lines, 1))
