"""`tune compare` over a machine without compiler or GPU: the whole command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fake_machine import FakeMachine

import tuner.compare
import tuner.guide
from runs.record import Outcome, Rejected, Stage, TrialClass
from runs.store import RunStore
from tuner.cli import main
from tuner.lanes import Candidate

SHAPES = ["1,16,16,4096,4096,128,128", "4,16,16,512,512,128,128"]
COMMON = ["--variant", "mha", "--gpu", "a100", "--no-causal", "--shapes", *SHAPES]
ARMS = ("llm", "search", "assisted", "random")


def a100(verdict=lambda c: None) -> FakeMachine:
    return FakeMachine(("NVIDIA A100-SXM4-80GB",), verdict, depth=3)


def compare(folder: Path, *words: str, fake: FakeMachine | None = None) -> int:
    args = ["compare", *COMMON, "--runs-dir", str(folder), *words]
    return main(args, (fake or a100()).machine())


def folder_of(root: Path) -> Path:
    (found,) = (p for p in root.iterdir() if p.is_dir())
    return found


def stores(folder: Path) -> dict[tuple[str, int], RunStore]:
    opened = [RunStore.open(p) for p in sorted(folder.iterdir()) if (p / "spec.json").exists()]
    return {(s.spec.arm, s.spec.seed): s for s in opened if s.spec.arm}


def test_every_arm_is_an_ordinary_run_with_the_same_budget_seeds_and_start(tmp_path: Path) -> None:
    assert compare(tmp_path, "--budget", "20", "--seeds", "2") == 0
    runs = stores(folder_of(tmp_path))
    assert set(runs) == {(arm, seed) for arm in ARMS for seed in (0, 1)}
    histories = {key: store.replay().history for key, store in runs.items()}
    assert len({h.records[0].point.key for h in histories.values()}) == 1
    origins = {key: [r.origin for r in h] for key, h in histories.items()}
    for seed in (0, 1):
        assert set(origins["search", seed][1:]) == {"sampler"}
        assert set(origins["random", seed][1:]) == {"sampler"}
        assert set(origins["llm", seed][1:]) == {"seed"}
        assert set(origins["assisted", seed][1:]) == {"seed", "sampler"}
        for arm in ("search", "assisted", "random"):
            assert histories[arm, seed].spent() == 20
    assert runs["llm", 0].replay().finished.reason == "nothing more is proposed"
    draws = [[r.point.key for r in histories["random", seed]] for seed in (0, 1)]
    assert draws[0][1:] != draws[1][1:]


def test_results_are_shown_kept_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(tmp_path, "--budget", "25", "--seeds", "3") == 0
    out = capsys.readouterr().out
    folder = folder_of(tmp_path)
    assert out.count("no model was asked") == 1
    for word in (*ARMS, "95%", "99%", "against search", "permutation"):
        assert word in out, word
    body = json.loads((folder / "compare.json").read_text())
    assert body["basis"] == "measured" and len(body["runs"]) == 12
    best = max(speed for arm in body["arms"].values() for speed in arm["speed"])
    assert 0.9 < best <= 1.0
    for arm in body["arms"].values():
        for curve in arm["curves"]:
            speeds = [m["speed"] for m in curve]
            assert speeds == sorted(speeds) and max(speeds) <= 1.0
    assert 0.9 < max(body["arms"][a]["final_speed"] for a in ARMS) <= 1.0
    page = (folder / "compare.html").read_text()
    assert "trials to 95%" in page and "seconds to 99%" in page
    assert page.count("<svg") == 2 and "Side by side" in page and "fa2" in page
    assert not re.search(r"""(src|href)=["'](?!#)|url\(|<script|https?:""", page)


def test_peers_and_finals_are_timed_once_for_all(tmp_path: Path) -> None:
    assert compare(tmp_path, "--budget", "12", "--seeds", "2") == 0
    folder = folder_of(tmp_path)
    (finals,) = folder.glob("*-finals")
    replay = RunStore.open(finals).replay()
    assert {f.name for f in replay.finalists if f.trial is None} == {"fa2"}
    assert sum(f.chosen for f in replay.finalists) == len(SHAPES)
    for store in stores(folder).values():
        assert not store.replay().finalists
    assert main(["export", str(finals), "--out", str(tmp_path / "out")]) in (0, 1)


