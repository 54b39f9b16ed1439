"""NVIDIA's compute-sanitizer over one kernel, where it is installed: memcheck and racecheck."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tuner.subjects import Subject
from tuner.worker import environment

TOOLS = ("memcheck", "racecheck")
PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")
FAULTS_EXIT = 86  #: what the sanitizer is told to exit with when it found something
LIMIT_S = 300.0


class State(StrEnum):
    """What a sanitizer said of a kernel."""

    CLEAN = "clean"
    FAULTS = "faults"
    NO_VERDICT = "no verdict"


@dataclass(frozen=True, slots=True)
class Finding:
    """One tool's word on one kernel; `said` is its first line of evidence."""

    tool: str
    state: State
    said: str = ""

    def __str__(self) -> str:
        return f"{self.tool} {self.state}" + (f" ({self.said})" if self.said else "")


def installed() -> str | None:
    """Return the sanitizer's path, or None where it is not installed."""
    home = os.environ.get("CUDA_HOME")
    places = (*((f"{home}/bin",) if home else ()), *PLACES)
    path = os.pathsep.join((os.environ.get("PATH", ""), *places))
    return shutil.which("compute-sanitizer", path=path)


def sanitize(program: str, subject: Subject, device: int) -> tuple[Finding, ...]:
    """Run every tool over small launches of a kernel, each in a process of its own."""
    return tuple(_run(program, tool, subject.folder, subject.kernel, device) for tool in TOOLS)


def _run(program: str, tool: str, folder: Path, kernel: str, device: int) -> Finding:
    command = [
        program, "--tool", tool, "--error-exitcode", str(FAULTS_EXIT), "--print-limit", "5",
        sys.executable, "-m", "tuner.evaluate.small_launch", str(folder.resolve()), kernel,
    ]  # fmt: skip
    # each tensor its own allocation, so that a read past its end is one past an allocation's
    env = environment(device) | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, errors="replace", timeout=LIMIT_S,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Finding(tool, State.NO_VERDICT, f"not done within {LIMIT_S:g} s")
    except OSError as error:
        return Finding(tool, State.NO_VERDICT, f"cannot start: {error.strerror}")
    return read(tool, done.returncode, done.stdout + done.stderr)


def read(tool: str, code: int, text: str) -> Finding:
    """Return what an exit code and the output of the sanitizer mean."""
    if code == 0:
        return Finding(tool, State.CLEAN)
    lines = [line.strip("= \t") for line in text.splitlines() if line.strip("= \t")]
    if code == FAULTS_EXIT:
        found = (x for x in lines if re.search(r"invalid|error|hazard|race|leak", x, re.I))
        return Finding(tool, State.FAULTS, next(found, "no line of evidence"))
    return Finding(tool, State.NO_VERDICT, lines[-1] if lines else f"exit code {code}")
