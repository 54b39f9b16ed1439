"""A run folder that somebody else wrote: read, refused in one line, and nothing outside touched."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from exported import make_run
from fake_machine import A100, FULL, FakeMachine
from records import SPEC, trial

from llm_proposer.client import Kind, Prompt
from llm_proposer.errors import Pending
from llm_proposer.providers.batch import connect
from runs import codec
from runs.errors import CodecError, RunError, StoreError
from runs.export import export
from runs.record import RunSpec
from runs.store import JOURNAL, RunStore
from runs.store import SPEC as SPEC_FILE
from tuner.cli import main
from tuner.subjects import strange_files

HUGE = 10**30

HOSTILE_NAMES = (
    "../../escape", "/etc/passwd", "a/b", "..", ".", "", "a\nb", "$(touch x)", "`touch x`",
    "x; touch y", "a b", "-rf", "a\0b", "\x1b[2J", "é", "x" * 300, "\ud800",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six trials, finished."""
    root = tmp_path_factory.mktemp("whole")
    (root / "sketch.tl").write_text(FULL)
    words = ["--variant", "mha", "--gpu", "a100", "--shapes", "1,16,16,4096,4096,128,128"]
    words += ["--sketch", str(root / "sketch.tl"), "--budget", "6"]
    assert main([*words, "--runs-dir", str(root / "runs")], FakeMachine(A100).machine()) == 0
    (run,) = (root / "runs").iterdir()
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "runs" / whole.name
    shutil.copytree(whole, copy)
    return copy


