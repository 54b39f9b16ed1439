"""Two `tune` processes on one run folder: one goes on, the other refuses in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fake_machine import FULL

from runs.store import JOURNAL, RunStore

ROOT = Path(__file__).parents[2]
SLOW = ROOT / "tests" / "tuner" / "slow_tune.py"


def tune(args: list[str]) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(SLOW.parent), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, str(SLOW), *args], env=os.environ | {"PYTHONPATH": path}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def first_trial(runs: Path) -> Path:
    """Wait until a run has a trial in its journal; return its folder."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for journal in runs.glob(f"2*/{JOURNAL}"):
            if b'"trial"' in journal.read_bytes():
                return journal.parent
        time.sleep(0.01)
    raise AssertionError("no trial within 60 s")


def test_the_second_of_two_processes_refuses_and_harms_nothing(tmp_path: Path) -> None:
    sketch = tmp_path / "sketch.tl"
    sketch.write_text(FULL)
    runs = tmp_path / "runs"
    words = ["--variant", "mha", "--gpu", "a100", "--shapes", "1,16,16,4096,4096,128,128"]
    writer = tune([*words, "--sketch", str(sketch), "--budget", "500", "--runs-dir", str(runs)])
    try:
        run = first_trial(runs)
        second = tune(["--resume", str(run)])
        _, said = second.communicate(timeout=60)
        assert second.returncode in (2, 3)
        assert said.strip() == (
            f"tune: {run} is being written by process {writer.pid}; wait for it or stop it"
        )
        known = len(RunStore.open(run).replay().history)
        deadline = time.monotonic() + 30
        while len(RunStore.open(run).replay().history) == known:
            assert time.monotonic() < deadline and writer.poll() is None  # the first goes on
            time.sleep(0.02)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    # the kill gave the lock back: of two that resume at once, one goes on
    both = [tune(["--resume", str(run), "--budget", "2"]) for _ in range(2)]
    ends = [(p.communicate(timeout=120)[1].strip(), p.returncode) for p in both]
    assert 0 in [code for _, code in ends]
    for said, code in ends:
        assert code == 0 or (code == 2 and "is being written by process" in said)
    history = RunStore.open(run).replay().history
    assert [r.index for r in history] == list(range(len(history)))
