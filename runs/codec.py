"""Records to JSON and back, by the types of their fields.

Reading is strict: an unknown field, a wrong type, a number that is not finite or a status that
contradicts its fields is a CodecError naming the place. Nothing is evaluated.
"""

from __future__ import annotations

import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from typing import Any, TypeVar, Union

from codegen.kernel import SplitRule
from runs.errors import CodecError
from runs.record import (
    Basis,
    Broken,
    Finalist,
    Finished,
    Measured,
    Note,
    Reference,
    Rejected,
    Resumed,
    RunSpec,
    Timing,
    TrialClass,
    TrialRecord,
)
from runs.safe import is_safe_name
from runs.templates.description import SPLIT_RULE_MAX
from runs.templates.lengths import MAX_SPLITS
from space.constraints import Backend
from space.variant import (
    DECODE_QUERIES_MAX,
    PAGE_SIZES,
    Phase,
    Problem,
    Shape,
    SpaceError,
    check_shape,
    variant_named,
)

SCHEMA = 1
MAX_INT = 2**63

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")

T = TypeVar("T")

#: The `kind` of each journal line.
EVENTS: dict[str, type[Any]] = {
    "trial": TrialRecord,
    "finalist": Finalist,
    "note": Note,
    "resumed": Resumed,
    "finished": Finished,
}

#: The `outcome` tag of each way that a trial may end.
OUTCOMES: dict[str, type[Any]] = {"measured": Measured, "rejected": Rejected, "broken": Broken}

#: Fields that say that something is of decoding; where it is not, they are not written.
OF_DECODE = frozenset(("phase", "page", "splits", "if_split", "dependent"))
#: Fields that are not written where they have their default: those, and heads packed into rows.
UNSTATED = OF_DECODE | {"pack"}


def to_text(value: Any, indent: int | None = None) -> str:
    """Return a record as JSON, one line unless `indent` is given. Raises CodecError on NaN, inf."""
    separators = (",", ":") if indent is None else (",", ": ")
    try:
        return json.dumps(to_json(value), allow_nan=False, indent=indent, separators=separators)
    except ValueError as error:
        raise CodecError(f"{type(value).__name__} cannot be written: {error}") from None


def from_text(kind: type[T], text: str) -> T:
    """Read a record of type `kind` from JSON text. Raises CodecError."""
    return from_json(kind, parse(text))


