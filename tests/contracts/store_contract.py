"""What every store of a run must keep: append, replay, survive a kill, one writer.

A test module subclasses `StoreContract` and gives it a fixture `root`.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runs.errors import CodecError, StoreError
from runs.record import Event, Measured, RunSpec
from runs.store import JOURNAL, SPEC, RunStore

WRITER = """
import os, sys
from pathlib import Path
from runs.record import Resumed
from runs.store import RunStore
store = RunStore.open(Path(sys.argv[1]), write=True)
print("ready", flush=True)
n = 0
while True:
    store.append(Resumed(n))
    n += 1
    print(n, flush=True)
"""


class StoreContract:
    """The suite. `spec` and `events` are fixtures of the subclass's module."""

    def test_replays_what_was_appended(
        self, root: Path, spec: RunSpec, events: tuple[Event, ...]
    ) -> None:
        with RunStore.create(root, spec) as store:
            for event in events:
                store.append(event)
        again = RunStore.open(store.path)
        assert again.spec == spec
        assert again.replay().events == events
        assert not again.replay().torn

    def test_never_reuses_a_folder(self, root: Path, spec: RunSpec) -> None:
        names = []
        for _ in range(3):
            with RunStore.create(root, spec) as store:
                names.append(store.spec.run_id)
                assert RunStore.open(store.path).spec.run_id == store.path.name
        assert names == [spec.run_id, f"{spec.run_id}-2", f"{spec.run_id}-3"]

    def test_leaves_nothing_when_it_fails(self, root: Path, spec: RunSpec) -> None:
        for bad, error in (
            (dataclasses.replace(spec, budget=0), CodecError),
            (dataclasses.replace(spec, run_id="../escape"), StoreError),
            (dataclasses.replace(spec, sketches=(("a/b", ""),)), StoreError),
        ):
            with pytest.raises(error):
                RunStore.create(root, bad)
        assert not root.exists() or not list(root.iterdir())

    @pytest.mark.parametrize("cut", [1, 7, 60])
    def test_a_torn_last_line_costs_that_line(
        self, root: Path, spec: RunSpec, events: tuple[Event, ...], cut: int
    ) -> None:
        with RunStore.create(root, spec) as store:
            for event in events:
                store.append(event)
        journal = store.path / JOURNAL
        os.truncate(journal, journal.stat().st_size - cut)
        replay = RunStore.open(store.path).replay()
        assert replay.torn and replay.events == events[:-1]
        with RunStore.open(store.path, write=True) as store:
            store.append(events[-1])
        replay = RunStore.open(store.path).replay()
        assert not replay.torn and replay.events == events

    def test_zeros_after_a_power_cut_are_a_torn_line(
        self, root: Path, spec: RunSpec, events: tuple[Event, ...]
    ) -> None:
        with RunStore.create(root, spec) as store:
            store.append(events[0])
        with (store.path / JOURNAL).open("ab") as journal:
            journal.write(bytes(512))
        with RunStore.open(store.path, write=True) as store:
            assert store.replay().events == events[:1]
            assert not store.replay().torn

    def test_a_damaged_middle_line_is_reported_by_number(
        self, root: Path, spec: RunSpec, events: tuple[Event, ...]
    ) -> None:
        with RunStore.create(root, spec) as store:
            for event in events[:3]:
                store.append(event)
        journal = store.path / JOURNAL
        lines = journal.read_bytes().split(b"\n")
        journal.write_bytes(b"\n".join([lines[0], lines[1][:-9], *lines[2:]]))
        with pytest.raises(StoreError, match="line 2 is damaged"):
            RunStore.open(store.path).replay()
        with pytest.raises(StoreError, match="line 2 is damaged"):
            RunStore.open(store.path, write=True)
        # the refusal gave the lock back
        journal.write_bytes(b"\n".join(lines))
        RunStore.open(store.path, write=True).close()

    def test_a_last_line_that_is_whole_but_unknown_is_kept_and_reported(
        self, root: Path, spec: RunSpec, events: tuple[Event, ...]
    ) -> None:
        with RunStore.create(root, spec) as store:
            store.append(events[0])
        journal = store.path / JOURNAL
        with journal.open("ab") as file:
            file.write(b'{"v":1,"kind":"later","at":"","data":{}}\n')
        before = journal.read_bytes()
        with pytest.raises(StoreError, match="line 2 is damaged: unknown event 'later'"):
            RunStore.open(store.path, write=True)
        assert journal.read_bytes() == before

    def test_has_one_writer_and_any_reader(self, root: Path, spec: RunSpec) -> None:
        with RunStore.create(root, spec) as store:
            with pytest.raises(StoreError, match=f"being written by process {os.getpid()}"):
                RunStore.open(store.path, write=True)
            RunStore.open(store.path).replay()
        with RunStore.open(store.path, write=True):
            pass

    def test_survives_a_kill_at_any_moment(self, root: Path, spec: RunSpec) -> None:
        RunStore.create(root, spec).close()
        path = root / spec.run_id
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
            with pytest.raises(StoreError, match=f"by process {writer.pid}"):
                RunStore.open(path, write=True)
            for _ in range(5):
                done = int(writer.stdout.readline())
            writer.kill()
        with RunStore.open(path, write=True) as store:
            assert len(store.replay().events) >= done

    def test_a_reader_cannot_append(
        self, root: Path, spec: RunSpec, events: tuple[Event, ...]
    ) -> None:
        RunStore.create(root, spec).close()
        with pytest.raises(StoreError, match="opened to read"):
            RunStore.open(root / spec.run_id).append(events[0])

    def test_a_bad_event_leaves_the_journal_as_it_was(
        self, root: Path, spec: RunSpec, events: tuple[Event, ...]
    ) -> None:
        with RunStore.create(root, spec) as store:
            store.append(events[0])
            bad = dataclasses.replace(events[0], outcome=Measured((), float("nan")))
            with pytest.raises(CodecError):
                store.append(bad)
            assert store.replay().events == events[:1]

    def test_says_that_a_folder_is_no_run(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        with pytest.raises(StoreError, match=r"is not a run folder: no spec\.json in it"):
            RunStore.open(root)
        with pytest.raises(StoreError, match="is not a run folder"):
            RunStore.open(root / "absent", write=True)
        (root / SPEC).write_text("{}")
        with pytest.raises(StoreError, match=r"spec.json is damaged"):
            RunStore.open(root)
