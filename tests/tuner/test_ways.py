"""Two stages against one step: pass@k, samples through a batch folder and a real server."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_machine import FULL, FakeMachine

from runs.record import Rejected, Stage, TrialClass
from tuner.cli import main
from tuner.ways import Level, Sample, pass_at, rates

sys.path.insert(0, str(Path(__file__).parents[1] / "llm_proposer"))
from server import Server, completion

REPLIES = Path(__file__).parents[1] / "codegen" / "tl" / "replies"
EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPE = "1,4,4,512,512,128"
CODE = """\
Param BM in {64, 128}
Param BN in {64}
Allocate Q in global (M, D) with offset q_offset
Allocate K in global (N, D) with offset k_offset
Allocate V in global (N, DV) with offset v_offset
Allocate O in global (M, DV) with offset o_offset
Allocate S in register (BM, BN) as f32
Allocate O in register (BM, DV) as f32
Copy Q (BM, D) in coordinate [L = block_idx] from global to shared
for i = 0:N / BN
  Copy K (BN, D) in coordinate [L = i] from global to shared
  Compute GEMM Q, K.T and get S
  Compute Scale S, scale
  Compute Softmax S
  Copy V (BN, DV) in coordinate [L = i] from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
end
Copy O (BM, DV) in coordinate [L = block_idx] from register to global
"""


@pytest.mark.parametrize(("n", "c"), [(5, 0), (5, 1), (6, 3), (4, 4)])
def test_pass_at_k_is_what_drawing_k_samples_gives(n: int, c: int) -> None:
    outcomes = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        drawn = list(itertools.combinations(outcomes, k))
        assert pass_at(k, n, c) == pytest.approx(sum(map(any, drawn)) / len(drawn))


@pytest.mark.parametrize(("k", "n", "c"), [(0, 3, 1), (4, 3, 1), (1, 3, 4)])
def test_pass_at_k_of_nothing_is_refused(k: int, n: int, c: int) -> None:
    with pytest.raises(ValueError, match="passed among"):
        pass_at(k, n, c)


def test_rates_are_the_mean_over_problems_of_each_level() -> None:
    levels = {"a": [5, 3, 2], "b": [4, 4, 1]}
    samples = [
        Sample("one-step", problem, n, Level(level))
        for problem, found in levels.items()
        for n, level in enumerate(found)
    ]
    checker, interpreter, compiler = rates(samples, ["one-step"], measured=False)
    assert (checker.samples, checker.passed) == (6, 4)
    assert dict(checker.pass_at) == pytest.approx({1: 2 / 3, 2: 1.0, 3: 1.0})
    assert dict(interpreter.pass_at)[1] == pytest.approx((1 / 3 + 2 / 3) / 2)
    assert compiler.passed == 1 and dict(compiler.pass_at)[3] == pytest.approx(0.5)
    with pytest.raises(ValueError, match="pending"):
        rates([Sample("one-step", "a", 0, Level.PENDING)], ["one-step"], measured=False)


# ---- through a folder --------------------------------------------------------------------------


def compare(folder: Path, *words: str, machine: FakeMachine | None = None) -> int:
    shop = machine or FakeMachine(("NVIDIA A100-SXM4-80GB",))
    return main(["compare", "--runs-dir", str(folder / "runs"), *words], shop.machine())


NEW = ["--variant", "mha", "--gpu", "a100", "--no-causal", "--shapes", SHAPE, "--dtype", "bf16"]
WAYS = [*NEW, "--ways", "two-stage,one-step", "--samples", "2"]


def answer(folder: Path, texts: dict[str, list[str]], name: str) -> list[str]:
    """Answer what is asked in a batch folder; texts by the first words of a request."""
    replied = {
        json.loads(line)["custom_id"]
        for path in folder.glob("output-*.jsonl")
        for line in path.read_text().splitlines()
    }
    asked = [
        json.loads(line)
        for path in sorted(folder.glob("requests-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    lines, kinds = [], []
    for request in (r for r in asked if r["custom_id"] not in replied):
        said = request["body"]["messages"][-1]["content"]
        kind = next(k for k in texts if said.startswith(k))
        kinds.append(kind)
        message = {"role": "assistant", "content": texts[kind].pop(0)}
        body = {
            "model": "m", "choices": [{"message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 5},
        }  # fmt: skip
        response = {"status_code": 200, "request_id": "r", "body": body}
        lines.append(json.dumps({"custom_id": request["custom_id"], "response": response}))
    (folder / f"output-{name}.jsonl").write_text("".join(f"{x}\n" for x in lines))
    return kinds


def test_batch_replies_come_in_two_rounds_and_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = tmp_path / "batch"
    words = ["--proposer", f"batch:{batch}", "--model", "m"]
    assert compare(tmp_path, *WAYS, *words) == 1
    (folder,) = (tmp_path / "runs").iterdir()
    error = capsys.readouterr().err
    assert "4 of 4 programs wait for replies" in error and f"--resume {folder}" in error
    first = answer(
        batch,
        {"Write the TL sketch": [FULL, "no program at all"], "Write the TL code": [CODE, "load()"]},
        "1",
    )
    assert sorted(first) == ["Write the TL code"] * 2 + ["Write the TL sketch"] * 2
    assert compare(tmp_path, "--resume", str(folder)) == 1
    assert "1 of 4 programs wait" in capsys.readouterr().err
    assert answer(batch, {"Complete this TL sketch": [CODE]}, "2") == ["Complete this TL sketch"]
    assert compare(tmp_path, "--resume", str(folder)) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "two-stage" in out and "pass@2" in out and "1.000" in out
    body: dict[str, Any] = json.loads((folder / "ways.json").read_text())
    found = {(r["way"], r["level"]): (r["samples"], r["passed"]) for r in body["rates"]}
    levels = ("checker", "interpreter", "compiler", "GPU")
    assert found == {(w, x): (2, 1) for w in ("two-stage", "one-step") for x in levels}
    assert body["rates"][0]["pass_at"] == {"1": 0.5, "2": 1.0}
    assert (folder / "exchanges.jsonl").exists()


def test_a_program_that_the_judge_rejects_stops_before_the_gpu_level(tmp_path: Path) -> None:
    batch = tmp_path / "batch"
    wrong = Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, "0.3 where 0.1 is right\nmore")
    machine = FakeMachine(("NVIDIA A100-SXM4-80GB",), lambda candidate: wrong)
    words = [*NEW, "--ways", "one-step", "--samples", "1", "--proposer", f"batch:{batch}"]
    assert compare(tmp_path, *words, machine=machine) == 1
    answer(batch, {"Write the TL code": [CODE]}, "1")
    (folder,) = (tmp_path / "runs").iterdir()
    assert compare(tmp_path, "--resume", str(folder), machine=machine) == 0
    body = json.loads((folder / "ways.json").read_text())
    assert [r["passed"] for r in body["rates"]] == [1, 1, 1, 0]
    assert body["samples"][0]["note"] == "wrong_output: 0.3 where 0.1 is right"


BAD = {
    "way": (["--ways", "three-stage"], "unknown way 'three-stage'; known ways: sketch, two-stage"),
    "samples": (["--ways", "one-step", "--samples", "0"], "--samples 0 is not from 1 to 1000"),
    "repairs": (["--ways", "one-step", "--repairs", "-1"], "--repairs -1 is not from 0 to 10"),
    "no model": (["--ways", "one-step"], "a model has to be asked"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_words_are_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, said = BAD[name]
    assert compare(tmp_path, *NEW, *words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_damaged_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text('{"format": "tltune-ways", "ways": ["odd"]}')
    assert compare(tmp_path, "--resume", str(tmp_path)) == 2
    assert "is no sampling of ways" in capsys.readouterr().err


# ---- through a server, with the real interpreter and compiler -----------------------------------


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Server() as running:
        yield running


def test_recorded_replies_are_taken_as_far_as_they_get(server: Server, tmp_path: Path) -> None:
    right = (REPLIES / "code-16.txt").read_text()
    unscaled = CODE.replace("Compute Softmax S", "Compute Sigmoid S")
    server.script = [completion(t) for t in (right, unscaled, "Copy Q from nowhere")]
    words = [
        *NEW, "--measure", "model", "--workers", "1", "--ways", "one-step", "--samples", "3",
        "--proposer", "openai", "--model", "m", "--base-url", server.url,
    ]  # fmt: skip
    assert main(["compare", "--runs-dir", str(tmp_path / "runs"), *words]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    body = json.loads((folder / "ways.json").read_text())
    assert [s["level"] for s in body["samples"]] == ["compiler", "checker", "answered"]
    assert "interpreter, N(0,1)" in body["samples"][1]["note"]
    assert {r["level"]: r["passed"] for r in body["rates"]} == {
        "checker": 2, "interpreter": 1, "compiler": 1,
    }  # fmt: skip
    assert body["rates"][1]["pass_at"] == pytest.approx({"1": 1 / 3, "2": 2 / 3, "3": 1.0})


def test_tune_sketch_asks_for_a_reference_and_checks_the_answer_against_it(
    server: Server, tmp_path: Path
) -> None:
    plain = (EXAMPLES / "alibi.tl").read_text().replace("  Compute Mask S, alibi\n", "")
    right = (EXAMPLES / "alibi.tl").read_text()
    server.script = [completion(plain), completion(right)]
    out = tmp_path / "found.tl"
    words = [
        "--variant", "mha", "--gpu", "a100", "--causal", "--shapes", SHAPE, "--samples", "2",
        "--reference", f"{EXAMPLES}/alibi.py:alibi_attention", "--proposer", "openai",
        "--model", "m", "--base-url", server.url, "--out", str(out),
        "--runs-dir", str(tmp_path / "runs"),
    ]  # fmt: skip
    assert main(["sketch", *words]) == 0
    assert "Compute Mask S, alibi" in out.read_text()
    assert "slopes = 2.0 **" in json.dumps(server.requests[0])


def test_tune_sketch_from_words_says_that_nothing_proves_it(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (EXAMPLES / "sigmoid.tl").read_text()
    server.script = [completion(text)]
    model = ["--proposer", "openai", "--model", "m", "--base-url", server.url]
    words = ["--variant", "mha", "--gpu", "a100", "--shapes", SHAPE, "--words", "sigmoid attention"]
    folder = ["--runs-dir", str(tmp_path / "runs")]
    assert main(["sketch", *words, *model, *folder], FakeMachine().machine()) == 0
    out, error = capsys.readouterr()
    assert "Compute Sigmoid S" in out and "it was checked as TL alone" in error
    assert "Wanted: sigmoid attention" in json.dumps(server.requests[0])
    assert main(["sketch", *words]) == 2
    assert "--words is for a model" in capsys.readouterr().err


def test_tune_sketch_finds_the_built_in_program_of_a_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ["--variant", "mha", "--shapes", SHAPE, "--reference"]
    assert main(["sketch", *words, f"{EXAMPLES}/sigmoid.py:sigmoid_attention"]) == 0
    out = capsys.readouterr().out
    assert "Compute Add S, bias" in out and "Param bias = -8.3" in out
