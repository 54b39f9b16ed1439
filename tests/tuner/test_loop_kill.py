"""SIGKILL at any moment: no trial lost, none doubled, and the run ends as if never stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from fake_machine import FULL, FakeMachine

from runs.record import Measured
from runs.store import RunStore
from tuner.cli import main

HERE = Path(__file__).parent
BUDGET = 30


def start(args: list[str]) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(HERE), str(HERE.parent.parent)])
    return subprocess.Popen(
        [sys.executable, str(HERE / "slow_tune.py"), *args],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def journal_of(runs: Path) -> Path | None:
    return next(iter(runs.glob("*/journal.jsonl")), None)


def kill_after_lines(process: subprocess.Popen[bytes], runs: Path, lines: int, wait: float) -> None:
    """Kill once the journal holds `lines` lines and `wait` seconds more have passed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        journal = journal_of(runs)
        if journal is not None and journal.read_bytes().count(b"\n") >= lines:
            break
        time.sleep(0.005)
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_run_killed_again_and_again_ends_like_one_never_killed(tmp_path: Path) -> None:
    sketch = tmp_path / "sketch.tl"
    sketch.write_text(FULL)
    args = ["--variant", "mha", "--gpu", "a100", "--shapes", "1,16,16,4096,4096,128,128"]
    args += ["--sketch", str(sketch), "--budget", str(BUDGET), "--runs-dir"]
    whole = tmp_path / "whole"
    assert main([*args, str(whole)], FakeMachine(("NVIDIA A100-SXM4-80GB",)).machine()) == 0

    runs = tmp_path / "killed"
    rng = random.Random(11)
    process = start([*args, str(runs)])
    for lines in (4, 12, 22):
        kill_after_lines(process, runs, lines, rng.random() * 0.05)
        journal = journal_of(runs)
        assert journal is not None
        known = RunStore.open(journal.parent).replay().history  # valid after every kill
        assert [r.index for r in known] == list(range(len(known)))
        process = start(["--resume", str(journal.parent)])
    assert process.wait(timeout=120) == 0

    journal = journal_of(runs)
    assert journal is not None
    found = RunStore.open(journal.parent).replay()
    expected = RunStore.open(next(iter(whole.iterdir()))).replay()
    assert [(r.index, r.point, r.outcome) for r in found.history] == [
        (r.index, r.point, r.outcome) for r in expected.history
    ]
    assert found.history.spent() == BUDGET
    assert [f for f in found.finalists if f.chosen] == [f for f in expected.finalists if f.chosen]


def test_every_right_trial_of_a_killed_run_has_its_kernel(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    sketch = tmp_path / "sketch.tl"
    sketch.write_text(FULL)
    args = ["--variant", "mha", "--gpu", "a100", "--shapes", "1,16,16,512,512,128,128"]
    process = start([*args, "--sketch", str(sketch), "--budget", "50", "--runs-dir", str(runs)])
    kill_after_lines(process, runs, 8, 0.0)
    journal = journal_of(runs)
    assert journal is not None
    store = RunStore.open(journal.parent)
    history = store.replay().history
    assert len(history) >= 5
    for record in history:
        assert isinstance(record.outcome, Measured)
        assert store.kernel(record.cubin_key).source.digest == record.source_digest
