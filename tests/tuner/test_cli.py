"""The command line: help, bad input, exit codes, JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_machine import CAUSAL, FAULTY, FULL, FakeMachine, a100

from runs.record import Rejected, Stage, TrialClass
from runs.store import RunStore
from tuner.cli import main

ROOT = Path(__file__).parents[2]
SHAPE = "1,16,16,4096,4096,128,128"
GOOD = ["--variant", "mha", "--gpu", "a100", "--budget", "4"]
MLA = ["--variant", "mla", "--gpu", "a100"]


# ---- help --------------------------------------------------------------------------------------


def test_help_names_every_option_and_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for word in ("--variant", "--gpu", "--budget", "--phase", "--page-size", "--dtype", "--causal",
                 "--shapes", "--proposer", "--sketch", "--measure", "--minutes", "--seed",
                 "--workers", "--runs-dir", "--resume", "--json", "sketch", "check", "emit",
                 "list", "doctor", "export", "report", "compare", "--model", "--base-url",
                 "--max-tokens", "--max-cost", "--price", "--reference", "--scalar"):  # fmt: skip
        assert word in out, word


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage: tune" in capsys.readouterr().out


def test_help_imports_nothing_heavy_and_answers_at_once() -> None:
    code = (
        "import sys; from tuner.cli import main; main(['--help']); "
        "heavy = {'torch', 'optuna', 'openai', 'numpy', 'joblib'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    times = []
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        times.append(time.perf_counter() - started)
    assert min(times) < 0.3


# ---- bad input ---------------------------------------------------------------------------------

BAD = {
    "unknown variant": (["--variant", "mhx", "--gpu", "a100"], "mha, gqa, mqa, mla"),
    "no variant": (["--gpu", "a100"], "--variant mha"),
    "unknown gpu": (["--variant", "mha", "--gpu", "h900"], "t4, rtx8000, a100, l40s, h100, h200"),
    "unknown dtype": ([*GOOD, "--dtype", "fp32"], "fp16, bf16"),
    "bf16 on turing": (["--variant", "mha", "--gpu", "t4", "--dtype", "bf16"], "use --dtype fp16"),
    "shape of words": ([*GOOD, "--shapes", "1,a,3"], "B,Hq,Hkv,Sq,Sk,D[,Dv]"),
    "shape too short": ([*GOOD, "--shapes", "1,16,16,512,512"], "B,Hq,Hkv,Sq,Sk,D[,Dv]"),
    "zero length": ([*GOOD, "--shapes", "1,16,16,0,512,64"], "at least 1"),
    "heads": (
        ["--variant", "gqa", "--gpu", "a100", "--shapes", "1,30,8,512,512,64"],
        "Hq=30 is not a multiple of Hkv=8",
    ),
    "not this variant": ([*GOOD, "--shapes", "1,16,8,512,512,64"], "use gqa"),
    "head dim too large": ([*GOOD, "--shapes", "1,16,16,512,512,264"], "from 16 to 256"),
    "head dim off the step": ([*GOOD, "--shapes", "1,16,16,512,512,100"], "multiple of 8"),
    "no such shape file": ([*GOOD, "--shapes", "nowhere.txt"], "nor a file of shapes"),
    "budget 0": (["--variant", "mha", "--gpu", "a100", "--budget", "0"], "at least 1"),
    "budget of words": (["--variant", "mha", "--gpu", "a100", "--budget", "many"], "'--budget'"),
    "minutes 0": ([*GOOD, "--minutes", "0"], "more than 0"),
    "minutes nan": ([*GOOD, "--minutes", "nan"], "more than 0"),
    "phase": ([*GOOD, "--phase", "train"], "known phases: prefill, decode"),
    "pages of prefill": ([*GOOD, "--page-size", "64"], "add --phase decode"),
    "page size": ([*GOOD, "--phase", "decode", "--page-size", "48"], "0 (not paged), 16, 64, 128"),
    "page size of words": ([*GOOD, "--phase", "decode", "--page-size", "x"], "'--page-size'"),
    "many queries": (
        [*GOOD, "--phase", "decode", "--shapes", "1,16,16,9,512,64"],
        "9 queries, decode has at most 8; use --phase prefill",
    ),
    "latent of two KV heads": (
        [*MLA, "--phase", "decode", "--shapes", "1,16,2,1,512,576,512"],
        "with 1 KV head",
    ),
    "mla that is not absorbed": (
        [*MLA, "--phase", "decode", "--shapes", "1,16,16,1,512,192,128"],
        "head dims 576,512",
    ),
    "latent prefill": ([*MLA, "--shapes", "1,16,1,1,512,576,512"], "use --phase decode"),
    "latent of another variant": (
        [
            "--variant",
            "mqa",
            "--gpu",
            "a100",
            "--phase",
            "decode",
            "--shapes",
            "1,16,1,1,512,576,512",
        ],
        "use --variant mla",
    ),
    "latent queries": (
        [*MLA, "--phase", "decode", "--shapes", "1,16,1,9,512,576,512"],
        "at most 8 queries",
    ),
    "resume another page size": (
        ["--resume", "nowhere", "--page-size", "64"],
        "leave --page-size out",
    ),
    "proposer": ([*GOOD, "--proposer", "oracle"], "known proposers: builtin, openai, batch:DIR"),
    "batch of nowhere": ([*GOOD, "--proposer", "batch:"], "say --proposer batch:DIR"),
    "max tokens": ([*GOOD, "--max-tokens", "0"], "--max-tokens 0"),
    "max cost": ([*GOOD, "--max-cost", "nan"], "--max-cost nan"),
    "cost without a price": (
        [*GOOD, "--proposer", "openai", "--model", "m", "--max-cost", "1"],
        "--price m=IN,OUT",
    ),
    "price": ([*GOOD, "--price", "m=cheap"], "MODEL=IN,OUT"),
    "backend": ([*GOOD, "--backend", "ptx"], "auto, mma_sync, wgmma"),
    "no wgmma there": ([*GOOD, "--backend", "wgmma"], "use --backend mma_sync"),
    "measure": ([*GOOD, "--measure", "guess"], "auto, device, model"),
    "workers 0": ([*GOOD, "--workers", "0"], "at least 1"),
    "workers ray": ([*GOOD, "--workers", "ray"], "not in this version"),
    "negative seed": ([*GOOD, "--seed", "-1"], "0 or more"),
    "huge seed": ([*GOOD, "--seed", "9" * 30], "--seed is more than 999999999999999999"),
    "huge budget": (
        ["--variant", "mha", "--gpu", "a100", "--budget", "1" + "0" * 30],
        "--budget is more than 999999999999999999",
    ),
    "model of other bytes": ([*GOOD, "--model", "m\udcff"], "--model 'm\\udcff' is not UTF-8"),
    "batch of other bytes": (
        [*GOOD, "--proposer", "batch:\udcff"],
        "--proposer 'batch:\\udcff' is not UTF-8",
    ),
    "comparison of other bytes": (
        ["compare", *GOOD[:4], "--model", "m\udcff"],
        "--model 'm\\udcff' is not UTF-8",
    ),
    "comparison for ever": (["compare", *GOOD[:4], "--seeds", "9" * 30], "is not from 1 to 1000"),
    "no such sketch": ([*GOOD, "--sketch", "none.tl"], "no sketch file none.tl"),
    "not a run": (["--resume", "nowhere"], "not a run folder"),
    "resume another variant": (["--resume", "nowhere", "--variant", "mla"], "leave --variant out"),
    "unknown option": ([*GOOD, "--fast"], "--fast"),
    "unknown command": (["tunes"], "tunes"),
}


@pytest.mark.parametrize("args, said", BAD.values(), ids=list(BAD))
def test_bad_input_is_one_line_and_nothing_is_written(
    args: list[str], said: str, nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args, a100().machine()) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert said in err
    assert list(nowhere.iterdir()) == []


@pytest.mark.parametrize(
    "name", [".tl", ".hidden.tl", "-x.tl", "-rf.tl", "x" * 200 + ".tl", "x" * 129 + ".tl", "..tl"]
)
@pytest.mark.parametrize("command", [[], ["compare"]])
def test_a_sketch_whose_name_a_run_cannot_keep_is_refused_before_anything_is_made(
    command: list[str], name: str, tmp_path: Path, nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (nowhere / name).write_text(FULL)
    machine = a100()
    words = [*command, *GOOD, "--shapes", SHAPE, "--sketch", f"./{name}", "--proposer", "batch:b"]
    assert main(words, machine.machine()) == 2
    err = capsys.readouterr().err
    assert "rename the file" in err and err.count("\n") == 1
    assert [p.name for p in nowhere.iterdir()] == [name]


def test_a_sketch_of_the_longest_name_is_kept(nowhere: Path) -> None:
    (nowhere / f"{'x' * 128}.tl").write_text(FULL)
    words = [*GOOD, "--shapes", SHAPE, "--sketch", f"{'x' * 128}.tl"]
    assert main(words, a100().machine()) == 0
    (run,) = (nowhere / "runs").iterdir()
    assert RunStore.open(run).spec.sketches[0][0] == "x" * 128


def test_a_faulty_sketch_gives_every_fault_with_its_line(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (nowhere / "bad.tl").write_text(FAULTY)
    assert main([*GOOD, "--sketch", "bad.tl"], a100().machine()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert all("line " in line for line in lines)
    assert not (nowhere / "runs").exists()


def test_a_sketch_under_the_wrong_mask_is_refused(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (nowhere / "s.tl").write_text(FULL)
    assert main([*GOOD, "--sketch", "s.tl", "--causal"], a100().machine()) == 2
    assert "has no causal mask; use --no-causal" in capsys.readouterr().err


def test_a_sketch_whose_params_fit_nowhere_is_refused(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (nowhere / "s.tl").write_text("Param BM in {256}\nParam warps in {2}\n" + FULL)
    assert main([*GOOD, "--sketch", "s.tl"], a100().machine()) == 2
    err = capsys.readouterr().err
    assert "no configuration of mha-bf16" in err and "rows_per_warp" in err
    assert not (nowhere / "runs").exists()


def test_faults_of_a_shape_file_name_its_line(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (nowhere / "shapes.txt").write_text(f"# mine\n{SHAPE}\n1,16,3,512,512,64\n")
    assert main([*GOOD, "--shapes", "shapes.txt"], a100().machine()) == 2
    assert "shapes.txt line 3" in capsys.readouterr().err


def test_measuring_without_the_card_is_exit_code_3(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GOOD, "--measure", "device"], FakeMachine().machine()) == 3
    assert "--measure model" in capsys.readouterr().err
    assert list(nowhere.iterdir()) == []


def test_nothing_correct_is_exit_code_1(nowhere: Path) -> None:
    wrong = Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, "off by one")
    machine = FakeMachine(("NVIDIA A100-SXM4-80GB",), lambda c: wrong).machine()
    assert main([*GOOD, "--shapes", SHAPE], machine) == 1


# ---- the main job ------------------------------------------------------------------------------


def spec_of(run_dir: Path) -> dict[str, object]:
    (spec,) = run_dir.glob("*/spec.json")
    loaded = json.loads(spec.read_text())["spec"]
    assert isinstance(loaded, dict)
    return loaded


def test_several_shapes_follow_one_option_and_both_masks_are_tuned(nowhere: Path) -> None:
    words = ["--shapes", SHAPE, "2,16,16,2048,2048,128", "--budget", "4"]
    assert main(["--variant", "mha", "--gpu", "a100", *words], a100().machine()) == 0
    shapes = spec_of(nowhere / "runs")["shapes"]
    assert isinstance(shapes, list) and len(shapes) == 4
    assert [s["causal"] for s in shapes] == [False, False, True, True]


def test_one_mask_when_it_is_named(nowhere: Path) -> None:
    assert main([*GOOD, "--shapes", SHAPE, "--causal"], a100().machine()) == 0
    shapes = spec_of(nowhere / "runs")["shapes"]
    assert isinstance(shapes, list) and [s["causal"] for s in shapes] == [True]


def test_the_card_present_and_its_dtype_are_the_defaults(nowhere: Path) -> None:
    turing = FakeMachine(("Tesla T4",))
    words = ["--variant", "mha", "--budget", "3", "--shapes", SHAPE]
    assert main(words, turing.machine()) == 0
    spec = spec_of(nowhere / "runs")
    assert (spec["gpu"], spec["dtype"], spec["measure"]) == ("t4", "fp16", "measured")


def test_no_gpu_named_and_none_here_lists_them(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--variant", "mha"], FakeMachine().machine()) == 2
    assert "t4, rtx8000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("backend", "name"), [("auto", "consumer_warpgroups"), ("mma_sync", "warps")]
)
def test_the_back_end_decides_the_parameters(backend: str, name: str, nowhere: Path) -> None:
    words = ["--variant", "mha", "--gpu", "h200", "--budget", "2", "--backend", backend]
    machine = FakeMachine(("NVIDIA H200",)).machine()
    assert main([*words, "--shapes", SHAPE], machine) == 0
    assert spec_of(nowhere / "runs")["backend"] == backend
    (run,) = (nowhere / "runs").iterdir()
    assert all(name in r.point.as_dict() for r in RunStore.open(run).replay().history)


def test_a_sketch_decides_the_mask(nowhere: Path) -> None:
    (nowhere / "c.tl").write_text(CAUSAL)
    assert main([*GOOD, "--shapes", SHAPE, "--sketch", "c.tl"], a100().machine()) == 0
    shapes = spec_of(nowhere / "runs")["shapes"]
    assert isinstance(shapes, list) and [s["causal"] for s in shapes] == [True]


def test_json_lines_are_whole_and_end_with_a_summary(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GOOD, "--shapes", SHAPE, "--json"], a100().machine()) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [e["event"] for e in events]
    assert kinds[0] == "briefing" and kinds[-1] == "summary"
    assert kinds.count("trial") == 4
    assert all(e["trial_class"] == "ok" for e in events if e["event"] == "trial")
    assert {b["basis"] for b in events[-1]["best"]} == {"measured"}
    assert len(events[-1]["best"]) == 2
