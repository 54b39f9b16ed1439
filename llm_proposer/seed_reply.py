"""Reply → seeds, pure: each proposal accepted, repaired or rejected, with the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from codegen.tl.vocabulary import canonical_param
from llm_proposer.loose_json import objects
from llm_proposer.reply import without_thoughts
from llm_proposer.seeds import nearest_legal
from space.constraints import violated
from space.gpu import GpuSpec
from space.params import Point, Space
from space.variant import Problem

MAX_PROPOSALS = 50
_WHY = ("why", "reason", "rationale", "explanation", "comment", "note", "description")
_IGNORED = ("name", "id", "index", "rank", "confidence", "expected")
_WORDS = {"true": 1, "on": 1, "yes": 1, "false": 0, "off": 0, "no": 0}

#: What both kinds of kernel always do: saying so changes nothing, asking for more is refused.
_ALWAYS = {"num_splits": 1, "pack_gqa": 0}
#: The same for Hopper's kernels, and for those with warp-level MMA.
_HOPPER_ALWAYS = {"p_in_registers": 1, "epilogue_smem": 1}
_SYNC_ALWAYS = {
    "consumer_warpgroups": 0, "pingpong": 0, "persistent": 0, "overlap": 0, "cluster": 1,
}  # fmt: skip
_EPILOGUES = {"direct": 0, "registers": 0, "register": 0, "smem": 1, "shared": 1, "tma": 1}


class Verdict(StrEnum):
    """What became of a proposal."""

    ACCEPTED = "accepted"
    REPAIRED = "repaired"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Proposal:
    """One proposal as it was written, and the point it became unless it was rejected."""

    given: str
    why: str
    verdict: Verdict
    point: Point | None
    reason: str = ""

    @property
    def remark(self) -> str:
        """One line for a log or for the next request."""
        return f"{self.given} {self.verdict}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True, slots=True)
class SeedReply:
    """All proposals of a reply; `fault` says why there are none, when there are none."""

    proposals: tuple[Proposal, ...]
    fault: str = ""

    @property
    def usable(self) -> tuple[Proposal, ...]:
        """The accepted and repaired ones, in order."""
        return tuple(p for p in self.proposals if p.point is not None)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a proposal says in terms of the space: values, what was changed, what is not there."""

    values: dict[str, int]
    changes: list[str]
    unknown: list[str]
    faults: list[str]


def read_seeds(
    text: str,
    problem: Problem,
    gpu: GpuSpec,
    space: Space,
    base: Point,
    known: Mapping[str, str] | None = None,
) -> SeedReply:
    """Read the proposals of a reply as differences against `base`.

    `known` says how points that were tried ended, by their key. Values outside a parameter's
    choices and points that are not legal are moved to the nearest that is, and said so.
    """
    found = objects(without_thoughts(text))
    if not found:
        shown = " ".join(text.split())[:80]
        return SeedReply((), f"no JSON object with proposals in the reply: {shown}")
    seen = dict(known or {})
    proposals = []
    for number, entry in enumerate(found[:MAX_PROPOSALS], 1):
        proposal = _judged(entry, problem, gpu, space, base, seen)
        if proposal.point is not None:
            seen[proposal.point.key] = f"proposal {number} of this reply"
        proposals.append(proposal)
    return SeedReply(tuple(proposals))


def _judged(
    entry: Mapping[str, Any],
    problem: Problem,
    gpu: GpuSpec,
    space: Space,
    base: Point,
    seen: Mapping[str, str],
) -> Proposal:
    why = next((str(entry[k]) for k in entry if k.lower() in _WHY), "")
    said = {
        k: v
        for k, v in entry.items()
        if v is not None and k.lower() not in (*_WHY, *_IGNORED)
    }  # fmt: skip
    given = json.dumps(said, default=str)[:300]

    def rejected(reason: str) -> Proposal:
        return Proposal(given, why, Verdict.REJECTED, None, reason)

    wanted = _wanted(said, space)
    if wanted.unknown:
        names = " and ".join(wanted.unknown)
        plural = "are not parameters" if len(wanted.unknown) > 1 else "is not a parameter"
        return rejected(f"{names} {plural} here")
    if wanted.faults:
        return rejected("; ".join(wanted.faults))
    point = base.replace(**wanted.values)
    changes = list(wanted.changes)
    if point != base and (broken := violated(problem, point, gpu)) is not None:
        moved = _moved(problem, gpu, space, base, wanted.values)
        if moved is None:
            return rejected(f"{broken[1]}, and no legal point is near")
        changes.append(f"{broken[1]}; moved to {_difference(moved, point)}")
        point = moved
    if point == base:
        return rejected("; ".join([*changes, "it changes nothing of the base"]))
    if (fate := seen.get(point.key)) is not None:
        return rejected("; ".join([*changes, f"already tried: {fate}"]))
    verdict = Verdict.REPAIRED if changes else Verdict.ACCEPTED
    return Proposal(given, why, verdict, point, "; ".join(changes))


def _wanted(said: Mapping[str, Any], space: Space) -> _Wanted:
    wanted = _Wanted({}, [], [], [])
    always = _ALWAYS | (
        _HOPPER_ALWAYS if "consumer_warpgroups" in space.names else _SYNC_ALWAYS
    )  # fmt: skip
    for key, value in said.items():
        name, number = _named(key, value, space)
        if name not in space.names:
            if number is None or always.get(name) != number:
                wanted.unknown.append(key)
        elif number is None:
            wanted.faults.append(f"{key}={json.dumps(value, default=str)[:60]} is no whole number")
        else:
            choices = space.param(name).choices
            nearest = min(choices, key=lambda c: (abs(c - number), c))
            if nearest != number:
                wanted.changes.append(f"{name}={number} is not offered, {nearest} is nearest")
            wanted.values[name] = nearest
    return wanted


def _named(key: str, value: Any, space: Space) -> tuple[str, int | None]:
    """Return the parameter that a key means and the whole number that its value is."""
    if key.lower() == "epilogue" and str(value).lower() in _EPILOGUES:
        return "epilogue_smem", _EPILOGUES[str(value).lower()]
    by_case = {n.lower(): n for n in space.names}
    name = key if key in space.names else by_case.get(key.lower()) or canonical_param(key) or key
    return name, _whole(value)


def _whole(value: Any) -> int | None:
    """Return the whole number that a value is, yes and no as 1 and 0; None for anything else."""
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if not isinstance(value, str):
        return None
    word = value.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    return int(word) if re.fullmatch(r"-?[0-9]{1,9}", word) else None


def _moved(
    problem: Problem, gpu: GpuSpec, space: Space, base: Point, values: Mapping[str, int]
) -> Point | None:
    """Return the nearest legal point, the proposal's own values kept when there is a way."""
    wanted = base.as_dict() | dict(values)
    kept = space.restrict({name: (value,) for name, value in values.items()})
    return nearest_legal(problem, gpu, kept, wanted) or nearest_legal(problem, gpu, space, wanted)


def _difference(point: Point, before: Point) -> str:
    return ", ".join(f"{n}={v}" for n, v in point.items if before[n] != v)
