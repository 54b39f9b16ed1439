"""A run's folder: its specification, an append-only journal, and the kernels it built.

spec.json        what was asked
journal.jsonl    one event a line, flushed and synced; never edited
sketches/        the TL text that was searched, NAME.tl
kernels/KEY/     source.cu, image.cubin, log.txt, kernel.json, by the cubin's key
lock             locked by the one process that may write
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from codegen.kernel import Cubin, KernelSource
from runs import codec
from runs.errors import CodecError, StoreError
from runs.files import (
    append_synced,
    private_folder,
    publish,
    read_regular,
    safe_name,
    write_synced,
)
from runs.kernels import StoredKernel, read_kernel, write_kernel
from runs.record import (
    REJECTED_IN_FINAL,
    Event,
    Finalist,
    Finished,
    History,
    Measured,
    Note,
    Resumed,
    RunSpec,
    Timing,
    TrialRecord,
)
from runs.templates.manifest import digest_of

SPEC, JOURNAL, LOCK, SKETCHES, KERNELS = "spec.json", "journal.jsonl", "lock", "sketches", "kernels"


def new_run_id(variant: str, gpu: str, now: datetime | None = None) -> str:
    """Return the id of a run that starts now: `20261130T1200Z-mla-l40s`."""
    stamp = (now or datetime.now(UTC)).astimezone(UTC).strftime("%Y%m%dT%H%MZ")
    return f"{stamp}-{variant}-{gpu}"


@dataclass(frozen=True, slots=True)
class Replay:
    """Everything that a journal says, in order."""

    events: tuple[Event, ...]
    #: whether the last line was torn by a kill and is left out
    torn: bool = False

    @property
    def history(self) -> History:
        """The trials."""
        return History(tuple(e for e in self.events if isinstance(e, TrialRecord)))

    @property
    def finalists(self) -> tuple[Finalist, ...]:
        """The final timings; those of a shape that was timed again after a resume are dropped."""
        by_shape: dict[str, tuple[int, list[Finalist]]] = {}
        session = 0
        for e in self.events:
            if isinstance(e, Resumed):
                session += 1
            elif isinstance(e, Finalist):
                known = by_shape.get(e.shape.key)
                if known is None or known[0] != session:
                    known = by_shape[e.shape.key] = (session, [])
                known[1].append(e)
        return tuple(f for _, found in by_shape.values() for f in found)

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes, in order."""
        return tuple(e for e in self.events if isinstance(e, Note))

    @property
    def sound(self) -> History:
        """The trials that did not fail the harder checks of a final timing."""
        failed = [n.as_dict().get("trial") for n in self.notes if n.topic == REJECTED_IN_FINAL]
        return self.history.without([n for n in failed if isinstance(n, int)])

    @property
    def finished(self) -> Finished | None:
        """How the run ended, or None when it was stopped before its end or went on since."""
        ends = [e for e in self.events if isinstance(e, Finished | Resumed)]
        return ends[-1] if ends and isinstance(ends[-1], Finished) else None


