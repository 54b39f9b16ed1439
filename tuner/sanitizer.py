"""NVIDIA's compute-sanitizer over one kernel, where it is installed: memcheck and racecheck.

Its word is its summary, not its exit code: a kernel that it stops ends the program with the
program's own code, and a program that it could not watch ends with none of either. Only the
kernel's own entries are watched: faults of a library, or of calls that ask the driver for what it
may not have, are not the kernel's.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from runs.errors import StoreError
from runs.store import RunStore
from runs.templates import manifest as manifests
from tuner.subjects import Subject
from tuner.worker import environment

TOOLS = {
    # beside each allocation, which is one tensor: what runs past an end meets no neighbour
    "memcheck": ("--padding", "4096"),
    "racecheck": (),
}
SUMMARIES = {
    "memcheck": re.compile(r"ERROR SUMMARY: (?P<errors>\d+) errors?"),
    "racecheck": re.compile(
        r"RACECHECK SUMMARY: \d+ hazards? displayed \((?P<errors>\d+) errors?, "
        r"(?P<warnings>\d+) warnings?\)"
    ),
}
PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")
WHEEL = "nvidia/*/bin"  #: below site-packages
INSTALL = "pip install 'nvidia-cuda-sanitizer-api>=13,<14'"
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
    """Return the sanitizer's path, from a toolkit or a wheel, or None where there is none."""
    home = os.environ.get("CUDA_HOME")
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    wheels = sorted(str(p) for folder in packages for p in Path(folder).glob(WHEEL))
    places = (*((f"{home}/bin",) if home else ()), *PLACES, *wheels)
    path = os.pathsep.join((os.environ.get("PATH", ""), *places))
    return shutil.which("compute-sanitizer", path=path)


def sanitize(program: str, subject: Subject, device: int) -> tuple[Finding, ...]:
    """Run every tool over small launches of a kernel, each in a process of its own."""
    try:
        entries = entries_of(subject)
    except (StoreError, manifests.ManifestError) as error:
        return tuple(Finding(tool, State.NO_VERDICT, str(error)) for tool in TOOLS)
    return tuple(_run(program, tool, entries, subject, device) for tool in TOOLS)


def entries_of(subject: Subject) -> tuple[str, ...]:
    """Return the names of a program's kernels. Raises StoreError or ManifestError."""
    if subject.exported:
        launches = manifests.read(subject.folder).kernels[subject.kernel].launches
        return tuple(dict.fromkeys(launch.entry for launch in launches))
    source = RunStore.open(subject.folder).kernel(subject.kernel).source
    return tuple(dict.fromkeys(launch.entry for launch in source.launches))


def _run(
    program: str, tool: str, entries: tuple[str, ...], subject: Subject, device: int
) -> Finding:
    filters = [word for entry in entries for word in ("--kernel-name", f"kne={entry}")]
    command = [
        program, "--tool", tool, *TOOLS[tool], "--report-api-errors", "no",
        "--error-exitcode", str(FAULTS_EXIT), "--print-limit", "5", *filters,
        sys.executable, "-m", "tuner.evaluate.small_launch", str(subject.folder.resolve()),
        subject.kernel,
    ]  # fmt: skip
    # each tensor its own allocation, so that a read past its end is one past an allocation's
    env = environment(device) | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Finding(tool, State.NO_VERDICT, f"cannot start: {error.strerror}")
    try:
        text, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return Finding(tool, State.NO_VERDICT, f"not done within {LIMIT_S:g} s")
    finally:
        _end(process)
    return read(tool, process.returncode, text)


def _end(process: subprocess.Popen[str]) -> None:
    """End what is left of the sanitizer and the program it watches, which is its child."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def read(tool: str, code: int, text: str) -> Finding:
    """Return what the output of the sanitizer and its exit code mean."""
    lines = [line.strip("= \t") for line in text.splitlines() if line.strip("= \t")]
    totals = [m.groupdict() for m in SUMMARIES[tool].finditer(text)]
    faults = (x for x in lines if "SUMMARY" not in x)
    found = [x for x in faults if re.search(r"invalid|error|hazard|race|misaligned", x, re.I)]
    cut_off = code == FAULTS_EXIT and not totals and bool(found)
    if cut_off or any(int(total["errors"]) for total in totals):
        return Finding(tool, State.FAULTS, found[0] if found else "no line of evidence")
    if not totals or code not in (0, FAULTS_EXIT):
        said = lines[-1] if lines else f"exit code {code}"
        return Finding(tool, State.NO_VERDICT, said)
    warnings = sum(int(total.get("warnings") or 0) for total in totals)
    return Finding(tool, State.CLEAN, f"{warnings} warnings" if warnings else "")
