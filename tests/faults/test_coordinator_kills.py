"""SIGKILL at fifty random moments: no trial lost, none doubled, the end as if never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_machine import A100, FULL, FakeMachine

from runs.store import JOURNAL, Replay, RunStore
from tuner.cli import main

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHAPES = ("1,16,16,4096,4096,128,128", "4,16,16,1024,1024,64,64")


def arguments(root: Path, budget: int, seed: int) -> list[str]:
    sketch = root / "sketch.tl"
    sketch.write_text(FULL)
    words = ["--variant", "mha", "--gpu", "a100", "--sketch", str(sketch), "--seed", str(seed)]
    return [*words, "--budget", str(budget), "--shapes", *SHAPES]


def shown_trials(runs: Path) -> list[int]:
    """Index of every trial that any of the killed processes showed to its user."""
    found = []
    for file in runs.glob("shown-*"):
        for line in file.read_text().splitlines():
            try:
                event = json.loads(line)
            except ValueError:  # cut by the kill
                continue
            if event["event"] == "trial":
                found.append(int(event["index"]))
    return found


def outcome_of(replay: Replay) -> tuple[object, object]:
    trials = [(r.index, r.problem, r.sketch, r.point, r.origin, r.outcome) for r in replay.history]
    return trials, [f for f in replay.finalists if f.chosen]


@pytest.mark.parametrize(("kills", "budget", "seed"), [(50, 125, 3)])
def test_a_run_killed_fifty_times_ends_like_one_never_killed(
    tmp_path: Path, kills: int, budget: int, seed: int
) -> None:
    args = arguments(tmp_path, budget, seed)
    whole = tmp_path / "whole"
    assert main([*args, "--runs-dir", str(whole)], FakeMachine(A100).machine()) == 0
    expected = RunStore.open(next(whole.iterdir())).replay()

    runs = tmp_path / "killed"
    runs.mkdir()
    path = os.pathsep.join([str(HERE.parent / "tuner"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, str(HERE / "kill_herd.py"), str(runs), str(kills), str(seed), *args],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    ends = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [e["killed"] for e in ends] == [True] * kills + [False]
    assert ends[-1]["code"] == 0

    (journal,) = runs.glob(f"2*/{JOURNAL}")
    found = RunStore.open(journal.parent).replay()
    assert not found.torn
    assert [r.index for r in found.history] == list(range(len(found.history)))
    programs = [(r.problem, r.sketch, r.point.key) for r in found.history]
    assert len(set(programs)) == len(programs)  # none doubled
    shown = shown_trials(runs)
    assert sorted(set(shown)) == sorted(shown) and set(shown) <= set(range(len(found.history)))
    assert outcome_of(found) == outcome_of(expected)
    assert found.history.spent() == budget
    # every right trial has its kernel
    store = RunStore.open(journal.parent)
    for record in found.history:
        assert store.kernel(record.cubin_key).source.digest == record.source_digest