def test_one_json_object_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--budget", "9", "--seeds", "2", "--arms", "assisted,random", "--json")
    assert compare(tmp_path, *words) == 0
    body = json.loads(capsys.readouterr().out)
    assert set(body["arms"]) == {"assisted", "random"}
    assert "builtin proposer" in body["note"]
    assert body["contrasts"][0]["against"] == "assisted"


def test_a_comparison_that_was_stopped_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    words = ("--budget", "12", "--seeds", "2", "--arms", "search,random")
    assert compare(tmp_path / "whole", *words) == 0
    judged = 0

    def stop(candidate: Candidate) -> Outcome | None:
        nonlocal judged
        judged += 1
        if judged == 30:
            raise KeyboardInterrupt
        return None

    assert compare(tmp_path / "cut", *words, fake=a100(stop)) == 1
    folder = folder_of(tmp_path / "cut")
    assert not (folder / "compare.json").exists()
    assert main(["compare", "--resume", str(folder)], a100().machine()) == 0
    whole = stores(folder_of(tmp_path / "whole"))
    for key, store in stores(folder).items():
        assert store.replay().history.spent() == 12
        first = [r.point.key for r in whole[key].replay().history][:6]
        assert [r.point.key for r in store.replay().history][:6] == first
    again = (folder / "compare.json").read_text()
    assert main(["compare", "--resume", str(folder)], a100().machine()) == 0
    assert (folder / "compare.json").read_text() == again
    assert len(list(folder.glob("*-finals*"))) == 1


def test_a_batch_is_waited_for_and_then_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuner.compare, "BATCH_PATIENCE_S", 0.3)
    monkeypatch.setattr(tuner.guide, "BATCH_PATIENCE_S", 0.3)
    replies = tmp_path / "batch"
    words = ("--budget", "6", "--seeds", "2", "--proposer", f"batch:{replies}", "--arms",
             "llm,search,assisted")  # fmt: skip
    assert compare(tmp_path / "runs", *words) == 1
    assert "4 runs wait for replies" in capsys.readouterr().err
    folder = folder_of(tmp_path / "runs")
    assert not stores(folder)["assisted", 0].replay().history.records
    requests = [json.loads(x) for f in replies.glob("requests-*") for x in f.open()]
    content = json.dumps({"proposals": [{"BN": 32, "why": "w"}, {"stages": 2, "why": "w"}]})
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    body = {
        "choices": [choice],
        "model": "m",
        "usage": {"prompt_tokens": 9, "completion_tokens": 3},
    }
    (replies / "out.jsonl").write_text("".join(
        json.dumps({"custom_id": r["custom_id"], "response": {"status_code": 200, "body": body}})
        + "\n" for r in requests
    ))  # fmt: skip
    assert main(["compare", "--resume", str(folder)], a100().machine()) == 0
    found = json.loads((folder / "compare.json").read_text())
    assert found["arms"]["assisted"]["proposals"][0]["proposed"] == 2
    assert found["arms"]["llm"]["tokens"] == [12, 12]
    assert "no model was asked" not in capsys.readouterr().out
    for seed in (0, 1):
        origins = [r.origin for r in stores(folder)["assisted", seed].replay().history]
        assert origins[:3] == ["first", "model", "model"] and set(origins[3:]) == {"sampler"}
    assert (folder / "compare.html").read_text().count("<svg") == 3  # by tokens, too


def test_where_nothing_is_right_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, "NaN")
    assert compare(tmp_path, "--budget", "9", "--seeds", "1", fake=a100(lambda c: wrong)) == 1
    assert "nothing correct found by any of 4 runs" in capsys.readouterr().err


BAD = {
    "unknown arm": (["--arms", "llm,oracle"], "known arms: llm, search, assisted, random"),
    "one arm": (["--arms", "search"], "name two or more"),
    "no seeds": (["--seeds", "0"], "--seeds 0"),
    "no model": (["--proposer", "openai"], "--model NAME"),
    "no proposer": (["--proposer", "oracle"], "known proposers"),
    "budget": (["--budget", "0"], "at least 1"),
    "no comparison": (["--resume", "nowhere"], "not a comparison's folder"),
}


@pytest.mark.parametrize("words, said", BAD.values(), ids=list(BAD))
def test_bad_input_is_one_line_and_nothing_is_written(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert compare(tmp_path / "runs", *words) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and said in err
    assert not (tmp_path / "runs").exists()
