"""Programs that ran right on a real GPU, by digest, so that a later change of their text shows.

The file is written by the program after a run on a GPU, never by hand. A test without a GPU
translates the same programs again and asks `changes` whether they are still what ran.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from runs import codec
from runs.errors import CodecError, StoreError
from runs.files import read_regular
from runs.record import Timing
from space.params import Point
from space.variant import Problem


@dataclass(frozen=True, slots=True)
class Attestation:
    """A program, and what came of running it."""

    name: str
    digest: str  #: of the emitted source, `KernelSource.digest`
    problem: Problem
    sketch: str  #: name of the built-in sketch
    point: Point
    gpu: str  #: what the source was emitted for
    card: str  #: what it ran on, as CUDA calls it
    #: worst error against fp64 over that of plain attention at the same dtype
    error_ratio: float
    timings: tuple[Timing, ...]
    versions: tuple[tuple[str, str], ...]  #: torch, driver, NVRTC, ...
    date: str  #: UTC, ISO 8601


@dataclass(frozen=True, slots=True)
class _File:
    v: int
    attestations: tuple[Attestation, ...]


def load(path: Path) -> tuple[Attestation, ...]:
    """Read the attestations; none when the file is absent. Raises StoreError when damaged."""
    try:
        body = codec.parse(read_regular(path).decode())
        codec.check_schema(body.get("v") if isinstance(body, dict) else None)
        return codec.from_json(_File, body).attestations
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from None
    except (CodecError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is damaged: {error}") from None


def add(path: Path, new: Iterable[Attestation]) -> None:
    """Put attestations into the file; one of the same name and card is replaced.

    Raises StoreError when the file is damaged or cannot be written.
    """
    kept = {(a.name, a.card): a for a in (*load(path), *new)}
    body = _File(codec.SCHEMA, tuple(kept[key] for key in sorted(kept)))
    text = codec.to_text(body, indent=1)
    codec.from_text(_File, text)  # what could not be read back is not written
    try:
        handle, private = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
        os.chmod(private, 0o644)
        os.replace(private, path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from None


def changes(attested: Iterable[Attestation], programs: Mapping[str, str]) -> tuple[str, ...]:
    """Return one line for each attested program that is absent or whose digest is another.

    `programs` maps names to the digests of today's text. A program that was attested on several
    cards may have been attested with several texts; one of them must be today's.
    """
    by_name: dict[str, list[Attestation]] = {}
    for a in attested:
        by_name.setdefault(a.name, []).append(a)
    return tuple(
        line
        for name, known in by_name.items()
        if (line := _change(name, known, programs.get(name))) is not None
    )


def _change(name: str, known: list[Attestation], digest: str | None) -> str | None:
    if digest is None:
        return f"{name}: attested, but no such program is built"
    if any(a.digest == digest for a in known):
        return None
    last = max(known, key=lambda a: a.date)
    return (
        f"{name}: its text changed ({last.digest[:12]} ran right on {last.card} at {last.date}, "
        f"today's is {digest[:12]}); run it on a GPU and attest it again"
    )
