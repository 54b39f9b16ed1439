"""What an exported folder holds: the right winners, complete, whole or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
from exported import CAUSAL, FULL, LONG, finalist, make_run, problem, sealed
from records import kernel, measured, timing, trial

from codegen.kernel import Arg, ArgKind, KernelSource
from runs.errors import ExportError, StoreError
from runs.export import export, remarks
from runs.record import Basis, Rejected, Stage, TrialClass, TrialRecord
from runs.store import RunStore
from runs.templates import manifest as manifests
from tuner.subjects import subjects_of


def by_shape(manifest: dict) -> dict:
    return {(s["seqlen_q"], s["causal"], s["gpu"]): s for s in manifest["shapes"]}


def of_kernel(record: TrialRecord, source: KernelSource) -> TrialRecord:
    """The trial of a kernel for FULL."""
    return dataclasses.replace(record, problem=problem(FULL), source_digest=source.digest)


def test_a_folder_is_a_package_with_sources_cubins_and_manifest(tmp_path: Path) -> None:
    store = make_run(tmp_path)
    manifest = export(store, tmp_path / "out")
    assert json.loads((tmp_path / "out/manifest.json").read_text()) == manifest
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == [
        "__init__.py", "attention.py", "cache.py", "checks.py", "choice.py", "description.py",
        "kernels", "launch.py", "lengths.py", "manifest.json", "manifest.py", "tensor_map.py",
        "workspace.py",
    ]  # fmt: skip
    for entry in manifest["kernels"].values():
        source = (tmp_path / "out" / entry["source"]).read_bytes()
        image = (tmp_path / "out" / entry["cubin"]).read_bytes()
        assert hashlib.sha256(source).hexdigest() == entry["source_sha256"]
        assert hashlib.sha256(image).hexdigest() == entry["cubin_sha256"]
        assert entry["parameters"] == {"BM": 128, "BN": 64, "warps": 4}
        assert entry["nvrtc"] == "13.0"
    assert len(manifest["kernels"]) == 2  # one kernel serves both full shapes
    full = by_shape(manifest)[65, False, "h200"]
    assert (full["median_us"], full["low_us"], full["high_us"]) == (100.0, 99.0, 101.0)
    assert (full["basis"], full["error_ratio"], full["timed"]) == ("measured", 0.9, "search")
    (run,) = manifest["runs"]
    assert run["notes"][0]["values"] == {"torch": "2.13.0", "driver": "580"}


def test_the_folder_reads_its_own_manifest(tmp_path: Path) -> None:
    export(make_run(tmp_path), tmp_path / "out")
    manifest = manifests.read(tmp_path / "out")
    assert manifest.gpus == {"h200": "H200"}
    assert len(manifest.shapes) == 3
    entry = next(iter(manifest.kernels.values()))
    assert entry.launches[0].entry == "forward"
    assert entry.image().startswith(b"\x7fELF")


def test_the_final_timing_decides(tmp_path: Path) -> None:
    events = (
        dataclasses.replace(finalist(0, FULL, 90.0), trial=None, name="fa2"),
        finalist(2, FULL, 95.0, chosen=True),
        finalist(0, FULL, 94.0),
    )
    store = make_run(tmp_path)
    source, cubin = kernel("slower in the search")
    with RunStore.open(store.path, write=True) as writer:
        writer.put_kernel(source, cubin)
        record = trial(2, measured(timing(FULL, 120.0)), cubin.key)
        writer.append(of_kernel(record, source))
        for event in events:
            writer.append(event)
    shapes = by_shape(export(store, tmp_path / "out"))
    full = shapes[65, False, "h200"]
    assert (full["trial"], full["median_us"], full["timed"]) == (2, 95.0, "final")
    assert full["peers_us"] == {"fa2": 90.0}
    assert shapes[300, False, "h200"]["trial"] == 0


def test_a_run_without_final_timings_says_what_was_compared(tmp_path: Path) -> None:
    store = make_run(tmp_path / "runs", events=(finalist(0, FULL, 94.0, chosen=True),))
    manifest = export(store, tmp_path / "out")
    shapes = by_shape(manifest)
    assert {k[:2]: s["checked"] for k, s in shapes.items()} == {
        (65, False): "every element", (65, True): "a sample", (300, False): "a sample",
    }  # fmt: skip
    (line,) = remarks(manifest)
    assert line.startswith("2 of these shapes come from a run without its final checks")


def test_the_searchs_own_times_are_no_final_timing(tmp_path: Path) -> None:
    """Where the card was lost before the finals, the best trials stand in for them."""
    stand_in = dataclasses.replace(
        finalist(0, FULL, chosen=True), timing=timing(FULL, 100.0, Basis.MEASURED)
    )
    store = make_run(tmp_path / "runs", us=100.0, events=(stand_in,))
    full = by_shape(export(store, tmp_path / "out"))[65, False, "h200"]
    assert (full["timed"], full["checked"]) == ("search", "a sample")


def test_predicted_kernels_were_run_by_no_device(tmp_path: Path) -> None:
    manifest = export(make_run(tmp_path, basis=Basis.PREDICTED), tmp_path / "out")
    assert {s["checked"] for s in manifest["shapes"]} == {"none: no device ran it"}
    (line,) = remarks(manifest)
    assert line.startswith("3 of these shapes are predicted: no device has run their kernels")


def test_runs_are_merged_the_faster_and_the_measured_first(tmp_path: Path) -> None:
    slow = make_run(tmp_path / "a", us=100.0)
    fast = make_run(tmp_path / "b", us=80.0)
    other = make_run(tmp_path / "c", gpu="l40s", arch="sm_89", us=70.0)
    guess = make_run(tmp_path / "d", basis=Basis.PREDICTED, us=5.0)
    manifest = export([slow, guess, fast, other], tmp_path / "out")
    shapes = by_shape(manifest)
    assert len(shapes) == len(manifest["shapes"]) == 6
    assert shapes[65, False, "h200"]["median_us"] == 80.0
    assert shapes[65, False, "l40s"]["median_us"] == 70.0
    assert {e["arch"] for e in manifest["kernels"].values()} == {"sm_90a", "sm_89"}
    assert set(manifest["gpus"]) == {"h200", "l40s"}


def test_predicted_times_are_called_so(tmp_path: Path) -> None:
    manifest = export(make_run(tmp_path, basis=Basis.PREDICTED), tmp_path / "out")
    assert {s["basis"] for s in manifest["shapes"]} == {"predicted"}


def test_an_earlier_export_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    store = make_run(tmp_path / "runs")
    export(store, out)
    (out / "kernels/stale.cu").write_text("")
    export(store, out)
    assert not (out / "kernels/stale.cu").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "runs"]
    mine = tmp_path / "mine"
    mine.mkdir()
    export(store, mine)  # an empty folder may be filled
    for foreign in (tmp_path / "runs", store.path / "spec.json"):
        before = sorted(p.name for p in foreign.parent.iterdir())
        with pytest.raises(ExportError, match="name a new folder"):
            export(store, foreign)
        assert sorted(p.name for p in foreign.parent.iterdir()) == before


def test_a_run_without_a_right_kernel_has_nothing_to_export(tmp_path: Path) -> None:
    store = make_run(tmp_path / "runs")
    wrong = Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, "NaN left")
    journal = store.path / "journal.jsonl"
    journal.write_text("")
    with RunStore.open(store.path, write=True) as writer:
        writer.append(dataclasses.replace(trial(0, wrong), problem=problem(FULL)))
    with pytest.raises(ExportError, match=r"no right kernel in .*gqa-h200"):
        export(store, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_kernel_stops_the_export_before_it_writes(tmp_path: Path) -> None:
    store = make_run(tmp_path / "runs")
    for image in store.path.rglob("image.cubin"):
        image.write_bytes(b"\x7fELF other")
    with pytest.raises(StoreError, match="not the code that was judged"):
        export(store, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_trial_that_names_the_kernel_of_another_is_not_exported(tmp_path: Path) -> None:
    """A full kernel in the place of a causal one would be run on every causal call."""
    store = make_run(tmp_path / "runs")
    journal = store.path / "journal.jsonl"
    keys = [r.cubin_key for r in store.replay().history]
    text = journal.read_text().replace(keys[0], "first").replace(keys[1], keys[0])
    journal.write_text(text.replace("first", keys[1]))
    with pytest.raises(StoreError, match="whose text is not the one that it was judged by"):
        export(store, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(StoreError, match="whose text is not the one that it was judged by"):
        subjects_of(store.path)


def test_a_launch_that_was_changed_is_not_exported(tmp_path: Path) -> None:
    """A larger tile in the grid leaves rows unwritten, and stands in no text and no image."""
    store = make_run(tmp_path / "runs")
    for about in store.path.glob("kernels/*/kernel.json"):
        assert '"tile":128' in about.read_text()
        about.write_text(about.read_text().replace('"tile":128', '"tile":256'))
    with pytest.raises(StoreError, match="is damaged: its digest differs"):
        export(store, tmp_path / "out")


def test_a_choice_that_is_no_right_trial_is_reported(tmp_path: Path) -> None:
    store = make_run(tmp_path / "runs", events=(finalist(7, FULL, chosen=True),))
    with pytest.raises(StoreError, match="trial 7 was chosen but is no right trial"):
        export(store, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": (("Q", "in"), ("bias", "in"), ("O", "out"))}, "reads tensor 'bias'"),
        ({"tensors": (("Q", "in"), ("O", "out"), ("L", "out"))}, "writes O, L"),
        ({"args": (Arg(ArgKind.FLOAT, "softcap"),)}, "takes 'softcap'"),
    ],
)
def test_a_kernel_that_wants_more_than_attention_gives_is_refused(
    tmp_path: Path, change: dict, message: str
) -> None:
    store = make_run(tmp_path / "runs")
    source, cubin = kernel("special")
    if args := change.pop("args", None):
        change["launches"] = (dataclasses.replace(source.launches[0], args=args),)
    with RunStore.open(store.path, write=True) as writer:
        writer.put_kernel(dataclasses.replace(source, **change), cubin)
        record = trial(2, measured(timing(FULL, 10.0)), cubin.key)
        writer.append(of_kernel(record, source))
    with pytest.raises(ExportError, match=message):
        export(store, tmp_path / "out")


def test_shapes_of_the_run_without_a_kernel_are_left_out(tmp_path: Path) -> None:
    store = make_run(tmp_path / "runs")
    lines = (store.path / "journal.jsonl").read_text().splitlines(keepends=True)
    (store.path / "journal.jsonl").write_text(lines[1])
    manifest = export(store, tmp_path / "out")
    assert [s["causal"] for s in manifest["shapes"]] == [True]
    assert CAUSAL.seqlen_q == manifest["shapes"][0]["seqlen_q"] != LONG.seqlen_q


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "other", "not a tltune-export"),
        (("version",), True, "version: True is not of type int"),
        (("shapes", 0, "batch"), 0, "batch: 0 is out of range"),
        (("shapes", 0, "batch"), 2.0, "batch: 2.0 is not of type int"),
        (("shapes", 0, "kernel"), "absent", "no kernel 'absent'"),
        (("shapes", 0, "gpu"), "b200", "no gpu 'b200'"),
        (("kernels", "K", "cubin"), "../../evil.cubin", "is not in the folder's kernels/"),
        (("kernels", "K", "cubin"), "/etc/passwd", "is not in the folder's kernels/"),
        (("kernels", "K", "cubin"), "kernels/../manifest.json", "is not in the folder's kernels/"),
        (("kernels", "K", "cubin_sha256"), "12", "cubin_sha256 '12'"),
        (("kernels", "K", "arch"), "x86", "arch 'x86'"),
        (("kernels", "K", "launches", 0, "threads"), 4096, "threads: 4096 is out of range"),
        (("kernels", "K", "launches", 0, "smem_bytes"), -1, "smem_bytes: -1 is out of range"),
        (("kernels", "K", "launches", 0, "grid"), None, "grid is not a list"),
        (("kernels", "K", "launches", 0, "args", 0, "box"), [1], r"box \[1\]"),
        (("kernels", "K", "launches", 0, "args", 0, "pack"), 0, "pack: 0 is out of range"),
        (("kernels", "K", "launches", 0, "persistent"), -1, "persistent: -1 is out of range"),
        (("kernels", "K", "launches", 0, "cluster"), 0, "cluster: 0 is out of range"),
    ],
)
def test_a_manifest_that_was_changed_is_refused(
    tmp_path: Path, path: tuple, value: object, message: str
) -> None:
    manifest = export(make_run(tmp_path), tmp_path / "out")
    name = manifest["shapes"][0]["kernel"]
    *steps, last = (name if p == "K" else p for p in path)
    place = manifest
    for step in steps:
        place = place[step]
    place[last] = value
    (tmp_path / "out/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(manifests.ManifestError, match=message):
        manifests.read(tmp_path / "out")


def test_a_cluster_is_exported_and_a_launch_that_says_none_is_of_single_blocks(
    tmp_path: Path,
) -> None:
    store = make_run(tmp_path / "runs")
    source, cubin = kernel("pairs")
    launch = dataclasses.replace(source.launches[0], cluster=2)
    with RunStore.open(store.path, write=True) as writer:
        writer.put_kernel(dataclasses.replace(source, launches=(launch,)), cubin)
        record = trial(2, measured(timing(FULL, 2.0)), cubin.key)
        writer.append(of_kernel(record, source))
    manifest = export(RunStore.open(store.path), tmp_path / "out")
    found = manifests.read(tmp_path / "out").kernels
    assert [k.launches[0].cluster for k in found.values()].count(2) == 1
    for entry in manifest["kernels"].values():
        for x in entry["launches"]:
            del x["cluster"]
    (tmp_path / "out/manifest.json").write_text(json.dumps(sealed(manifest)))
    found = manifests.read(tmp_path / "out").kernels
    assert {k.launches[0].cluster for k in found.values()} == {1}


def test_packed_heads_are_exported_and_an_argument_that_says_none_packs_none(
    tmp_path: Path,
) -> None:
    store = make_run(tmp_path / "runs")
    source, cubin = kernel("packed")
    first, *others = source.launches[0].args
    args = (dataclasses.replace(first, pack=4), *others)
    launch = dataclasses.replace(source.launches[0], args=args)
    with RunStore.open(store.path, write=True) as writer:
        writer.put_kernel(dataclasses.replace(source, launches=(launch,)), cubin)
        record = trial(2, measured(timing(FULL, 2.0)), cubin.key)
        writer.append(of_kernel(record, source))
    manifest = export(RunStore.open(store.path), tmp_path / "out")
    found = manifests.read(tmp_path / "out").kernels
    packs = [a.pack for k in found.values() for x in k.launches for a in x.args]
    assert packs.count(4) == 1 and set(packs) == {1, 4}
    said = [a for k in manifest["kernels"].values() for x in k["launches"] for a in x["args"]]
    assert [a["pack"] for a in said if "pack" in a] == [4]


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    manifest = export(make_run(tmp_path), tmp_path / "out")
    cubin = tmp_path / "out" / next(iter(manifest["kernels"].values()))["cubin"]
    cubin.rename(tmp_path / "elsewhere.cubin")
    cubin.symlink_to(tmp_path / "elsewhere.cubin")
    with pytest.raises(manifests.ManifestError, match="is not in the folder's kernels/"):
        manifests.read(tmp_path / "out")
