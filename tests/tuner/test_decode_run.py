"""Decode from the command line to the end of a run, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_machine import FULL, FakeMachine, a100

from llm_proposer.builtin import sketches
from runs.record import Basis, Measured
from runs.store import RunStore
from space.variant import (
    VARIANTS,
    DType,
    Phase,
    Problem,
    Shape,
    SpaceError,
    decode_shapes,
    variant_named,
)
from tuner.cli import main
from tuner.errors import UsageError
from tuner.options import read_shapes
from tuner.subjects import subjects_of

DECODE = ["--gpu", "a100", "--phase", "decode", "--budget", "3"]
SHAPE = "2,8,2,1,1024,128"


def the_run(folder: Path) -> RunStore:
    (path,) = (folder / "runs").iterdir()
    return RunStore.open(path)


# ---- shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(VARIANTS))
def test_paper_is_one_query_against_long_caches(name: str) -> None:
    variant = variant_named(name)
    shapes = read_shapes(("paper",), variant, None, Phase.DECODE)
    assert shapes == tuple(decode_shapes(variant))
    assert {(s.seqlen_q, s.causal) for s in shapes} == {(1, False)}
    assert {s.latent for s in shapes} == {name == "mla"}


@pytest.mark.parametrize(("causal", "masks"), [(None, [False, True]), (True, [True])])
def test_several_queries_have_a_mask_and_one_has_none(
    causal: bool | None, masks: list[bool]
) -> None:
    words = ("1,8,2,1,512,64", "1,8,2,4,512,64")
    shapes = read_shapes(words, variant_named("gqa"), causal, Phase.DECODE)
    assert [s.causal for s in shapes if s.seqlen_q == 4] == masks
    assert [s.causal for s in shapes if s.seqlen_q == 1] == [False]
    # one query under prefill is a shape as any other
    plain = read_shapes(words, variant_named("gqa"), causal)
    assert [s.causal for s in plain if s.seqlen_q == 1] == masks


def test_fault_of_a_shape_file_is_told_for_the_phase(tmp_path: Path) -> None:
    file = tmp_path / "shapes.txt"
    file.write_text("1,128,1,8,512,576,512\n1,128,1,1,512,192,128  # not absorbed\n")
    with pytest.raises(UsageError, match=r"1,128,1,1,512,192,128: decode of mla is absorbed"):
        read_shapes((str(file),), variant_named("mla"), None, Phase.DECODE)
    file.write_text("1,128,1,9,512,576,512\n")
    with pytest.raises((UsageError, SpaceError), match=r"line 1: .* at most 8 queries"):
        read_shapes((str(file),), variant_named("mla"), None, Phase.DECODE)


# ---- runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["a100", "h200"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_run_of_each_variant(variant: str, gpu: str, nowhere: Path) -> None:
    machine = FakeMachine(("NVIDIA A100-SXM4-80GB", "NVIDIA H200")).machine()
    args = ["--variant", variant, "--gpu", gpu, "--phase", "decode", "--budget", "3"]
    assert main(args, machine) == 0
    store = the_run(nowhere)
    assert (store.spec.phase, store.spec.page) == (Phase.DECODE, 0)
    assert [name for name, _ in store.spec.sketches] == ["decode"]
    replay = store.replay()
    assert len(replay.history) == 3
    for record in replay.history:
        assert isinstance(record.outcome, Measured)
        assert record.problem.phase is Phase.DECODE
        assert record.problem.latent == (variant == "mla")
        assert [t.shape for t in record.outcome.timings] == list(store.spec.shapes)
    assert {f.shape for f in replay.finalists if f.chosen} == set(store.spec.shapes)


def test_masks_are_problems_of_their_own(nowhere: Path) -> None:
    args = ["--variant", "gqa", *DECODE, "--page-size", "64", "--shapes", "1,8,2,4,512,64"]
    assert main(args, a100().machine()) == 0
    store = the_run(nowhere)
    assert store.spec.page == 64
    assert [name for name, _ in store.spec.sketches] == ["decode", "decode-causal"]
    problems = {r.problem.key for r in store.replay().history}
    dtype = store.spec.dtype
    assert problems == {
        f"gqa-{dtype}-d64-full-decode-page64",
        f"gqa-{dtype}-d64-causal-decode-page64",
    }


def test_a_run_goes_on_with_its_phase(nowhere: Path) -> None:
    assert main(["--variant", "gqa", *DECODE, "--shapes", SHAPE], a100().machine()) == 0
    path = the_run(nowhere).path
    assert main(["--resume", str(path), "--budget", "5"], a100().machine()) == 0
    history = RunStore.open(path).replay().history
    assert len(history) == 5
    assert {r.problem.phase for r in history} == {Phase.DECODE}


def test_a_report_shows_a_decode_run(nowhere: Path) -> None:
    assert main(["--variant", "gqa", *DECODE, "--shapes", SHAPE], a100().machine()) == 0
    path = the_run(nowhere).path
    assert main(["report", str(path)]) == 0
    assert "decode" in (path / "report.html").read_text()


def test_a_comparison_is_of_its_phase(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["compare", "--variant", "gqa", "--gpu", "a100", "--phase", "decode", "--budget", "2",
            "--seeds", "1", "--arms", "search,random", "--shapes", SHAPE, "--json"]  # fmt: skip
    assert main(args, a100().machine()) == 0
    assert json.loads(capsys.readouterr().out)
    specs = [RunStore.open(p.parent).spec for p in nowhere.rglob("spec.json")]
    assert len(specs) >= 2
    assert {s.phase for s in specs} == {Phase.DECODE}


@pytest.mark.parametrize("gpu", ["l40s", "h200"])
def test_predicted_run_compiles_and_exports(gpu: str, nowhere: Path) -> None:
    args = ["--variant", "gqa", "--gpu", gpu, "--phase", "decode", "--budget", "1",
            "--measure", "model", "--workers", "1", "--shapes", SHAPE]  # fmt: skip
    assert main(args) == 0
    store = the_run(nowhere)
    (record,) = store.replay().history
    assert isinstance(record.outcome, Measured)
    (timing,) = record.outcome.timings
    assert timing.basis is Basis.PREDICTED
    assert timing.splits > 1
    (subject,) = subjects_of(store.path)
    (exported,) = subjects_of(store.path / "export")
    assert subject.problem == exported.problem
    assert exported.problem == Problem("gqa", DType.BF16, 128, 128, False, Phase.DECODE)
    assert exported.shapes == (Shape(2, 8, 2, 1, 1024, 128, 128),)


# ---- sketches ----------------------------------------------------------------------------------


def test_sketch_of_the_user_must_split_its_keys(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("plain.tl").write_text(FULL)
    args = ["--variant", "gqa", *DECODE, "--shapes", SHAPE, "--sketch", "plain.tl"]
    assert main(args, a100().machine()) == 2
    assert "plain.tl does not split its keys" in capsys.readouterr().err


def test_sketch_that_leaves_splits_to_the_launch_is_decode(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("split.tl").write_text(sketches("gqa", False, Phase.DECODE)["decode"])
    args = ["--variant", "gqa", "--gpu", "a100", "--shapes", SHAPE, "--sketch", "split.tl"]
    assert main([*args, "--budget", "2"], a100().machine()) == 2
    assert "use --phase decode" in capsys.readouterr().err
    assert main([*args, "--budget", "2", "--phase", "decode"], a100().machine()) == 0


def test_number_of_splits_is_no_parameter_of_decode(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = sketches("gqa", False, Phase.DECODE)["decode"]
    Path("fixed.tl").write_text(f"Param num_splits in {{2, 4}}\n{text}")
    args = ["--variant", "gqa", *DECODE, "--shapes", SHAPE, "--sketch", "fixed.tl"]
    assert main(args, a100().machine()) == 2
    assert "Param num_splits, which the launch chooses" in capsys.readouterr().err


def test_one_query_needs_no_causal_sketch(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("causal.tl").write_text(sketches("gqa", True, Phase.DECODE)["decode"])
    args = ["--variant", "gqa", *DECODE, "--shapes", SHAPE, "--sketch", "causal.tl"]
    assert main(args, a100().machine()) == 2
    assert "which one query does not need" in capsys.readouterr().err


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_sketch_check_and_emit(
    variant: str, nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sketch", "--variant", variant, "--phase", "decode"]) == 0
    text = capsys.readouterr().out
    assert "Compute LogSumExp S" in text
    Path("a.tl").write_text(text)
    assert main(["check", "a.tl"]) == 0
    capsys.readouterr()
    args = ["emit", "a.tl", "--gpu", "a100", "--variant", variant, "--phase", "decode"]
    assert main([*args, "--page-size", "16"]) == 0
    source = capsys.readouterr().out
    assert source.count("__global__") == 2
    assert main(args[:-2]) == 2
    assert "use --phase decode" in capsys.readouterr().err


def test_a_person_reads_of_pages_and_bandwidth(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--variant", "mla", *DECODE, "--page-size", "64", "--shapes", "1,16,1,1,4096,576,512"]
    assert main(args, a100().machine()) == 0
    out = capsys.readouterr().out
    assert "multi-head latent attention, decode from pages of 64 keys" in out
    assert "D=576 0.0721688" in out  # 1/sqrt(192)
    assert "GB/s" in out and "TFLOP/s  " not in out
    assert "fa2 48 " in out  # 4096 rows of 576 columns, and what is asked and told, in 100 us
