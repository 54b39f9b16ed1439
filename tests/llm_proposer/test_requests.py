"""Requests for publication, and the custom variants that they ask for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from codegen.tl.bind import bind
from codegen.tl.checker import check
from codegen.tl.interpreter import run
from codegen.tl.parser import parse
from llm_proposer import builtin
from llm_proposer.client import Kind
from llm_proposer.customs import CUSTOMS, Custom
from llm_proposer.errors import Pending
from llm_proposer.prompt import Task, sketch_prompt
from llm_proposer.providers import batch
from llm_proposer.requests import main, requests, write
from space.constraints import space_for
from space.gpu import GPUS
from space.params import Point
from space.variant import DType, Problem, paper_shapes, variant_named
from tuner.cli import main as tune

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "runs" / "published" / "requests"


def requested(folder: Path) -> list[dict[str, object]]:
    return [json.loads(x) for x in (folder / "requests-0001.jsonl").read_text().splitlines()]


def test_every_variant_is_asked_about_in_every_way_on_both_cards() -> None:
    found = Counter((r.variant, r.gpu, r.prompt.kind) for r in requests())
    for variant in ("mha", "gqa", "mla", *CUSTOMS):
        for gpu in ("h200", "l40s"):
            for kind in (Kind.SKETCH, Kind.CODE, Kind.ONE_STEP, Kind.SEEDS):
                assert found[variant, gpu, kind] >= 1, (variant, gpu, kind)
    assert set(CUSTOMS) == {"softcap", "sliding_window", "alibi", "sigmoid", "sink_tokens"}


def test_the_same_requests_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, "m", ["l40s"])
    for file in ("requests-0001.jsonl", "index.tsv"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_each_request_is_written_once_under_its_own_name(tmp_path: Path) -> None:
    count = write(tmp_path, "some-model")
    lines = requested(tmp_path)
    assert len({x["custom_id"] for x in lines}) == len(lines) == count
    assert {x["body"]["model"] for x in lines} == {"some-model"}  # type: ignore[index]
    rows = [r.split("\t") for r in (tmp_path / "index.tsv").read_text().splitlines()[1:]]
    assert [r[0] for r in rows] == [x["custom_id"] for x in lines]


def test_what_a_run_asks_first_is_among_them(tmp_path: Path) -> None:
    write(tmp_path, "m", ["l40s"])
    before = (tmp_path / "requests-0001.jsonl").read_bytes()
    shapes = tuple(s for c in (False, True) for s in paper_shapes(variant_named("mla"), c))
    problem = Problem("mla", DType.BF16, 192, 128, True)
    task = Task(problem, GPUS["l40s"], shapes, space=space_for(problem, GPUS["l40s"]))
    with pytest.raises(Pending):
        batch.connect(str(tmp_path), "m").complete(sketch_prompt(task))
    assert [p.name for p in tmp_path.glob("*.jsonl")] == ["requests-0001.jsonl"]
    assert (tmp_path / "requests-0001.jsonl").read_bytes() == before


def test_what_a_reference_asks_first_is_among_them(tmp_path: Path) -> None:
    write(tmp_path, "m", ["a100"])
    before = (tmp_path / "requests-0001.jsonl").read_bytes()
    words = ["--variant", "mha", "--gpu", "a100", "--proposer", f"batch:{tmp_path}", "--model", "m"]
    function = ["--reference", f"{CUSTOMS['softcap'].path}:softcap_attention", "--causal"]
    folder = ["--runs-dir", str(tmp_path / "runs")]
    for way in ("sketch", "one-step"):
        assert tune(["sketch", *words, *function, *folder, "--way", way]) == 1  # waits
    assert [p.name for p in tmp_path.glob("*.jsonl")] == ["requests-0001.jsonl"]
    assert (tmp_path / "requests-0001.jsonl").read_bytes() == before


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llm_proposer.requests", "--out", str(tmp_path), "--gpu", "t4"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(f"{len(requested(tmp_path))} requests in ")
    (tmp_path / "file").write_text("")
    assert main(["--out", str(tmp_path / "file" / "x")]) == 2
    assert capsys.readouterr().err.startswith("cannot write to ")


def test_the_published_requests_are_whole() -> None:
    lines = requested(PUBLISHED)
    rows = [r.split("\t") for r in (PUBLISHED / "index.tsv").read_text().splitlines()[1:]]
    assert [r[0] for r in rows] == [x["custom_id"] for x in lines]
    kinds = {k.value for k in (Kind.SKETCH, Kind.CODE, Kind.ONE_STEP, Kind.SEEDS)}
    for variant in ("mha", "gqa", "mla", *CUSTOMS):
        assert {r[1] for r in rows if r[2] == variant} == kinds


# ---- the custom variants are what they say -------------------------------------------------------


def reference(custom: Custom) -> object:
    scope: dict[str, object] = {"torch": torch, "Tensor": torch.Tensor}
    exec(custom.reference, scope)  # our own text, in a test
    return scope[custom.function]


@pytest.mark.parametrize("custom", CUSTOMS.values(), ids=lambda c: c.name)
@pytest.mark.parametrize(("m", "n"), [(70, 90), (40, 1100)])
def test_sketch_and_reference_agree(custom: Custom, m: int, n: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, length, 2, 16, dtype=torch.float64, generator=generator)
        for length in (m, n, n)
    )
    expected = reference(custom)(q, k, v, scale=0.25).numpy()  # type: ignore[operator]
    problem = Problem("mha", DType.FP16, 16, 16, custom.causal)
    sketch = parse(custom.sketch)
    assert check(sketch, problem) == ()
    program = bind(sketch, problem, Point.of({"BM": 32, "BN": 32}))
    tensors = {"Q": q.numpy(), "K": k.numpy(), "V": v.numpy()}
    found = run(program, tensors, {"scale": 0.25}, DType.FP16, exact=True)["O"]
    np.testing.assert_allclose(found, expected, atol=1e-11)


def test_the_builtin_sketches_stand_in_the_code_requests() -> None:
    texts = [r.prompt.user for r in requests(["h200"]) if r.prompt.kind is Kind.CODE]
    assert any(builtin.sketches("mla", True)["forward"].strip() in t for t in texts)
    for custom in CUSTOMS.values():
        assert any(custom.sketch.strip() in t and custom.reference.strip() in t for t in texts)
