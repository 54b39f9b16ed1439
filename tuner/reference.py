"""`--reference FILE.py:function`: read without running it, examined in a process, then searched.

The function takes the place of plain attention: the gate and the judge compare kernels with it.
"""

from __future__ import annotations

import ast
import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from codegen.tl.vocabulary import RESERVED, canonical_param, is_scale
from runs.files import read_regular
from runs.record import Reference, RunSpec
from space.variant import Problem
from tuner.errors import UsageError
from tuner.probe import ProbeJob
from tuner.worker import JobFailed, Worker, WorkerLost, WorkerUnavailable

PROBE_S = 120.0  #: time limit of a function's examination
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class Source:
    """A reference as its file says it, nothing run."""

    reference: Reference  #: its scalars are those of the command line over the defaults
    text: str  #: the function's own lines, for a model to read
    causal: bool  #: takes `causal` by keyword: then it is searched under both masks


def read_reference(said: str, scalars: Sequence[str]) -> Source:
    """Read FILE.py:function and NAME=NUMBER words. Raises UsageError."""
    name, colon, function = said.rpartition(":")
    if not (colon and name and _NAME.fullmatch(function)):
        raise UsageError(f"--reference {said!r} is not FILE.py:function")
    path = Path(name)
    try:
        data = read_regular(path)
        tree = ast.parse(data, filename=str(path))
    except OSError as error:
        raise UsageError(f"--reference {said}: cannot read {path}: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else None
        where = "" if line is None else f" line {line}"
        raise UsageError(f"--reference {said}: {path}{where} is not Python: {error}") from None
    defined = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    node = next((n for n in defined if n.name == function), None)
    if node is None:
        there = ", ".join(n.name for n in defined) or "none"
        raise UsageError(f"--reference {said}: no function {function} in {path}; there: {there}")
    given = parse_scalars(scalars)
    defaults, takes = _keywords(node)
    chosen = {n: v for n, v in defaults.items() if n not in given} | given
    reference = Reference(
        str(path.resolve()), function, hashlib.sha256(data).hexdigest(),
        tuple(sorted(chosen.items())),
    )  # fmt: skip
    if unknown := sorted(set(given) - takes):
        known = ", ".join(sorted(takes - {"scale", "causal"})) or "none"
        raise UsageError(
            f"--scalar {unknown[0]}: {reference.name} takes no keyword of that name; it takes "
            f"{known}"
        )
    text = ast.get_source_segment(data.decode(errors="replace"), node) or ""
    return Source(reference, text, "causal" in takes)


def parse_scalars(words: Sequence[str]) -> dict[str, float]:
    """Read NAME=NUMBER words. Raises UsageError."""
    found: dict[str, float] = {}
    for word in words:
        name, equals, number = (part.strip() for part in word.partition("="))
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not equals or not _NAME.fullmatch(name) or not math.isfinite(value):
            raise UsageError(f"--scalar {word!r} is not NAME=NUMBER, such as softcap=30")
        if name in RESERVED or canonical_param(name) is not None or is_scale(name):
            why = "the caller gives it" if is_scale(name) else "TL or the search uses the name"
            raise UsageError(f"--scalar {name}: {why}; name a keyword of the reference")
        if name in found:
            raise UsageError(f"--scalar {name} is given twice; say it once")
        found[name] = value
    return found


def _keywords(node: ast.FunctionDef) -> tuple[dict[str, float], set[str]]:
    """The numbers that keywords of a function default to, and the names of all of them."""
    a = node.args
    named = [*a.posonlyargs, *a.args][3:]
    last = a.defaults[-len(named) :] if named else []
    pairs = [*zip(named[len(named) - len(last) :], last, strict=True)]
    pairs += [(x, d) for x, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None]
    defaults = {}
    for argument, default in pairs:
        try:
            value = ast.literal_eval(default)
        except ValueError:
            continue
        if type(value) in (int, float) and argument.arg not in ("scale", "causal"):
            defaults[argument.arg] = float(value)
    return defaults, {x.arg for x in (*named, *a.kwonlyargs)}


def check_unchanged(reference: Reference, run: Path | None = None) -> None:
    """Raise UsageError unless the file is what it was when the run began.

    A folder of a `run` is data: a file within it is not executed.
    """
    if run is not None and Path(reference.path).resolve().is_relative_to(run.resolve()):
        raise UsageError(
            f"the run's reference {reference.path} lies in the run's own folder {run}, from which "
            f"nothing is executed; move it elsewhere and begin a new run"
        )
    try:
        digest = hashlib.sha256(read_regular(Path(reference.path))).hexdigest()
    except OSError as error:
        raise UsageError(
            f"the run's reference {reference.name}: cannot read {reference.path}: {error.strerror}"
        ) from None
    if digest != reference.digest:
        raise UsageError(
            f"the run's reference {reference.path} was changed since: SHA-256 {digest[:12]}, "
            f"{reference.digest[:12]} when the run began; put it back or begin a new run"
        )


def function_text(reference: Reference) -> str:
    """Return the lines of the function, for a model to read. Raises UsageError."""
    check_unchanged(reference)
    return read_reference(f"{reference.path}:{reference.function}", ()).text


def answers_of(spec: RunSpec, problem: Problem) -> Path | None:
    """Return where the gate finds the function's answers for a problem and its longest shape."""
    reference = spec.reference
    if reference is None:
        return None
    keys = max((s.seqlen_k for s in spec.shapes_of(problem)), default=0)
    told = f"{reference.digest} {reference.function} {reference.scalars} {problem.key} {keys}"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "tltune" / "references" / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.npz"


def examine(spec: RunSpec) -> None:
    """Run the spec's reference once in a process that can be killed; keep the gate's answers.

    Raises UsageError, in one line, when it fails or gives what cannot be compared with.
    """
    reference = spec.reference
    assert reference is not None
    problems = spec.problems
    jobs = tuple((p, spec.shapes_of(p), str(answers_of(spec, p))) for p in problems)
    worker = Worker(None)
    try:
        said = worker.run(ProbeJob(reference, jobs, PROBE_S)).fault
    except WorkerLost as lost:
        said = f"{reference.name} was run and ended its process: {lost}"
    except (JobFailed, WorkerUnavailable) as error:
        said = f"{reference.name} could not be run: {error}"
    finally:
        worker.close()
    if said:
        raise UsageError(f"--reference {said}")


def with_numbers(text: str, scalars: Mapping[str, float]) -> str:
    """Return a sketch whose named scalars are Params, so that they are compiled in."""
    lines = [f"Param {n} = {number_text(v)}" for n, v in scalars.items()]
    return "\n".join([text.rstrip("\n"), *lines]) + "\n" if lines else text


def number_text(value: float) -> str:
    """A number as TL writes it: whole where it is whole."""
    return str(int(value)) if value.is_integer() else repr(value)


def with_mask(spec: RunSpec, causal: bool) -> RunSpec:
    """Return `spec` with only the shapes under one mask."""
    return replace(spec, shapes=tuple(s for s in spec.shapes if s.causal == causal))
