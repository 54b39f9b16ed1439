"""The small commands: check, sketch, emit, list, doctor, export and report."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_machine import CAUSAL, FAULTY, FULL, a100

from space.gpu import GPUS
from space.legal import legal_points
from tuner.cli import main

REPLIES = Path(__file__).parents[1] / "codegen" / "tl" / "replies"
SHAPE = "1,16,16,4096,4096,128,128"
GOOD = ["--variant", "mha", "--gpu", "a100", "--budget", "4"]


def test_check_of_a_clean_file(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (nowhere / "s.tl").write_text(CAUSAL)
    assert main(["check", "s.tl"]) == 0
    assert "no faults" in capsys.readouterr().out


def test_check_prints_all_faults_and_exits_1(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (nowhere / "s.tl").write_text(FAULTY)
    assert main(["check", "s.tl"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 2 and all(line.startswith("s.tl: line ") for line in lines)


def test_check_offers_the_dataflow_of_a_program_with_barriers(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (nowhere / "s.tl").write_text((REPLIES / "code-15.txt").read_text())
    assert main(["check", "s.tl"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("s.tl: ") for line in lines) == 1
    (nowhere / "t.tl").write_text("\n".join(lines[2:]))
    assert main(["check", "t.tl"]) == 0


def test_check_of_no_file_is_a_usage_error(nowhere: Path) -> None:
    assert main(["check", "none.tl"]) == 2


def test_sketch_prints_what_check_accepts(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for mask in ("--causal", "--no-causal"):
        assert main(["sketch", "--variant", "mla", mask]) == 0
        (nowhere / "s.tl").write_text(capsys.readouterr().out)
        assert main(["check", "s.tl"]) == 0
        capsys.readouterr()


def test_emit_takes_what_is_given_and_seeds_for_the_rest(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (nowhere / "s.tl").write_text(CAUSAL)
    assert main(["emit", "s.tl", "--gpu", "l40s", "-p", "BM=64", "-p", "BN=32"]) == 0
    first = capsys.readouterr().out
    assert "Copy K (32, 64)" in first
    assert main(["emit", "s.tl", "--gpu", "l40s", "-p", "BM=64", "-p", "BN=32"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-p", "BX=3"], "unknown parameter 'BX'"),
        (["-p", "BM=77"], "BM=77 is not one of"),
        (["-p", "BM"], "not NAME=NUMBER"),
        (["-p", "BM=64", "-p", "BM=128"], "-p BM is given twice"),
        (["-p", "BM=256", "-p", "warps=2"], "rows_per_warp"),
        (["--head-dim", "x"], "D or D,Dv"),
        (["--head-dim", "300"], "from 16 to 256"),
    ],
)
def test_emit_refuses_in_one_line(
    words: list[str], said: str, nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (nowhere / "s.tl").write_text(FULL)
    assert main(["emit", "s.tl", "--gpu", "l40s", *words]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and said in err


def test_list_counts_what_the_search_would_take(capsys: pytest.CaptureFixture[str]) -> None:
    from space.constraints import space_for
    from space.variant import DType, Problem

    assert main(["list"]) == 0
    out, _, decode = capsys.readouterr().out.partition("decode: legal configurations")
    assert "192/128" in out and "576/512" not in out
    assert "576/512" in decode and "192/128" not in decode
    problem = Problem("mla", DType.FP16, 192, 128, False)
    count = len(legal_points(problem, GPUS["l40s"], space_for(problem, GPUS["l40s"])))
    (row,) = [x for x in out.splitlines() if " mla " in x and " l40s " in x]
    assert str(count) in row and "bf16" in row
    assert all("bf16" not in x for x in out.splitlines() if " t4 " in x)


def test_doctor_names_a_remedy_for_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import codegen.headers
    from codegen.errors import ToolchainMissing

    def absent() -> None:
        raise ToolchainMissing("CuTe headers not found; pip install nvidia-cutlass==4.2.0.0")

    monkeypatch.setattr(codegen.headers, "find_headers", absent)
    assert main(["doctor"]) == 3
    out = capsys.readouterr().out
    assert "MISSING" in out and "mend with: pip install nvidia-cutlass==4.2.0.0" in out


def test_export_of_what_is_no_run(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "nowhere", "--out", "kernels"]) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert list(nowhere.iterdir()) == []


# ---- report ------------------------------------------------------------------------------------


def test_export_says_which_shapes_lack_the_final_checks(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
    from exported import FULL as SHORT
    from exported import finalist, make_run

    store = make_run(nowhere / "runs", events=(finalist(0, SHORT, 94.0, chosen=True),))
    assert main(["export", str(store.path), "--out", "out"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "2 kernels for 3 shapes in out"
    assert told[1].startswith("2 of these shapes come from a run without its final checks")
    assert told[1].endswith("tune verify looks at every element")


def test_report_writes_one_file_where_it_is_told(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GOOD, "--shapes", SHAPE, "--runs-dir", "r"], a100().machine()) == 0
    (run,) = (p for p in Path("r").iterdir() if p.is_dir())
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(run), "--out", "page.html"]) == 0
    assert Path("page.html").exists()
    assert main(["report", str(run), "--out", "no/such/page.html"]) == 2
    assert "cannot write no/such/page.html" in capsys.readouterr().err
    assert main(["report", "nowhere"]) == 2
