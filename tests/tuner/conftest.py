"""A working directory for the tests of the command line; a run, and an export of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runs.export import export
from runs.store import RunStore

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
from exported import make_run


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path).path


@pytest.fixture
def folder(run: Path, tmp_path: Path) -> Path:
    export(RunStore.open(run), tmp_path / "out")
    return tmp_path / "out"
