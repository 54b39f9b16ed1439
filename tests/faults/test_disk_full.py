"""A disk that fills while a run is written: the folder stays valid, and the run goes on later."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_machine import A100, FULL, FakeMachine
from records import EVENTS, SPEC, kernel

from runs.errors import StoreError
from runs.record import TrialRecord
from runs.store import JOURNAL, RunStore
from tuner.cli import main


@contextmanager
def disk_with(room: int) -> Iterator[None]:
    """Let files grow by `room` bytes more in all; then ENOSPC, after a short write like a disk."""
    left = room
    real_write = os.write

    def write(handle: int, data: bytes) -> int:
        nonlocal left
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = real_write(handle, bytes(data)[:left])
        left -= done
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", write)
        yield


def line_bytes(root: Path) -> int:
    """Length of the journal line of EVENTS[1]."""
    with RunStore.create(root / "measure", SPEC) as store:
        store.append(EVENTS[1])
        return (store.path / JOURNAL).stat().st_size


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.7, 0.99])
def test_a_line_cut_by_a_full_disk_leaves_no_trace(tmp_path: Path, share: float) -> None:
    room = int(line_bytes(tmp_path) * share)
    with RunStore.create(tmp_path / "runs", SPEC) as store:
        store.append(EVENTS[0])
        before = (store.path / JOURNAL).read_bytes()
        with disk_with(room), pytest.raises(StoreError, match="No space left on device"):
            store.append(EVENTS[1])
        assert (store.path / JOURNAL).read_bytes() == before
        store.append(EVENTS[2])
        assert store.replay().events == (EVENTS[0], EVENTS[2])


def test_a_disk_that_refuses_the_sync_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunStore.create(tmp_path, SPEC) as store:
        store.append(EVENTS[0])

        def refuse(handle: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch, pytest.raises(StoreError, match="No space left"):
            patch.setattr(os, "fsync", refuse)
            store.append(EVENTS[1])
        assert store.replay().events == (EVENTS[0],)


CUT = """
import resource, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from records import EVENTS
from runs.errors import StoreError
from runs.store import RunStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = RunStore.open(Path(sys.argv[1]), write=True)
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
try:
    store.append(EVENTS[1])
except StoreError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.append(EVENTS[2])
"""


@pytest.mark.parametrize("share", [0.1, 0.6, 0.9])
def test_a_file_that_may_not_grow_is_cut_back_by_the_kernel_itself(
    tmp_path: Path, share: float
) -> None:
    """The same with the real system calls: more than half of a line fits, then the rest would."""
    room = int(line_bytes(tmp_path) * share)
    with RunStore.create(tmp_path / "runs", SPEC) as store:
        store.append(EVENTS[0])
    limit = (store.path / JOURNAL).stat().st_size + room
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "tests/runs")]
    done = subprocess.run(
        [sys.executable, "-c", CUT, str(store.path), str(limit), *paths],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert "File too large" in done.stdout
    assert RunStore.open(store.path).replay().events == (EVENTS[0], EVENTS[2])


def test_a_kernel_that_does_not_fit_is_absent_and_can_be_put_later(tmp_path: Path) -> None:
    source, cubin = kernel()
    with RunStore.create(tmp_path, SPEC) as store:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, limit[1]))
        try:
            with pytest.raises(StoreError, match="cannot write"):
                store.put_kernel(source, cubin)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            signal.signal(signal.SIGXFSZ, old)
        assert list((store.path / "kernels").iterdir()) == []
        store.put_kernel(source, cubin)
        assert store.kernel(cubin.key).cubin == cubin


def arguments(root: Path, budget: int) -> list[str]:
    sketch = root / "sketch.tl"
    sketch.write_text(FULL)
    shape = "1,16,16,4096,4096,128,128"
    words = ["--variant", "mha", "--gpu", "a100", "--shapes", shape, "--sketch", str(sketch)]
    return [*words, "--budget", str(budget), "--runs-dir"]


def trials(run: Path) -> list[tuple[int, object, object]]:
    records = RunStore.open(run).replay().history
    return [(r.index, r.point, r.outcome) for r in records]


def test_a_run_that_fills_the_disk_says_so_and_resumes_like_one_that_did_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments(tmp_path, 12)
    assert main([*words, str(tmp_path / "whole")], FakeMachine(A100).machine()) == 0
    (whole,) = (tmp_path / "whole").iterdir()
    capsys.readouterr()
    size = (whole / JOURNAL).stat().st_size
    runs = tmp_path / "full"
    with disk_with(size // 3):
        assert main([*words, str(runs)], FakeMachine(A100).machine()) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("tune: cannot write") and "No space left on device" in said
    assert "\n" not in said
    (run,) = runs.iterdir()
    assert 0 < len(trials(run)) < 12
    for room in (0, 10, size // 3):  # still full, then a little more room each time
        with disk_with(room):
            assert main(["--resume", str(run)], FakeMachine(A100).machine()) == 2
        known = trials(run)
        assert known == trials(whole)[: len(known)]
    capsys.readouterr()
    assert main(["--resume", str(run)], FakeMachine(A100).machine()) == 0
    assert trials(run) == trials(whole)


@pytest.mark.parametrize("step", ["write", "fsync"])
def test_a_resume_on_a_disk_that_refuses_everything_is_one_line(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments(tmp_path, 3)
    assert main([*words, str(tmp_path / "runs")], FakeMachine(A100).machine()) == 0
    (run,) = (tmp_path / "runs").iterdir()
    with (run / JOURNAL).open("ab") as journal:
        journal.write(b'{"v":1,"kind":"tri')
    capsys.readouterr()
    refuse: Callable[..., int] = _refuse
    with monkeypatch.context() as patch:
        patch.setattr(os, step, refuse)
        assert main(["--resume", str(run)], FakeMachine(A100).machine()) == 2
    assert capsys.readouterr().err.count("\n") == 1
    RunStore.open(run, write=True).close()  # the lock was given back
    assert all(isinstance(r, TrialRecord) for r in RunStore.open(run).replay().history)


def _refuse(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