def edit_spec(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    body = json.loads((run / SPEC_FILE).read_text())
    change(body["spec"])
    del body["sha256"]  # each field is looked at by itself
    (run / SPEC_FILE).write_text(json.dumps(body))


def edit_trial(run: Path, number: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the trial of that index in the journal."""
    lines = (run / JOURNAL).read_text().splitlines()
    for position, line in enumerate(lines):
        event = json.loads(line)
        if event["kind"] == "trial" and event["data"]["index"] == number:
            change(event["data"])
            lines[position] = json.dumps(event)
            break
    (run / JOURNAL).write_text("\n".join(lines) + "\n")


def _update_with(change: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda spec: spec.update(change)


def refused(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Resume the run; it must be refused in one clean line, exit code 2."""
    before = sorted(p.name for p in run.parent.parent.rglob("*"))
    capsys.readouterr()
    assert main(["--resume", str(run), *words], FakeMachine(A100).machine()) == 2
    said = capsys.readouterr().err
    assert said.startswith("tune: ") and said.count("\n") == 1 and said.strip().isprintable()
    assert sorted(p.name for p in run.parent.parent.rglob("*")) == before
    return said


@pytest.fixture
def soon() -> Iterator[None]:
    """What waits for a pipe is stopped."""

    def late(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


COMMANDS = {
    "report": ["report"], "export": ["export", "--out", "out"], "verify": ["verify"],
    "ablate": ["ablate"], "resume": ["--resume"],
}  # fmt: skip


def put_in_place(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "/dev/tty")


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("file", [SPEC_FILE, JOURNAL])
@pytest.mark.parametrize("command", list(COMMANDS))
def test_no_file_of_a_run_is_waited_for(
    run: Path, tmp_path: Path, command: str, file: str, kind: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    put_in_place(run / file, kind)
    capsys.readouterr()
    assert main([*COMMANDS[command], str(run)], FakeMachine(A100).machine()) in (2, 3)
    err = capsys.readouterr().err
    assert err.startswith("tune: ") and err.count("\n") == 1
    refused = ("no regular file", "is a link") if command == "resume" else ("no regular file",)
    assert any(words in err for words in refused) or command == "verify"


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("file", ["source.cu", "image.cubin", "log.txt", "kernel.json"])
def test_no_file_of_a_kernel_is_waited_for(
    tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_run(tmp_path / "runs")
    put_in_place(next(iter(sorted(store.path.rglob(file)))), "pipe")
    assert main(["export", str(store.path), "--out", str(tmp_path / "out")]) == 2
    assert "it is no regular file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("soon")
def test_exchanges_lock_and_page_are_not_waited_for(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(run / "report.html")
    assert main(["report", str(run)]) == 2
    assert "report.html is no regular file; name another" in capsys.readouterr().err
    os.mkfifo(run / "exchanges.jsonl")
    assert main(["report", str(run)]) == 2
    assert "exchanges.jsonl: it is no regular file" in capsys.readouterr().err
    assert "a run is not written to one" in refused(run, capsys)
    (run / "exchanges.jsonl").unlink()
    (run / "lock").unlink()
    os.mkfifo(run / "lock")
    assert "lock is no regular file" in refused(run, capsys)


@pytest.mark.usefixtures("soon")
def test_pipes_in_an_export_and_a_comparison_are_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_run(tmp_path / "runs")
    for name in ("manifest.json", "plan.json"):
        os.mkfifo(tmp_path / name)
    assert main(["export", str(store.path), "--out", str(tmp_path)]) == 2
    assert "no earlier export" in capsys.readouterr().err
    assert main(["compare", "--resume", str(tmp_path)], FakeMachine(A100).machine()) == 2
    assert "it is no regular file" in capsys.readouterr().err
    assert main(["verify", str(tmp_path)]) == 2
    export(store, tmp_path / "out")
    (tmp_path / "out" / "attention.py").unlink()
    os.mkfifo(tmp_path / "out" / "attention.py")
    assert strange_files(tmp_path / "out") == ("attention.py",)
    text = min((tmp_path / "out/kernels").glob("*.cu"))
    text.write_text("// not what was compiled\n")
    assert strange_files(tmp_path / "out") == ("attention.py", f"kernels/{text.name}")


@pytest.mark.usefixtures("soon")
def test_a_pipe_among_replies_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "replies.jsonl")
    client = connect(str(tmp_path), "m")
    with pytest.raises(Pending):
        client.complete(Prompt(Kind.SEEDS, "s", "u"))


def test_a_specification_that_could_not_be_read_back_makes_no_folder(tmp_path: Path) -> None:
    for change in (
        {"budget": HUGE}, {"model": "m\udcff"}, {"sketches": ((".x", FULL),)}, {"run_id": "../x"},
        {"sketches": (("x" * 129, FULL),)}, {"sketches": (("x", "\udcff"),)},
    ):  # fmt: skip
        with pytest.raises(RunError):
            RunStore.create(tmp_path / "runs", dataclasses.replace(SPEC, **change))
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=ascii)
def test_names_in_the_specification(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (run / SPEC_FILE).read_text()
    for change in ({"run_id": name}, {"sketches": [[name, FULL]]}):
        (run / SPEC_FILE).write_text(text)
        edit_spec(run, _update_with(change))
        assert "spec.json is damaged" in refused(run, capsys)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpu", "../a100"), ("variant", "mha\n#include"), ("dtype", "fp16; x"), ("budget", HUGE),
        ("budget", -1), ("seed", HUGE), ("minutes", HUGE), ("shapes", []), ("backend", "x\ny"),
        ("shapes", [{"batch": HUGE}]), ("sketches", [["s", 5]]), ("measure", "guessed"),
        ("sketches", [["s", "__import__('os').system('true')"]]), ("sketches", [["s", "\ud800"]]),
        ("sketches", [["s", "Copy Q from global to shared\n" * 9999]]),
    ],
)  # fmt: skip
def test_fields_of_the_specification(
    run: Path, field: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_spec(run, lambda s: s.update({field: value}))
    before = (run / JOURNAL).read_bytes()
    capsys.readouterr()
    assert main(["--resume", str(run)], FakeMachine(A100).machine()) == 2
    assert all(line.isprintable() for line in capsys.readouterr().err.splitlines())
    assert (run / JOURNAL).read_bytes().startswith(before)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update(sketch="../x"), "none of this run's space"),
        (lambda t: t.update(index=4), "trial 4 is there twice"),
        (lambda t: t.update(index=HUGE), "64 are read"),
        (lambda t: t.update(smem_bytes=HUGE), "64 are read"),
        (lambda t: t.update(compile_s=HUGE), "64 are read"),
        (lambda t: t["problem"].update(variant="../../../x"), "unknown variant"),
        (lambda t: t["problem"].update(head_dim=7), "head dim"),
        (lambda t: t["problem"].update(head_dim=192), "does not serve"),
        (lambda t: t["point"].update(items=[["BM", 128]]), "none of this run's space"),
        (lambda t: t["point"]["items"][0].__setitem__(1, 77), "none of this run's space"),
        (lambda t: t["point"]["items"][0].__setitem__(0, "x; y"), "none of this run's space"),
        (lambda t: t["outcome"].update(outcome="__class__"), "outcome"),
        (lambda t: t["outcome"].update(outcome={}), "the tag 'outcome' is not one of"),
        (lambda t: t["outcome"].update(outcome=[]), "the tag 'outcome' is not one of"),
        (lambda t: t.update(origin="\ud800"), "not text"),
    ],
)
def test_trials_that_are_none_of_the_run(
    run: Path, change: Callable[[dict[str, Any]], None], said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    edit_trial(run, 2, change)
    capsys.readouterr()
    assert main(["--resume", str(run), "--budget", "7"], FakeMachine(A100).machine()) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_journal_line_that_is_deep_or_large_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = (run / JOURNAL).read_bytes()
    for line in (b"[" * 200_000, b"9" * 200_000, b'{"v":' * 50_000, b"\xff\xfe", b'"' * 999_999):
        (run / JOURNAL).write_bytes(line + b"\n" + journal)
        assert "line 1 is damaged" in refused(run, capsys)


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=ascii)
def test_a_shortlist_cannot_name_a_folder_elsewhere(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    note = {"topic": "shortlist", "values": [["run", name]]}
    event = json.dumps({"v": 1, "kind": "note", "at": "", "data": note})
    with (run / JOURNAL).open("a") as journal:
        journal.write(event + "\n")
    said = refused(run, capsys)
    assert "cannot be a file name" in said or "not text" in said


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=ascii)
def test_a_model_cannot_name_a_sketch_by_a_path(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    note = {"topic": "sketch", "values": [["name", name], ["text", FULL]]}
    event = json.dumps({"v": 1, "kind": "note", "at": "", "data": note})
    with (run / JOURNAL).open("a") as journal:
        journal.write(event + "\n")
    said = refused(run, capsys)
    assert "cannot be a file name" in said or "not text" in said


@pytest.mark.parametrize("name", ["../../escape", "/tmp/escape", "a/b", "..", "x" * 300])
def test_a_cubin_key_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with RunStore.create(tmp_path, SPEC) as store:
        store.append(trial(0, key=name))
    with pytest.raises(StoreError, match="cannot be a file name"):
        export(store, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["../../../x/y", "/tmp/escaped", "0" * 64])
def test_a_kernel_that_calls_itself_something_else_is_not_exported(
    tmp_path: Path, key: str
) -> None:
    """The key in kernel.json becomes part of file names in the export."""
    store = make_run(tmp_path / "runs")
    for about in store.path.glob("kernels/*/kernel.json"):
        body = json.loads(about.read_text())
        about.write_text(json.dumps(body | {"key": key}))
    with pytest.raises(StoreError, match="it describes kernel"):
        export(store, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["runs"]


def test_a_problem_cannot_name_a_path(tmp_path: Path) -> None:
    """Its key becomes part of file names in the export."""
    record = trial(0)
    hostile = dataclasses.replace(record.problem, variant="../../../x")
    with pytest.raises(CodecError, match="unknown variant"):
        codec.encode_event(dataclasses.replace(record, problem=hostile), "")


def test_links_in_a_run_folder_are_followed_for_reading_only_and_checked(tmp_path: Path) -> None:
    """A kernel's file may be a link; what it leads to must have the digest that was judged."""
    store = make_run(tmp_path / "runs")
    secret = tmp_path / "secret"
    secret.write_text("not machine code")
    for image in store.path.glob("kernels/*/image.cubin"):
        image.unlink()
        image.symlink_to(secret)
    with pytest.raises(StoreError, match="not the code that was judged"):
        export(store, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_specification_cannot_be_made_of_other_types() -> None:
    good = codec.to_json(SPEC)
    for field in good:
        values: tuple[Any, ...] = (None, True, 1.5, "x", [], {}, [[]], {"__class__": "os"}, HUGE)
        for value in values:
            try:
                codec.from_json(RunSpec, good | {field: value})
            except RunError:
                continue


@pytest.mark.parametrize("name", ["lock", JOURNAL, "kernels", "export"])
def test_a_run_is_not_written_through_a_link(tmp_path: Path, whole: Path, name: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    precious = tmp_path / "precious"
    if (run / name).exists():
        (run / name).rename(precious)
    else:
        precious.write_text("mine")
    (run / name).symlink_to(precious)
    before = precious.read_bytes() if precious.is_file() else b""
    with pytest.raises(StoreError, match="is a link; a run is not written through one"):
        RunStore.open(run, write=True)
    assert not precious.is_file() or precious.read_bytes() == before
