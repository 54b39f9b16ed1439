"""A run with a reference: its record, its export, and what verify does with it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
from decode_runs import ONE, make_decode_run
from exported import make_run
from records import SPEC

from runs import codec
from runs.errors import CodecError, ExportError, StoreError
from runs.export import export
from runs.record import Reference, RunSpec
from runs.report import report
from runs.store import SPEC as SPEC_FILE
from runs.store import RunStore
from runs.templates import manifest as manifests
from tuner.errors import UsageError
from tuner.reference import check_unchanged
from tuner.subjects import referred, subjects_of

REFERENCE = Reference("/home/a/mine.py", "attend", "ab" * 32, (("softcap", 30.0),))
FUNCTION = manifests.Function("mine.py:attend", "ab" * 32, (("softcap", 30.0),))


def test_a_spec_with_a_reference_is_read_back_and_one_without_stays_as_it_was() -> None:
    spec = dataclasses.replace(SPEC, reference=REFERENCE)
    assert codec.from_text(RunSpec, codec.to_text(spec)) == spec
    older = {k: v for k, v in codec.to_json(SPEC).items() if k != "reference"}
    assert codec.from_json(RunSpec, older) == SPEC


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("path", "mine.py", "is not absolute"),
        ("path", "/a\0b", "is not absolute"),
        ("function", "f(); import os", "is not a name"),
        ("function", "", "is not a name"),
        ("digest", "abc", "is not SHA-256"),
        ("scalars", (("a b", 1.0),), "is not a name"),
    ],
)
def test_a_reference_that_names_no_one_thing_is_refused(
    field: str, value: object, said: str
) -> None:
    wrong = dataclasses.replace(REFERENCE, **{field: value})  # type: ignore[arg-type]
    body = codec.to_json(dataclasses.replace(SPEC, reference=wrong))
    with pytest.raises(CodecError, match=said):
        codec.from_json(RunSpec, body)


def referring(folder: Path, reference: Reference | None, made: RunStore | None = None) -> RunStore:
    """A run with kernels, its specification changed to one with a reference."""
    store = made or make_run(folder)
    path = store.path / SPEC_FILE
    body = json.loads(path.read_text())
    body["spec"]["reference"] = codec.to_json(reference)
    del body["sha256"]  # as in runs from before there was one
    path.write_text(json.dumps(body))
    return RunStore.open(store.path)


@pytest.mark.parametrize(
    "change",
    [{"reference": None}, {"reference": {**codec.to_json(REFERENCE), "scalars": []}},
     {"gpu": "h100"}, {"measure": "predicted"}],
    ids=str,
)  # fmt: skip
def test_a_specification_that_was_changed_is_refused(
    change: dict[str, object], tmp_path: Path
) -> None:
    """Kernels that a function was asked of would be exported as plain attention."""
    spec = dataclasses.replace(SPEC, reference=REFERENCE)
    with RunStore.create(tmp_path, spec) as store:
        path = store.path / SPEC_FILE
    assert RunStore.open(store.path).spec == spec
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | {"spec": body["spec"] | change}))
    with pytest.raises(StoreError, match="is damaged: it is not what the run began with"):
        RunStore.open(store.path)


def test_the_export_says_what_it_computes(tmp_path: Path) -> None:
    manifest = export(referring(tmp_path, REFERENCE), tmp_path / "out")
    for entry in manifest["kernels"].values():
        assert entry["computes"] == {
            "function": "mine.py:attend", "file_sha256": "ab" * 32, "scalars": {"softcap": 30.0},
        }  # fmt: skip
    assert manifests.functions(tmp_path / "out") == (FUNCTION,)
    assert manifests.read(tmp_path / "out").kernels


def test_verify_of_an_export_wants_the_file_it_was_made_with(tmp_path: Path) -> None:
    out, mine = tmp_path / "out", tmp_path / "mine.py"
    mine.write_text(
        "def attend(q, k, v, *, softcap=10.0): return q\ndef other(q, k, v): return q\n"
    )
    digest = hashlib.sha256(mine.read_bytes()).hexdigest()
    export(referring(tmp_path / "run", dataclasses.replace(REFERENCE, digest=digest)), out)
    subjects = subjects_of(out)
    for said, why in [
        (None, "computes mine.py:attend, whose text is not in it; give that file with --reference"),
        (f"{mine}:other", f"computes mine.py:attend of a file with SHA-256 {digest[:12]}"),
    ]:
        with pytest.raises(UsageError, match=why):
            referred(out, said, subjects)
    found = referred(out, f"{mine}:attend", subjects)
    expected = Reference(str(mine), "attend", digest, (("softcap", 30.0),))
    assert found and all(s.reference == expected for s in found)  # the export's numbers, not 10.0
    mine.write_text(mine.read_text() + "#\n")
    with pytest.raises(UsageError, match="give the file that it was made with"):
        referred(out, f"{mine}:attend", subjects)


def test_verify_wants_no_file_where_none_is_needed(tmp_path: Path) -> None:
    run = referring(tmp_path / "run", REFERENCE).path
    export(referring(tmp_path / "plain", None), tmp_path / "out")
    for target, why in ((run, "a run, which names its own"), (tmp_path / "out", "needs none")):
        with pytest.raises(UsageError, match=why):
            referred(target, "mine.py:attend", subjects_of(target))


def test_an_export_that_decodes_says_both(tmp_path: Path) -> None:
    store = make_decode_run(tmp_path, (ONE,), page=0)
    manifest = export(referring(tmp_path, REFERENCE, store), tmp_path / "out")
    for entry in manifest["kernels"].values():
        assert entry["splits"] and entry["computes"]["function"] == "mine.py:attend"
    assert manifests.functions(tmp_path / "out") == (FUNCTION,)


def test_what_an_export_computes_is_sealed(tmp_path: Path) -> None:
    export(referring(tmp_path, REFERENCE), tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    data = json.loads(path.read_text())
    for entry in data["kernels"].values():
        del entry["computes"]
    path.write_text(json.dumps(data))
    with pytest.raises(manifests.ManifestError, match="its digest differs; export again"):
        manifests.functions(tmp_path / "out")


def test_an_export_of_plain_attention_says_nothing_of_a_function(tmp_path: Path) -> None:
    manifest = export(referring(tmp_path, None), tmp_path / "out")
    assert not any("computes" in entry for entry in manifest["kernels"].values())
    assert manifests.functions(tmp_path / "out") == ()


def test_runs_of_different_functions_are_not_mixed(tmp_path: Path) -> None:
    other = dataclasses.replace(REFERENCE, scalars=(("softcap", 20.0),))
    stores = [referring(tmp_path / n, r) for n, r in (("a", REFERENCE), ("b", other), ("c", None))]
    for pair in ((0, 1), (0, 2)):
        with pytest.raises(ExportError, match="export them into folders of their own"):
            export([stores[n] for n in pair], tmp_path / "out")
    moved = dataclasses.replace(REFERENCE, path="/elsewhere/mine.py")
    export([stores[0], referring(tmp_path / "d", moved)], tmp_path / "out")


def test_verify_knows_the_function_of_a_run(tmp_path: Path) -> None:
    found = subjects_of(referring(tmp_path, REFERENCE).path)
    assert found and all(s.reference == REFERENCE for s in found)


def test_a_file_in_the_run_folder_is_not_executed(tmp_path: Path) -> None:
    store = make_run(tmp_path)
    (store.path / "mine.py").write_text("def attend(q, k, v): return q\n")
    inside = dataclasses.replace(REFERENCE, path=str(store.path / "mine.py"))
    with pytest.raises(UsageError, match="from which nothing is executed"):
        check_unchanged(inside, store.path)


def test_the_report_says_what_the_kernels_compute(tmp_path: Path) -> None:
    page = report(referring(tmp_path, REFERENCE))
    assert "Kernels compute <code>mine.py:attend</code> with softcap = 30" in page
    assert "ab" * 32 in page
    assert "Kernels compute" not in report(referring(tmp_path / "plain", None))
