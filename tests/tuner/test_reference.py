"""`--reference` through the command line: refused before anything is compiled, or recorded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from fake_machine import FakeMachine

from codegen.tl.bind import bind
from codegen.tl.parser import parse
from runs.record import RunSpec
from runs.store import RunStore
from space.params import Point
from space.variant import DType, Problem
from tuner import reference as references
from tuner.cli import main
from tuner.evaluate import gate
from tuner.reference import parse_scalars, read_reference

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPE = "1,4,4,512,512,64"
JOB = ["--variant", "mha", "--gpu", "a100", "--budget", "2", "--shapes", SHAPE]
GOOD = "def f(q, k, v, *, scale):\n    s = torch.einsum('bmhd,bnhd->bhmn', q, k) * scale\n"
GOOD = f"import torch\n{GOOD}    return torch.einsum('bhmn,bnhd->bmhd', s.softmax(-1), v)\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(folder: Path, *more: str, machine: FakeMachine | None = None) -> int:
    shop = machine or FakeMachine(("NVIDIA A100-SXM4-80GB",))
    return main([*JOB, "--runs-dir", str(folder / "runs"), *more], shop.machine())


BAD_FILES = {
    "raises": ("def f(q, k, v): raise ValueError('odd heads')", "failed on q [2, 64, 2, 64]"),
    "shape": ("def f(q, k, v): return q[:, :3]", "returned shape [2, 3, 2, 64]"),
    "dtype": ("def f(q, k, v): return q.float()", "returned float32"),
    "nan": ("def f(q, k, v): return v * float('nan')", "NaN or Inf"),
    "import": ("import no_such_module_here\ndef f(q, k, v): return q", "cannot be imported"),
    "ends": ("import os\ndef f(q, k, v): os._exit(3)", "ended its process: the worker died"),
    "hangs": ("import time\ndef f(q, k, v): time.sleep(60)", "no answer within 4 s; killed"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_function_that_will_not_do_is_refused_before_anything_is_compiled(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "hangs":
        monkeypatch.setattr(references, "PROBE_S", 4.0)
    text, said = BAD_FILES[name]
    (tmp_path / "mine.py").write_text(text + "\n")
    machine = FakeMachine(("NVIDIA A100-SXM4-80GB",))
    assert run(tmp_path, "--reference", f"{tmp_path}/mine.py:f", machine=machine) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tune: --reference") and "mine.py" in line and said in line
    assert not machine.shops and not (tmp_path / "runs").exists()


BAD_WORDS = {
    "no function": (["--reference", "mine.py"], "is not FILE.py:function"),
    "no file": (["--reference", "nowhere.py:f"], "cannot read nowhere.py"),
    "a pipe": (["--reference", "pipe.py:f"], "cannot read pipe.py: it is no regular file"),
    "unknown function": (["--reference", "mine.py:g"], "no function g in mine.py; there: f"),
    "no python": (["--reference", "odd.py:f"], "odd.py line 1 is not Python"),
    "no number": (["--reference", "mine.py:f", "--scalar", "softcap"], "is not NAME=NUMBER"),
    "infinite": (["--reference", "mine.py:f", "--scalar", "c=inf"], "is not NAME=NUMBER"),
    "twice": (
        ["--reference", "mine.py:f", "--scalar", "c=1", "--scalar", "c=2"], "is given twice",
    ),
    "tile": (["--reference", "mine.py:f", "--scalar", "BM=64"], "the search uses the name"),
    "scale": (["--reference", "mine.py:f", "--scalar", "scale=2"], "the caller gives it"),
    "unknown number": (["--reference", "mine.py:f", "--scalar", "c=1"], "takes no keyword of that"),
    "number alone": (["--scalar", "softcap=30"], "--scalar goes with --reference"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_WORDS)
def test_a_bad_word_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(GOOD)
    (tmp_path / "odd.py").write_text("def f(q, k, v:\n")
    os.mkfifo(tmp_path / "pipe.py")
    words, said = BAD_WORDS[name]
    assert run(tmp_path, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_sketch_that_reads_an_unknown_number_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--reference", f"{EXAMPLES}/softcap.py:softcap_attention"]
    assert run(tmp_path, *words, "--sketch", str(EXAMPLES / "sigmoid.tl")) == 2
    assert (
        "the sketch reads bias, and softcap.py:softcap_attention gives" in capsys.readouterr().err
    )


@pytest.fixture
def searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A finished run with a reference of two numbers."""
    (tmp_path / "sinks.py").write_text((EXAMPLES / "sink_tokens.py").read_text())
    words = ["--reference", f"{tmp_path}/sinks.py:sink_attention", "--scalar", "sinks=7"]
    assert run(tmp_path, *words, "--sketch", str(EXAMPLES / "sink_tokens.tl")) == 0
    capsys.readouterr()
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


