"""Reply → TL text with its faults, pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from codegen.errors import TLError
from codegen.tl.ast import Param, Sketch
from codegen.tl.bind import sketch_choices
from codegen.tl.checker import check, repaired
from codegen.tl.lexer import is_statement
from codegen.tl.parser import parse
from codegen.tl.source import Diagnostic, Span
from codegen.tl.vocabulary import canonical_param
from llm_proposer.seeds import nearest_legal
from space.constraints import violated
from space.gpu import GpuSpec
from space.params import Point, Space
from space.variant import Problem

_THOUGHT = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL)
_ENDED_THOUGHT = re.compile(r"\A.*</think(?:ing)?>", re.DOTALL)
_NUMBER = re.compile(r"^\s*\d+ ?[|:] ?")
_FENCE = re.compile(r"^\s*(?:```+|~~~+)")
_PROGRAM_KEYS = ("program", "tl", "tl_code", "code", "sketch", "text")
MAX_PROGRAM_LINES = 2000


@dataclass(frozen=True, slots=True)
class ProgramReply:
    """The program of a reply: its text without prose, what is wrong with it, what was changed."""

    text: str
    faults: tuple[Diagnostic, ...]
    note: str = ""


def without_thoughts(text: str) -> str:
    """Return a reply without the reasoning that some servers leave in it."""
    return _THOUGHT.sub("", _ENDED_THOUGHT.sub("", text))


def read_program(
    text: str, problem: Problem, gpu: GpuSpec | None = None, space: Space | None = None
) -> ProgramReply:
    """Return the program of a reply, checked for `problem` and the memory of `gpu`.

    With a space, its own Params must leave the search something legal.

    Of several fenced programs the whole is taken when it is without faults, else the last part
    that is: models correct themselves. A program with pipelines and roles is replaced by the
    dataflow that remains of it, when that is without faults.
    """
    parts = _parts(text)
    readings = [_read("\n".join(parts), problem, gpu, space)]
    if len(parts) > 1:
        readings += [_read(part, problem, gpu, space) for part in reversed(parts)]
    return next((r for r in readings if not r.faults), readings[0])


def _read(text: str, problem: Problem, gpu: GpuSpec | None, space: Space | None) -> ProgramReply:
    text = text.strip("\n") + "\n"
    if text.count("\n") > MAX_PROGRAM_LINES:
        return _unreadable(text, f"the program has more than {MAX_PROGRAM_LINES} lines")
    note = ""
    try:
        sketch = parse(text)
        faults = check(sketch, problem, gpu)
        if any(f.code == "schedule" for f in faults):
            offered = repaired(sketch)
            if offered is not None and not check(parse(offered), problem, gpu):
                text, sketch, faults = offered, parse(offered), ()
                note = "its pipelines and roles were left out"
    except TLError as error:
        return ProgramReply(text, error.diagnostics)
    except RecursionError:
        return _unreadable(text, "brackets are nested too deeply to be read")
    if not faults and gpu is not None and space is not None:
        faults = _unsearchable(sketch, problem, gpu, space)
    return ProgramReply(text, faults, note)


def _unsearchable(
    sketch: Sketch, problem: Problem, gpu: GpuSpec, space: Space
) -> tuple[Diagnostic, ...]:
    """Say which Params of a program leave the search nothing to choose, or nothing legal."""
    lines = {canonical_param(s.name): s.span for s in sketch.statements if isinstance(s, Param)}
    wanted = {n: v for n, v in sketch_choices(sketch).items() if n in space.names}
    faults = [
        Diagnostic(
            lines.get(name, Span(1)),
            "param-choices",
            f"{name} = {', '.join(map(str, values))} is not offered on {gpu.name}",
            f"Use some of {', '.join(map(str, space.param(name).choices))}",
        )
        for name, values in wanted.items()
        if not set(values) & set(space.param(name).choices)
    ]
    if faults or not wanted:
        return tuple(faults)
    left = {n: tuple(c for c in space.param(n).choices if c in v) for n, v in wanted.items()}
    if nearest_legal(problem, gpu, space.restrict(left), {}) is not None:
        return ()
    start = Point(tuple((p.name, p.choices[0]) for p in space.restrict(left).params))
    found = violated(problem, start, gpu)
    listed = ", ".join(f"{n} in {{{', '.join(map(str, v))}}}" for n, v in left.items())
    return (
        Diagnostic(
            min((lines[n] for n in left if n in lines), key=lambda s: s.line, default=Span(1)),
            "param-choices",
            f"no configuration with {listed} is legal on {gpu.name}"
            + (f": {found[1]}" if found else ""),
            "Offer more values, smaller ones too",
        ),
    )


def _unreadable(text: str, why: str) -> ProgramReply:
    fault = Diagnostic(Span(1), "unreadable", why, "Write one plain program")
    return ProgramReply(text[:4000], (fault,))


def _parts(text: str) -> list[str]:
    """Return the fenced blocks that hold statements, or all from the first statement on."""
    text = _unwrapped(without_thoughts(text)).replace("\r\n", "\n")
    lines = text.split("\n")
    if all(_NUMBER.match(x) for x in lines if x.strip() and not _FENCE.match(x)):
        lines = [_NUMBER.sub("", x) for x in lines]  # the numbers of a repair request came back
    blocks: list[list[str]] = []
    outside: list[str] = []
    fenced = False
    for line in lines:
        if _FENCE.match(line):
            fenced = not fenced
            if fenced:
                blocks.append([])
        elif fenced:
            blocks[-1].append(line)
        else:
            outside.append(line)
    for block in blocks:
        if all(_NUMBER.match(x) for x in block if x.strip()):
            block[:] = [_NUMBER.sub("", x) for x in block]
    holding = ["\n".join(b) for b in blocks if any(is_statement(x) for x in b)]
    return holding or ["\n".join(_from_first_statement(outside if not blocks else lines))]


def _from_first_statement(lines: list[str]) -> list[str]:
    """Leave out the prose before and after a program that stands without fences."""
    found = [n for n, line in enumerate(lines) if is_statement(line)]
    if not found:
        return lines
    first = found[0]
    for number in range(first - 1, -1, -1):
        above = lines[number].strip()
        if above.startswith(("#", "//")):
            first = number  # a comment that belongs to the program
        elif above:
            break
    return lines[first : found[-1] + 1]


def _unwrapped(text: str) -> str:
    """Return the program inside a JSON object, when the reply is one."""
    inner = re.sub(r"\A\s*```\w*\n|\n```\s*\Z", "", text).strip()
    if not inner.startswith("{"):
        return text
    try:
        data = json.loads(inner)
    except (ValueError, RecursionError):
        return text
    values = (data.get(key) for key in _PROGRAM_KEYS) if isinstance(data, dict) else ()
    return next((v for v in values if isinstance(v, str)), text)
