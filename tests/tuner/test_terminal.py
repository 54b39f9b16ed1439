"""What a person sees: plain text when piped, a bar and the table of the best on a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from fake_machine import FakeMachine
from rich.console import Console

from runs.record import Rejected, Stage, TrialClass
from tuner.cli import main
from tuner.lanes import Candidate
from tuner.options import Options
from tuner.session import tune
from tuner.terminal import TerminalView

SHAPES = ("1,16,16,4096,4096,128,128", "4,16,16,1024,1024,128,128")


def piped(tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: FakeMachine) -> str:
    args = ["--variant", "mha", "--gpu", "a100", "--budget", "8", "--shapes", *SHAPES]
    assert main([*args, "--runs-dir", str(tmp_path / "runs")], fake.machine()) == 0
    return capsys.readouterr().out


def test_piped_output_has_no_colours_and_no_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = piped(tmp_path, capsys, FakeMachine(("NVIDIA A100-SXM4-80GB",)))
    assert "\x1b" not in out
    assert "\r" not in out


def test_before_the_first_trial_the_facts_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = piped(tmp_path, capsys, FakeMachine(("NVIDIA A100-SXM4-80GB",)))
    head = out[: out.index("1/8")]
    for fact in ("A100 (sm_80)", "163 KiB shared memory a block", "bottom-right", "1/sqrt(D)",
                 "configurations legal", "pruned by rows_per_warp", "8 distinct programs",
                 SHAPES[0], "no fa3: not installed"):  # fmt: skip
        assert fact in head, fact


def test_one_line_for_each_trial_and_a_row_for_each_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def verdict(c: Candidate) -> Rejected | None:
        bad = c.point["stages"] == 2
        return Rejected(TrialClass.PRECISION, Stage.VERIFY, "error\n3 times") if bad else None

    out = piped(tmp_path, capsys, FakeMachine(("NVIDIA A100-SXM4-80GB",), verdict))
    lines = [x for x in out.splitlines() if re.match(r" *\d+ +\d+/8 ", x)]
    assert len(lines) == 8
    assert all("BM=" in x and "BN=" in x for x in lines)
    assert any(re.search(r" ok +\d+\.\.\d+ TFLOP/s", x) for x in lines)
    assert any("precision" in x and "error " in x for x in lines)
    table = out[out.index("stopped:") :]
    for shape in SHAPES:
        assert f" {shape} " in table and f" {shape}c " in table
    assert "fa2" in table
    assert re.search(r"trials: \d+ ok, \d+ precision", table)
    assert f"kernels {tmp_path / 'runs'}" in table


def test_a_terminal_has_a_bar_and_the_best_beside_the_peer(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160, height=50)
    view = TerminalView(console)
    options = Options(
        variant="mha", gpu="a100", budget=6, shapes=SHAPES, runs_dir=tmp_path / "runs"
    )
    tune(options, view, FakeMachine(("NVIDIA A100-SXM4-80GB",)).machine())
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "6/6" in text
    assert "best so far beside the best peer, TFLOP/s" in text
    assert re.search(r"16/16 d128/128 causal +\d+ \(\d+ fa2\)", text)
