"""compute-sanitizer: how it is found and started, what its words mean, and what becomes of them."""

from __future__ import annotations

import dataclasses
import stat
import time
from pathlib import Path

import pytest
from fake_worker import FakeWorker

from tuner.errors import MachineError
from tuner.sanitizer import (
    FAULTS_EXIT,
    Finding,
    State,
    entries_of,
    installed,
    read,
    sanitize,
)
from tuner.subjects import Verified, subjects_of
from tuner.verify import plan, verdicts

H200 = ("NVIDIA H200",)
CLEAN = "========= ERROR SUMMARY: 0 errors"
RACES = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, {} warnings)"
READ = "========= Invalid __global__ read of size 16 bytes"
RACE = "========= Error: Race reported between Write access at forward+0x10"
ABSENT = "Error: Target application terminated before first instrumented API call"


@pytest.mark.parametrize(
    ("tool", "code", "text", "state", "said"),
    [
        ("memcheck", 0, CLEAN, State.CLEAN, ""),
        ("racecheck", 0, RACES.format(0, 0, 0), State.CLEAN, ""),
        ("racecheck", FAULTS_EXIT, RACES.format(2, 0, 2), State.CLEAN, "2 warnings"),
        (
            "memcheck", FAULTS_EXIT, f"========= COMPUTE-SANITIZER\n{READ}\n"
            "========= ERROR SUMMARY: 3 errors\n",
            State.FAULTS, "Invalid __global__ read of size 16 bytes",
        ),
        # the sanitizer ends the context, so the program dies of it with a code of its own
        (
            "memcheck", 1, f"{READ}\nRuntimeError: CUDA error: unspecified launch failure\n"
            "========= ERROR SUMMARY: 1 error\n",
            State.FAULTS, "Invalid __global__ read of size 16 bytes",
        ),
        (
            "racecheck", FAULTS_EXIT, f"{RACE}\n{RACES.format(1, 1, 0)}\n",
            State.FAULTS, "Error: Race reported between Write access at forward+0x10",
        ),
        ("memcheck", 1, f"Traceback\nRuntimeError: no device\n{CLEAN}", State.NO_VERDICT, CLEAN),
        ("memcheck", 255, f"========= {ABSENT}", State.NO_VERDICT, ABSENT),
        # ended before its summary, with a fault already told
        ("memcheck", FAULTS_EXIT, READ, State.FAULTS, READ.strip("= ")),
        ("racecheck", FAULTS_EXIT, RACE, State.FAULTS, RACE.strip("= ")),
        # it may exit with 0 when it could watch nothing
        ("racecheck", 0, f"========= {ABSENT}", State.NO_VERDICT, ABSENT),
        ("racecheck", 0, "", State.NO_VERDICT, "exit code 0"),
        # two processes, one of them at fault
        ("memcheck", FAULTS_EXIT, f"{CLEAN}\n{READ}\n========= ERROR SUMMARY: 1 error",
         State.FAULTS, READ.strip("= ")),
    ],
)  # fmt: skip
def test_what_the_sanitizer_says(
    tool: str, code: int, text: str, state: State, said: str
) -> None:  # fmt: skip
    assert read(tool, code, text) == Finding(tool, state, said.strip("= "))


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize("exported", [False, True])
def test_sanitizer_is_run_with_each_tool(
    run: Path, folder: Path, tmp_path: Path, exported: bool
) -> None:  # fmt: skip
    log = tmp_path / "log"
    fake = program(
        tmp_path / "compute-sanitizer",
        f'echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $@" >> {log}\n'
        f'[ "$2" = memcheck ] && echo "{CLEAN}" && exit 0\n'
        f'echo "{RACE}"; echo "{RACES.format(1, 1, 0)}" >&2; exit {FAULTS_EXIT}',
    )
    target = folder if exported else run
    subject = subjects_of(target)[0]
    found = sanitize(fake, subject, 0)
    assert [(f.tool, f.state) for f in found] == [
        ("memcheck", State.CLEAN),
        ("racecheck", State.FAULTS),
    ]
    first, second = log.read_text().splitlines()
    assert first.startswith("1 --tool memcheck --padding 4096 --report-api-errors no ")
    assert second.startswith("1 --tool racecheck --report-api-errors no --error-exitcode 86 ")
    for line in (first, second):
        assert f" --kernel-name kne={entries_of(subject)[0]} " in line
        assert line.endswith(f"-m tuner.evaluate.small_launch {target} {subject.kernel}")


def test_sanitizer_that_takes_too_long_is_ended_with_what_it_watches(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.sanitizer.LIMIT_S", 0.5)
    child = tmp_path / "child"
    fake = program(tmp_path / "slow", f"sleep 600 & echo $! >> {child}; wait")
    found = sanitize(fake, subjects_of(run)[0], 0)
    assert [(f.state, f.said) for f in found] == [(State.NO_VERDICT, "not done within 0.5 s")] * 2
    for pid in child.read_text().split():
        assert ends(int(pid))


def ends(pid: int) -> bool:
    """Whether a process that was sent SIGKILL is gone, or a zombie, before 10 s are over."""
    for _ in range(100):
        try:
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


def test_sanitizer_that_cannot_start_is_no_verdict(run: Path, tmp_path: Path) -> None:
    found = sanitize(str(tmp_path / "absent"), subjects_of(run)[0], 0)
    assert {f.state for f in found} == {State.NO_VERDICT}
    assert found[0].said.startswith("cannot start: No such file")


def test_sanitizer_of_a_wheel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "nvidia" / "cu13" / "bin"
    place.mkdir(parents=True)
    fake = program(place / "compute-sanitizer", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr("tuner.sanitizer.PLACES", ())
    monkeypatch.setattr("tuner.sanitizer.sysconfig.get_path", lambda _: str(tmp_path))
    assert installed() == fake


def test_faults_of_the_sanitizer_fail_the_kernel(run: Path, monkeypatch) -> None:
    race = Finding("racecheck", State.FAULTS, "Error: Race")
    monkeypatch.setattr("tuner.verify.sanitize", lambda *_: (race,))
    todo = dataclasses.replace(plan(run, 7, "no", H200), sanitizer="/bin/compute-sanitizer")
    found = list(verdicts(todo, FakeWorker(lambda s: Verified(40, 1.25))))
    assert not any(v.holds for v in found)


def test_sanitizer_that_is_wanted_and_missing(run: Path, monkeypatch) -> None:
    monkeypatch.setattr("tuner.verify.installed", lambda: None)
    with pytest.raises(MachineError, match="compute-sanitizer is not installed"):
        plan(run, 7, "yes", H200)