class RunStore:
    """One run's folder. A store that was created, or opened to write, holds the folder's lock."""

    def __init__(self, path: Path, spec: RunSpec, lock: int | None) -> None:
        self.path = path
        self.spec = spec
        self._lock = lock

    @classmethod
    def create(cls, root: Path, spec: RunSpec) -> RunStore:
        """Make a new folder for `spec` under `root`, whole or not at all, and lock it.

        When the run's id is taken `-2`, `-3`, ... is added; `store.spec` holds the id in use.
        Raises StoreError when `root` cannot be written, CodecError when `spec` is not valid.
        """
        safe_name(spec.run_id, "run id")
        for name, _ in spec.sketches:
            safe_name(name, "sketch name")
        codec.from_json(RunSpec, codec.to_json(spec))  # what could not be read back is not begun
        lock: int | None = None
        try:
            root.mkdir(parents=True, exist_ok=True)
            with private_folder(root) as private:
                lock = _lock(private)
                (private / KERNELS).mkdir()
                (private / SKETCHES).mkdir()
                for name, text in spec.sketches:
                    write_synced(private / SKETCHES / f"{name}.tl", text.encode())
                write_synced(private / JOURNAL, b"")
                number, named = 1, spec
                while not _publish_as(private, root, named):
                    number += 1
                    named = replace(spec, run_id=f"{spec.run_id}-{number}")
            return cls(root / named.run_id, named, lock)
        except BaseException as error:
            if lock is not None:
                os.close(lock)
            if isinstance(error, OSError):
                why = error.strerror or str(error)
                raise StoreError(f"cannot write a run into {root}: {why}") from None
            raise

    @classmethod
    def open(cls, path: Path, write: bool = False) -> RunStore:
        """Open a run's folder; to write, lock it and cut off a last line that a kill has torn.

        Raises StoreError when it is no run folder, is damaged, or another process writes it.
        """
        spec = _read_spec(path)
        if write:
            for name in (JOURNAL, LOCK, SKETCHES, KERNELS, "export", "exchanges.jsonl"):
                if (path / name).is_symlink():  # what is written must stay in the folder
                    raise StoreError(f"{path / name} is a link; a run is not written through one")
                there = path / name
                if there.exists() and not (there.is_file() or there.is_dir()):
                    raise StoreError(f"{there} is no regular file; a run is not written to one")
        store = cls(path, spec, _lock(path) if write else None)
        if write:
            try:
                store._cut_torn_tail()
            except BaseException:
                store.close()
                raise
        return store

    def append(self, event: Event) -> None:
        """Append one event and wait until it is on disk. Raises StoreError or CodecError."""
        if self._lock is None:
            raise StoreError(f"{self.path} was opened to read; open it to write")
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = codec.encode_event(event, at).encode() + b"\n"
        try:
            append_synced(self.path / JOURNAL, line)
        except OSError as error:
            raise StoreError(f"cannot write {self.path / JOURNAL}: {error.strerror}") from None

    def replay(self) -> Replay:
        """Read the journal. Raises StoreError naming the first damaged line before the last."""
        lines = self._lines()
        events: list[Any] = []
        seen: set[int] = set()
        for number, line in enumerate(lines, start=1):
            if number == len(lines) and _is_torn(line):
                return Replay(tuple(events), torn=True)
            try:
                event = codec.decode_event(line.decode())
                _check_belongs(event, self.spec, seen)
                events.append(event)
            except (CodecError, UnicodeDecodeError) as error:
                where = f"{self.path / JOURNAL} line {number}"
                raise StoreError(f"{where} is damaged: {error}") from None
        return Replay(tuple(events))

    def dated(self) -> tuple[tuple[datetime, Event], ...]:
        """Return the journal's events, each with when it was written. Raises StoreError."""
        found = []
        whole = len(self.replay().events)
        for number, line in enumerate(self._lines()[:whole], start=1):
            try:
                at, event = codec.decode_dated(line.decode())
                found.append((datetime.fromisoformat(at).astimezone(UTC), event))
            except ValueError:
                where = f"{self.path / JOURNAL} line {number}"
                raise StoreError(f"{where} is damaged: its time is none") from None
        return tuple(found)

    def put_kernel(self, source: KernelSource, cubin: Cubin) -> Path:
        """Store a kernel under its cubin's key; one that is there is kept. Raises StoreError."""
        folder = self.path / KERNELS / safe_name(cubin.key, "cubin key")
        write_kernel(folder, source, cubin)
        return folder

    def has_kernel(self, cubin_key: str) -> bool:
        """Whether a kernel was kept, sound or not. Raises StoreError on a key that is no name."""
        return (self.path / KERNELS / safe_name(cubin_key, "cubin key")).exists()

    def kernel(self, cubin_key: str) -> StoredKernel:
        """Return a stored kernel. Raises StoreError when it is absent or damaged."""
        return read_kernel(self.path / KERNELS / safe_name(cubin_key, "cubin key"))

    def close(self) -> None:
        """Give the lock back. The store can still be read."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _lines(self) -> list[bytes]:
        try:
            data = read_regular(self.path / JOURNAL)
        except OSError as error:
            raise StoreError(f"cannot read {self.path / JOURNAL}: {error.strerror}") from None
        *whole, tail = data.split(b"\n")
        return [line + b"\n" for line in whole] + ([tail] if tail else [])

    def _cut_torn_tail(self) -> None:
        if not self.replay().torn:
            return
        keep = sum(len(line) for line in self._lines()[:-1])
        try:
            with (self.path / JOURNAL).open("r+b") as journal:
                journal.truncate(keep)
                os.fsync(journal.fileno())
        except OSError as error:
            raise StoreError(f"cannot mend {self.path / JOURNAL}: {error.strerror}") from None


def _is_torn(line: bytes) -> bool:
    """Whether a kill or a power cut can have left the journal's last line like this."""
    try:
        codec.parse(line.decode())
    except (CodecError, UnicodeDecodeError):
        return True
    return not line.endswith(b"\n")