def parse(text: str) -> Any:
    """Parse JSON; NaN, Infinity and a repeated key are refused. Raises CodecError."""
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"not JSON: {error}") from None


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def to_json(value: Any) -> Any:
    """Return a record as dicts, lists and scalars; an outcome carries its tag."""
    if isinstance(value, StrEnum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        plain = {
            f.name: to_json(getattr(value, f.name))
            for f in fields(value)
            if not (f.name in UNSTATED and getattr(value, f.name) == f.default)
        }
        tag = next((t for t, kind in OUTCOMES.items() if type(value) is kind), None)
        return plain if tag is None else {"outcome": tag} | plain
    if isinstance(value, tuple):
        return [to_json(v) for v in value]
    return value


def from_json(kind: type[T], data: Any, where: str = "") -> T:
    """Build a record of type `kind` from parsed JSON. Raises CodecError naming the field."""
    record: T = _read(kind, data, where or kind.__name__)
    return record


def encode_event(event: Any, at: str) -> str:
    """Return a journal line (without its newline). Raises CodecError."""
    kind = next((k for k, cls in EVENTS.items() if type(event) is cls), None)
    if kind is None:
        raise CodecError(f"{type(event).__name__} is not a journal event")
    body = to_json(event)
    _read(EVENTS[kind], body, kind)  # what could not be read back is not written
    line = {"v": SCHEMA, "kind": kind, "at": at, "data": body}
    return to_text(line)


def decode_event(text: str) -> Any:
    """Read a journal line. Raises CodecError."""
    return decode_dated(text)[1]


def decode_dated(text: str) -> tuple[str, Any]:
    """Read a journal line and when it was written, ISO 8601 in UTC. Raises CodecError."""
    line = parse(text)
    if not isinstance(line, dict) or set(line) != {"v", "kind", "at", "data"}:
        raise CodecError("not a journal line: v, kind, at and data are wanted")
    check_schema(line["v"])
    kind = line["kind"]
    if not isinstance(kind, str) or kind not in EVENTS:
        raise CodecError(f"unknown event {kind!r}; known: {', '.join(EVENTS)}")
    if not isinstance(line["at"], str):
        raise CodecError("at is not a time")
    return line["at"], _read(EVENTS[kind], line["data"], kind)


def check_schema(version: Any) -> None:
    """Raise CodecError when a record was written under another schema."""
    if version != SCHEMA or isinstance(version, bool):
        raise CodecError(f"written with schema {version!r}; this version reads schema {SCHEMA}")


# ---- reading by type ---------------------------------------------------------------------------


def _read(kind: Any, data: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return _read_union(typing.get_args(kind), data, where)
    if origin is tuple:
        return _read_tuple(typing.get_args(kind), data, where)
    if is_dataclass(kind):
        return _read_dataclass(kind, data, where)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _read_enum(kind, data, where)
    return _read_scalar(kind, data, where)


def _read_scalar(kind: Any, data: Any, where: str) -> Any:
    if type(data) is int and abs(data) > MAX_INT:
        raise CodecError(f"{where}: a number of {data.bit_length()} bits, 64 are read")
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not kind:  # exact: a bool is no int
        raise CodecError(f"{where}: {data!r} is not of type {kind.__name__}")
    if kind is str and not _is_text(data):
        raise CodecError(f"{where}: {data!a} is not text: half of a surrogate pair")
    if kind is float and not math.isfinite(data):
        raise CodecError(f"{where}: {data!r} is not finite")
    return data


def _is_text(data: str) -> bool:
    try:
        data.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_enum(kind: type[StrEnum], data: Any, where: str) -> StrEnum:
    try:
        return kind(data)
    except ValueError:
        raise CodecError(f"{where}: {data!r} is not one of {', '.join(kind)}") from None


def _read_tuple(args: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise CodecError(f"{where}: {data!r} is not a list")
    kinds = [args[0]] * len(data) if args[-1] is Ellipsis else list(args)
    if len(kinds) != len(data):
        raise CodecError(f"{where}: {len(data)} entries, {len(kinds)} wanted")
    return tuple(
        _read(k, d, f"{where}[{i}]") for i, (k, d) in enumerate(zip(kinds, data, strict=True))
    )


def _read_union(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in kinds:
        return None
    kinds = tuple(k for k in kinds if k is not type(None))
    if all(k in OUTCOMES.values() for k in kinds):
        tag = data.get("outcome") if isinstance(data, dict) else None
        if not isinstance(tag, str) or tag not in OUTCOMES:
            raise CodecError(f"{where}: the tag 'outcome' is not one of {', '.join(OUTCOMES)}")
        rest = {k: v for k, v in data.items() if k != "outcome"}
        return _read(OUTCOMES[tag], rest, where)
    if len(kinds) == 1:
        return _read(kinds[0], data, where)
    for kind in kinds:
        if type(data) is kind:
            return _read_scalar(kind, data, where)
    names = ", ".join(k.__name__ for k in kinds)
    raise CodecError(f"{where}: {data!r} is of none of the types {names}")


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read_dataclass(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise CodecError(f"{where}: {data!r} is not an object")
    hints = _hints(kind)
    if unknown := sorted(data.keys() - hints.keys()):
        raise CodecError(f"{where}: unknown field {unknown[0]!r}")
    required = {f.name for f in fields(kind) if f.default is MISSING}
    if missing := sorted(required - data.keys()):
        raise CodecError(f"{where}: no field {missing[0]!r}")
    record = kind(**{k: _read(hints[k], v, f"{where}.{k}") for k, v in data.items()})
    if (check := _CHECKS.get(kind)) is not None and (fault := check(record)) is not None:
        raise CodecError(f"{where}: {fault}")
    return record


# ---- what the fields of a record must satisfy together -----------------------------------------


def _check_timing(timing: Timing) -> str | None:
    if not 0 < timing.low_us <= timing.median_us <= timing.high_us:
        return (
            f"median {timing.median_us} us is not inside its interval "
            f"{timing.low_us} to {timing.high_us} us"
        )
    if not 1 <= timing.splits <= MAX_SPLITS:
        return f"{timing.splits} splits; 1 to {MAX_SPLITS} are possible"
    return None if timing.samples >= 0 else f"{timing.samples} samples"


def _check_measured(outcome: Measured) -> str | None:
    if outcome.error_ratio is None:
        if any(t.basis is not Basis.PREDICTED for t in outcome.timings):
            return "a measured time without an error ratio"
    elif outcome.error_ratio < 0:
        return f"error ratio {outcome.error_ratio} is negative"
    shapes = [t.shape for t in outcome.timings]
    return "a shape is timed twice" if len(set(shapes)) != len(shapes) else None


def _check_rejected(outcome: Rejected) -> str | None:
    if outcome.trial_class in (TrialClass.OK, TrialClass.BROKEN):
        return f"a rejected trial cannot be {outcome.trial_class}"
    return None


def _check_trial(record: TrialRecord) -> str | None:
    if record.index < 0:
        return f"index {record.index} is negative"
    if isinstance(record.outcome, Measured):
        for timing in record.outcome.timings:
            if not record.problem.serves(timing.shape):
                return f"timed on {timing.shape.key}, which {record.problem.key} does not serve"
    return None


def _check_finalist(finalist: Finalist) -> str | None:
    if finalist.timing.shape != finalist.shape:
        return f"timed on {finalist.timing.shape.key}, not on {finalist.shape.key}"
    return None


def _check_spec(spec: RunSpec) -> str | None:
    for what, name in (("run id", spec.run_id), *(("sketch name", n) for n, _ in spec.sketches)):
        if not is_safe_name(name):  # names of files, and shown in commands to be repeated
            return f"{what} {name!a} is not of letters, digits, . _ - only"
    if spec.backend not in tuple(Backend):
        return f"backend {spec.backend!a} is not one of {', '.join(Backend)}"
    if spec.budget < 1:
        return f"budget {spec.budget} is not at least 1"
    for shape in spec.shapes:
        if (fault := _check_phase(spec.phase, spec.page, shape.latent)) is not None:
            return fault
        if spec.phase is Phase.DECODE and shape.seqlen_q > DECODE_QUERIES_MAX:
            return (
                f"shape {shape.key} has {shape.seqlen_q} queries; decoding has at most "
                f"{DECODE_QUERIES_MAX}"
            )
    return None if spec.shapes else "no shapes"


def _check_reference(reference: Reference) -> str | None:
    """What it names is read and run when its digest is right, so it must name one thing."""
    if not reference.path.startswith("/") or "\0" in reference.path:
        return f"reference path {reference.path!a} is not absolute"
    names = (reference.function, *(n for n, _ in reference.scalars))
    if wrong := [n for n in names if not _IDENTIFIER.fullmatch(n)]:
        return f"reference: {wrong[0]!a} is not a name"
    if not _DIGEST.fullmatch(reference.digest):
        return f"reference digest {reference.digest!a} is not SHA-256 in hex"
    return None


def _check_problem(problem: Problem) -> str | None:
    """A problem's key becomes part of file names."""
    try:
        variant_named(problem.variant)
        check_shape(Shape(1, 1, 1, 1, 1, problem.head_dim, problem.head_dim_v))
    except SpaceError as error:
        return str(error)
    return _check_phase(problem.phase, problem.page, problem.latent)


def _check_phase(phase: Phase, page: int, latent: bool) -> str | None:
    if phase is Phase.PREFILL:
        if page:
            return f"a page size of {page}; only a cache that is decoded from is paged"
        return "head dims 576 and 512 are decoded with, not prefilled" if latent else None
    if page and page not in PAGE_SIZES:
        return f"page size {page} is not one of {', '.join(str(n) for n in PAGE_SIZES)}"
    return None


def _check_split_rule(rule: SplitRule) -> str | None:
    for name, limit in SPLIT_RULE_MAX.items():
        if not 1 <= (value := getattr(rule, name)) <= limit:
            return f"{name} is {value}; 1 to {limit} is possible"
    return None


def _check_shape(shape: Shape) -> str | None:
    try:
        check_shape(shape)
    except SpaceError as error:
        return str(error)
    return None


_CHECKS: dict[type[Any], Callable[[Any], str | None]] = {
    Shape: _check_shape,
    Problem: _check_problem,
    SplitRule: _check_split_rule,
    Timing: _check_timing,
    Measured: _check_measured,
    Rejected: _check_rejected,
    TrialRecord: _check_trial,
    Finalist: _check_finalist,
    RunSpec: _check_spec,
    Reference: _check_reference,
}