def spec_of(folder: Path) -> RunSpec:
    return RunStore.open(folder).spec


def test_reference_digest_and_numbers_are_recorded(searched: Path) -> None:
    spec = spec_of(searched)
    assert spec.reference is not None
    assert spec.reference.name == "sinks.py:sink_attention" and len(spec.reference.digest) == 64
    assert spec.reference.scalars == (("sinks", 7.0), ("window_left", 1023.0))
    ((name, text),) = spec.sketches
    assert name == "sink_tokens" and "Param sinks = 7\n" in text
    assert "Param window_left = 1023\n" in text
    problem = Problem("mha", DType.BF16, 64, 64, False)
    program = bind(parse(text), problem, Point((("BM", 64), ("BN", 64))))
    assert program.scalars == ("scale",)


def test_resume_refuses_a_changed_function(
    searched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = FakeMachine(("NVIDIA A100-SXM4-80GB",)).machine
    assert main(["--resume", str(searched), "--budget", "3"], machine()) == 0
    path = searched.parents[1] / "sinks.py"
    path.write_text(path.read_text() + "\n# another\n")
    assert main(["--resume", str(searched), "--budget", "4"], machine()) == 2
    assert "was changed since: SHA-256" in capsys.readouterr().err
    path.unlink()
    assert main(["--resume", str(searched), "--budget", "4"], machine()) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--reference", "--scalar"])
def test_resume_takes_no_other_reference(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--reference", "a.py:f"] + (["--scalar", "c=1"] if option == "--scalar" else [])
    assert main(["--resume", str(tmp_path), *words], FakeMachine().machine()) == 2
    assert "--resume takes" in capsys.readouterr().err


def test_a_comparison_keeps_to_its_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text((EXAMPLES / "sigmoid.py").read_text())
    machine = FakeMachine(("NVIDIA A100-SXM4-80GB",))
    words = ["--arms", "search,random", "--seeds", "1", "--reference"]
    words += [f"{tmp_path}/mine.py:sigmoid_attention", "--sketch", str(EXAMPLES / "sigmoid.tl")]
    folder = ["--runs-dir", str(tmp_path / "runs")]
    assert main(["compare", *JOB, *words, *folder], machine.machine()) == 0
    (comparison,) = (tmp_path / "runs").iterdir()
    for run_folder in comparison.glob("*-s0"):
        assert spec_of(run_folder).reference is not None
    (tmp_path / "mine.py").write_text("def sigmoid_attention(q, k, v): return q\n")
    assert main(["compare", "--resume", str(comparison)], machine.machine()) == 2
    assert "was changed since" in capsys.readouterr().err


def test_a_built_in_program_that_agrees_is_found(tmp_path: Path) -> None:
    assert run(tmp_path, "--reference", f"{EXAMPLES}/alibi.py:alibi_attention") == 0
    (folder,) = (tmp_path / "runs").iterdir()
    spec = spec_of(folder)
    assert [name for name, _ in spec.sketches] == ["alibi-causal"]
    assert all(s.causal for s in spec.shapes)


def test_no_built_in_program_is_said_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(GOOD.replace("s.softmax(-1)", "s.softmax(-1) * 2"))
    assert run(tmp_path, "--reference", f"{tmp_path}/mine.py:f") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no built-in program computes mine.py:f; say --sketch FILE.tl" in line


def test_an_example_ends_in_an_exported_folder_without_a_gpu(tmp_path: Path) -> None:
    """The whole job, with the real interpreter and compiler."""
    words = [
        "--variant", "mha", "--gpu", "h200", "--budget", "2", "--measure", "model", "--workers",
        "1", "--shapes", "1,4,4,2048,2048,128", "--runs-dir", str(tmp_path / "runs"),
        "--reference", f"{EXAMPLES}/sink_tokens.py:sink_attention", "--scalar", "window_left=100",
        "--sketch", str(EXAMPLES / "sink_tokens.tl"),
    ]  # fmt: skip
    assert main(words) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    manifest = json.loads((folder / "export" / "manifest.json").read_text())
    for name, entry in manifest["kernels"].items():
        assert entry["computes"]["scalars"] == {"sinks": 4.0, "window_left": 100.0}
        text = (folder / "export" / "kernels" / f"{name}.cu").read_text()
        assert "window(100, 0, 4)" in text
    records = RunStore.open(folder).replay().history.records
    assert len(records) == 2 and all(r.outcome.trial_class == "ok" for r in records)


# ---- the gate --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "function", "scalars"),
    [
        ("softcap", "softcap_attention", ("softcap=30",)),
        ("sliding_window", "window_attention", ("window_left=1023",)),
        ("alibi", "alibi_attention", ()),
        ("sigmoid", "sigmoid_attention", ("bias=-8.3",)),
        ("sink_tokens", "sink_attention", ("sinks=4",)),
    ],
)
def test_each_example_agrees_with_its_sketch_and_not_with_plain_attention(
    name: str, function: str, scalars: tuple[str, ...], tmp_path: Path
) -> None:
    from tuner.evaluate.function import Function
    from tuner.evaluate.function_cases import cases_of

    source = read_reference(f"{EXAMPLES / name}.py:{function}", scalars)
    text = (EXAMPLES / f"{name}.tl").read_text()
    causal = "Mask S, causal" in text
    problem = Problem("gqa", DType.BF16, 64, 64, causal)
    gate.save(tmp_path / "a.npz", cases_of(Function.load(source.reference, problem), problem))
    point = Point((("BM", 128), ("BN", 64)))
    numbers = dict(source.reference.scalars)
    full = references.with_numbers(text, numbers)
    assert gate.fault(bind(parse(full), problem, point), problem, tmp_path / "a.npz") is None
    plain = "\n".join(x for x in full.split("\n") if not any(w in x for w in DISTINCT))
    if "Softmax" not in plain:
        plain = plain.replace("Compute Sigmoid S", "Compute Softmax S")
    program = bind(parse(plain), problem, point)
    assert gate.fault(program, problem) is None  # it is plain attention
    wrong = gate.fault(program, problem, tmp_path / "a.npz")
    assert wrong is not None and "is right" in wrong


@pytest.mark.parametrize(("name", "keys"), [("fixed", 16384), ("named", 512)])
def test_a_window_longer_than_any_usual_problem_is_not_plain_attention(
    name: str, keys: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """4096 keys hide nothing of 2311: the tuned length, or the number itself, must show it."""
    text = (EXAMPLES / "sliding_window.py").read_text()
    for function, number in (("fixed", ""), ("named", ", reach=4095")):
        text += f"\n\ndef {function}(q, k, v, *, scale{number}):\n"
        reach = "reach" if number else "4095"
        text += f"    return window_attention(q, k, v, scale=scale, window_left={reach})\n"
    (tmp_path / "mine.py").write_text(text)
    asked = ["--reference", f"{tmp_path}/mine.py:{name}", "--shapes", f"1,4,4,{keys},{keys},64"]
    assert run(tmp_path, *asked) == 2
    assert f"no built-in program computes mine.py:{name}" in capsys.readouterr().err


DISTINCT = ("Softcap", "window(", "alibi", "Add S, bias", "Param ")


def test_parse_scalars_reads_numbers() -> None:
    assert parse_scalars(["softcap=30", "bias = -8.3"]) == {"softcap": 30.0, "bias": -8.3}