def _check_belongs(event: Event, spec: RunSpec, seen: set[int]) -> None:
    """Raise CodecError for a trial or a time that no run of this specification wrote.

    `seen` holds the trials before it, and takes it in.
    """
    times: tuple[Timing, ...] = ()
    if isinstance(event, TrialRecord):
        if event.index in seen:
            raise CodecError(f"trial {event.index} is there twice")
        seen.add(event.index)
        said, wanted = (event.problem.dtype, event.problem.phase), (spec.dtype, spec.phase)
        if said != wanted:
            raise CodecError(
                f"trial {event.index} is of {' '.join(said)} and the run of {' '.join(wanted)}"
            )
        if isinstance(event.outcome, Measured):
            times = event.outcome.timings
    elif isinstance(event, Finalist):
        times = (event.timing,)
    for t in times:
        if t.basis is not spec.measure:
            raise CodecError(f"a time is {t.basis} and the run's are {spec.measure}")


def _publish_as(private: Path, root: Path, spec: RunSpec) -> bool:
    """Write the specification and give the folder its name; False when the name is taken."""
    body = {"v": codec.SCHEMA, "spec": codec.to_json(spec)}
    body |= {"sha256": digest_of(body)}
    (private / SPEC).unlink(missing_ok=True)
    write_synced(private / SPEC, codec.to_text(body).encode() + b"\n")
    return publish(private, root / spec.run_id)


def _read_spec(path: Path) -> RunSpec:
    try:
        body = codec.parse(read_regular(path / SPEC).decode())
        if not isinstance(body, dict) or set(body) - {"sha256"} != {"v", "spec"}:
            raise CodecError("v and spec are wanted")
        codec.check_schema(body["v"])
        spec = codec.from_json(RunSpec, body["spec"])
        # runs from before there was a digest lack it
        if "sha256" in body and body["sha256"] != digest_of(body):
            raise CodecError("it is not what the run began with: its digest differs")
        return spec
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{path} is not a run folder: no {SPEC} in it") from None
    except OSError as error:
        raise StoreError(f"cannot read {path / SPEC}: {error.strerror}") from None
    except (CodecError, UnicodeDecodeError) as error:
        raise StoreError(f"{path / SPEC} is damaged: {error}") from None


def _lock(folder: Path) -> int:
    """Return an open, locked handle. Raises StoreError when another process holds the lock."""
    try:
        handle = os.open(
            folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
        )
    except OSError as error:
        raise StoreError(f"cannot write {folder}: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        raise StoreError(
            f"{folder} is being written by process {owner}; wait for it or stop it"
        ) from None
    with contextlib.suppress(OSError):  # a full disk: the number is a courtesy, the lock holds
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
    return handle
