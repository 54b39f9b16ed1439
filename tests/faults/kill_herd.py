"""A process for the kill test: forks one `tune` after another and kills each at a random moment.

Forking after the imports is what makes fifty kills cheap. Usage: RUNS KILLS SEED ARGUMENT...
Each child writes what it shows (JSON lines) to RUNS/shown-N; how each ended is on stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from fake_machine import FakeMachine

from runs.record import Outcome
from runs.store import JOURNAL
from tuner.cli import main
from tuner.lanes import Candidate

TRIAL_S = 0.02
LONGEST_S = 0.4  #: every other kill comes between the start of a child and this,
MOST_TRIALS = 2  #: the others after so many new trials at most, and a moment


def verdict(candidate: Candidate) -> Outcome | None:
    time.sleep(TRIAL_S)
    return None


def child(args: list[str], shown: Path) -> None:
    """Run `tune` in this process and leave it; never returns."""
    out = os.open(shown, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    machine = FakeMachine(("NVIDIA A100-SXM4-80GB",), verdict).machine()
    os._exit(main(args, machine))


def start(args: list[str], shown: Path) -> int:
    """Fork a child and return its process id."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            child(args, shown)
        os._exit(99)
    return pid


def wait_for_a_moment(rng: random.Random, runs: Path, among_trials: bool) -> None:
    """Sleep until the child shall be killed: before it has done so much that a run soon ends."""
    known = trials(runs)
    most = rng.randint(1, MOST_TRIALS) if among_trials else MOST_TRIALS
    deadline = time.monotonic() + (10 if among_trials else rng.random() * LONGEST_S)
    while trials(runs) < known + most and time.monotonic() < deadline:
        time.sleep(0.001)
    if among_trials:
        time.sleep(rng.random() * TRIAL_S * 2)


def trials(runs: Path) -> int:
    """Trials in the run's journal."""
    return sum(j.read_bytes().count(b'"kind":"trial"') for j in runs.glob(f"2*/{JOURNAL}"))


def herd(runs: Path, kills: int, seed: int, args: list[str]) -> None:
    """Kill `kills` children, then let one end."""
    rng = random.Random(seed)
    run: Path | None = None
    done = number = 0
    while True:
        number += 1
        run = run or next((j.parent for j in runs.glob(f"2*/{JOURNAL}")), None)
        words = ["--json", *args, "--runs-dir", str(runs)] if run is None else None
        pid = start(words or ["--json", "--resume", str(run)], runs / f"shown-{number}")
        if done < kills:
            wait_for_a_moment(rng, runs, among_trials=number % 2 == 0)
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        killed = os.WIFSIGNALED(status)
        code = None if killed else os.waitstatus_to_exitcode(status)
        print(json.dumps({"killed": killed, "code": code}), flush=True)
        done += killed
        if not killed:
            return


if __name__ == "__main__":
    # what every child would compute again
    main(["list"], FakeMachine().machine())
    herd(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
