"""Options that cannot mean anything together: one line that names them, and nothing is begun."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_machine import FakeMachine

from runs.record import Basis
from runs.store import RunStore
from tuner.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = ["--variant", "gqa", "--gpu", "h200", "--measure", "model", "--budget", "3"]
COMPARE = ["compare", *RUN]
SKETCH = ["sketch", "--variant", "gqa"]
WAYS = [*COMPARE, "--ways", "sketch"]


def refused(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run `words` in an empty folder; return its one line, after which nothing is there."""
    assert main(words, FakeMachine(("NVIDIA A100-SXM4-80GB",)).machine()) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1
    assert not list(folder.iterdir())
    return err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*WAYS, "--proposer", "openai"], "no model named"),
        ([*SKETCH, "--gpu", "h200", "--proposer", "openai"], "no model named"),
        ([*WAYS, "--proposer", "batch:b", "--arms", "search,random"], "--arms is a comparison"),
        ([*COMPARE, "--samples", "5"], "--samples goes with --ways"),
        ([*COMPARE, "--repairs", "1"], "--repairs goes with --ways"),
        ([*SKETCH, "--way", "x"], "--way is for a model"),
        ([*SKETCH, "--samples", "0"], "--samples is for a model"),
        ([*SKETCH, "--model", "m"], "--model is for a model"),
        ([*SKETCH, "--gpu", "foo"], "--gpu is for a sketch that is made"),
        ([*SKETCH, "--shapes", "foo"], "--shapes is for a sketch that is made"),
        ([*SKETCH, "--scalar", "a=3"], "--scalar is for a sketch that is made"),
        ([*RUN, "--sketch", str(EXAMPLES / "softcap.tl")], "softcap reads softcap, which plain"),
        ([*RUN, "--reference", ":f"], "is not FILE.py:function"),
        ([*RUN, "--phase", "x"], "--phase: unknown phase 'x'"),
        (["--variant", "mla", "--gpu", "h200", "--phase", "decode", "--shapes", "1,128,1,1,64,576"],
         "use 576,512"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert said in refused(words, tmp_path, capsys)


def test_a_file_with_null_bytes_is_no_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin.py").write_bytes(b"\0")
    said = ["--reference", f"{tmp_path}/bin.py:f", "--runs-dir", str(tmp_path / "runs")]
    assert main([*RUN, *said], FakeMachine(()).machine()) == 2
    err = capsys.readouterr().err
    assert "bin.py is not Python" in err or "bin.py line" in err
    assert "None" not in err and not (tmp_path / "runs").exists()


def test_a_predicted_run_is_not_ablated_and_keeps_its_scalars(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = FakeMachine(()).machine()
    shape = ["--shapes", "1,8,2,512,512,128,128", "--runs-dir", str(tmp_path)]
    assert main([*RUN, *shape], machine) == 0
    (run,) = tmp_path.iterdir()
    assert RunStore.open(run).spec.measure is Basis.PREDICTED
    capsys.readouterr()
    assert main(["ablate", str(run)]) == 2
    assert "is predicted, and ablate takes a measured run" in capsys.readouterr().err
    assert main(["--resume", str(run), "--scalar", "softcap=50"], machine) == 2
    assert "--resume takes scalars from the run" in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["-1", "1" + "0" * 22])
def test_a_seed_of_verify_is_looked_at_first(
    seed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(tmp_path), "--seed", seed]) == 2
    assert "--seed" in capsys.readouterr().err
