"""`--reference` with `--phase decode`, from the command line to the end of a run, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_machine import FakeMachine

from llm_proposer.builtin import sketches
from runs.store import RunStore
from space.variant import Phase
from tuner.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPE = "2,8,2,1,1024,64"
JOB = ["--variant", "gqa", "--gpu", "a100", "--phase", "decode", "--budget", "2"]
PLAIN = """\
import torch

def f(q, k, v, *, scale, causal, factor=1.0):
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    s = torch.einsum("bmhd,bnhd->bhmn", q, k) * scale
    if causal:
        m, n = s.shape[-2:]
        s = s.masked_fill(torch.ones(m, n, dtype=torch.bool).triu(n - m + 1), float("-inf"))
    return factor * torch.einsum("bhmn,bnhd->bmhd", s.softmax(-1), v)
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a function, and a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PLAIN)
    return tmp_path


def run(*more: str) -> int:
    return main([*JOB, *more], FakeMachine(("NVIDIA A100-SXM4-80GB",)).machine())


@pytest.mark.parametrize("page", ["0", "64"])
def test_the_built_in_decode_program_agrees_with_plain_attention(page: str, mine: Path) -> None:
    words = ["--page-size", page, "--shapes", SHAPE, "2,8,2,4,1024,64"]
    assert run("--reference", "mine.py:f", *words) == 0
    (folder,) = (mine / "runs").iterdir()
    spec = RunStore.open(folder).spec
    assert spec.reference is not None and spec.reference.name == "mine.py:f"
    assert (spec.phase, spec.page) == (Phase.DECODE, int(page))
    assert [n for n, _ in spec.sketches] == ["decode", "decode-causal"]


def test_a_sketch_of_the_function_is_searched(mine: Path) -> None:
    text = sketches("gqa", False, Phase.DECODE)["decode"]
    (mine / "mine.tl").write_text(text)
    words = ["--reference", "mine.py:f", "--sketch", "mine.tl", "--shapes", SHAPE]
    assert run(*words) == 0
    (folder,) = (mine / "runs").iterdir()
    assert [n for n, _ in RunStore.open(folder).spec.sketches] == ["mine"]


@pytest.mark.parametrize("shape", [SHAPE, "2,8,2,4,1024,64"])
def test_a_function_that_no_decode_program_computes_is_refused(
    shape: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--reference", f"{EXAMPLES}/softcap.py:softcap_attention", "--scalar", "softcap=5"]
    assert run(*words, "--shapes", shape) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no built-in decode program computes softcap.py:softcap_attention" in line
    assert not (mine / "runs").exists()


def test_tune_sketch_prints_the_decode_program_of_a_reference(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--variant", "gqa", "--phase", "decode", "--shapes", SHAPE]
    assert main(["sketch", *words, "--reference", "mine.py:f"]) == 0
    assert capsys.readouterr().out == sketches("gqa", False, Phase.DECODE)["decode"]


def test_a_model_is_asked_for_no_decode_programs(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*JOB, "--shapes", SHAPE, "--ways", "one-step", "--proposer", "batch:x", "--model", "m"]
    assert main(["compare", *words], FakeMachine().machine()) == 2
    assert "a model is asked for no decode programs" in capsys.readouterr().err


def test_a_sketch_is_not_written_into_a_pipe_or_a_link(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine / "link.tl").symlink_to(mine / "elsewhere.tl")
    assert main(["sketch", "--variant", "gqa", "--out", "link.tl"]) == 2
    assert "link.tl is a link" in capsys.readouterr().err
    assert main(["sketch", "--variant", "gqa", "--out", "found.tl"]) == 0
    assert (mine / "found.tl").read_text() == next(iter(sketches("gqa", False).values()))
