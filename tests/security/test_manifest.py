"""An exported folder that somebody else changed: no path, number or name gets past its reader."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from decode_runs import ONE, exported
from exported import make_run, sealed
from fake_decode import PAGE

from runs.export import export
from runs.templates.manifest import ManifestError, read

HUGE = 10**30


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export")
    export(make_run(root / "runs"), root / "out")
    return root / "out"


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "out")
    return tmp_path / "out"


Change = Callable[[dict[str, Any]], Any]


def changed(folder: Path, change: Change) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    change(data)
    (folder / "manifest.json").write_text(json.dumps(sealed(data)))


def kernel_of(data: dict[str, Any]) -> dict[str, Any]:
    kernel: dict[str, Any] = next(iter(data["kernels"].values()))
    return kernel


def test_the_pristine_folder_is_read(folder: Path) -> None:
    manifest = read(folder)
    assert manifest.shapes and all(k.image() for k in manifest.kernels.values())


@pytest.mark.parametrize(
    "name",
    [
        "../secret.cubin", "kernels/../../secret.cubin", "/etc/passwd", "kernels//etc/passwd",
        "kernels/../manifest.json", "kernels/", "kernels", "", ".", "kernels/.hidden",
        "kernels/a/b.cubin", "kernels\\..\\x", "kernels/x\0.cubin", "kernels/x\n.cubin",
        "kernels/é.cubin", "KERNELS/x.cubin", "file:///etc/passwd", "kernels/\ud800",
        "kernels/" + "x" * 5000, "~/x", "$HOME/x",
    ],
    ids=ascii,
)  # fmt: skip
def test_a_path_cannot_leave_the_folder(folder: Path, name: str) -> None:
    (folder.parent / "secret.cubin").write_bytes(b"secret")
    changed(folder, lambda data: kernel_of(data).update(cubin=name))
    with pytest.raises(ManifestError) as caught:
        manifest = read(folder)
        for kernel in manifest.kernels.values():
            kernel.image()
    assert str(caught.value).replace(str(folder), "").isprintable()


def cubin_of(folder: Path) -> Path:
    return sorted((folder / "kernels").glob("*.cubin"))[0]


@pytest.mark.parametrize("target", ["../../secret", "/etc/passwd", "../manifest.json", "."])
def test_a_link_cannot_leave_the_folder(folder: Path, target: str) -> None:
    (folder.parent / "secret").write_bytes(b"secret")
    cubin = cubin_of(folder)
    cubin.unlink()
    cubin.symlink_to(target)
    with pytest.raises(ManifestError, match="is not in the folder's kernels/"):
        read(folder)


def test_links_that_go_round_are_refused(folder: Path) -> None:
    cubin = cubin_of(folder)
    cubin.unlink()
    cubin.symlink_to(cubin.name)
    with pytest.raises(ManifestError):
        read(folder)


def test_the_folder_of_kernels_cannot_be_a_link(folder: Path) -> None:
    elsewhere = folder.parent / "elsewhere"
    (folder / "kernels").rename(elsewhere)
    (folder / "kernels").symlink_to(elsewhere)
    with pytest.raises(ManifestError, match="is not in the folder's kernels/"):
        read(folder)


def test_the_folder_itself_may_be_a_link(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert all(k.image() for k in read(link).kernels.values())


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["shapes"][0].update(head_dim=32),
        lambda data: data["shapes"][0].update(dtype="bf16"),
        lambda data: data["shapes"][0].update(median_us=1.0),
        lambda data: kernel_of(data)["launches"][0].update(smem_bytes=1024),
        lambda data: kernel_of(data)["parameters"].update(BM=64),
        lambda data: data.update(note="added"),
        lambda data: data.pop("runs"),
        lambda data: data.update(sha256="0" * 64),
        lambda data: data["shapes"][0].update(median_us=float("nan")),
    ],
)
def test_a_changed_manifest_is_noticed(folder: Path, change: Change) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    change(data)
    (folder / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(ManifestError, match="its digest differs; export again"):
        read(folder)


def test_a_manifest_without_a_digest_is_refused(folder: Path) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    del data["sha256"]
    (folder / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(ManifestError, match="sha256: None is not of type str"):
        read(folder)


def test_the_same_values_in_another_order_are_the_same_manifest(folder: Path) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    text = json.dumps(dict(reversed(data.items())), indent=3)
    (folder / "manifest.json").write_text(text)
    assert read(folder).shapes


def test_a_pipe_in_place_of_the_manifest_is_not_waited_for(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    with pytest.raises(ManifestError, match="it is no regular file"):
        read(folder)


def test_a_pipe_in_place_of_machine_code_is_not_waited_for(folder: Path) -> None:
    cubin = cubin_of(folder)
    cubin.unlink()
    os.mkfifo(cubin)
    (kernel,) = [k for k in read(folder).kernels.values() if k.cubin.name == cubin.name]
    with pytest.raises(ManifestError, match="no such file"):
        kernel.image()


def test_machine_code_with_another_digest_is_not_loaded(folder: Path) -> None:
    cubin = cubin_of(folder)
    cubin.write_bytes(cubin.read_bytes() + b"\0")
    (kernel,) = [k for k in read(folder).kernels.values() if k.cubin.name == cubin.name]
    with pytest.raises(ManifestError, match="its digest differs"):
        kernel.image()


WRONG: tuple[Any, ...] = (
    None, True, 1.5, -1, HUGE, 2**31, "", "x\ny", "a b", "../x", "é", "\ud800", "x" * 500,
    "9" * 20, [], {}, [[]], [HUGE], {"a": HUGE},
)  # fmt: skip


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value below what the reader looks at."""
    found = [path] if path else []
    if isinstance(data, dict):
        for key, value in data.items():
            found += places(value, (*path, key))
    elif isinstance(data, list) and data:
        found += places(data[0], (*path, 0))
    return found


def test_any_value_at_any_place_is_refused_or_within_its_bounds(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    good = json.loads(text)
    refused = 0
    for path in places(good):
        for value in WRONG:
            data = copy.deepcopy(good)
            place = data
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = value
            (folder / "manifest.json").write_text(json.dumps(sealed(data)))
            try:
                manifest = read(folder)
            except ManifestError:
                refused += 1
                continue
            for kernel in manifest.kernels.values():
                assert kernel.cubin.resolve().is_relative_to(folder.resolve() / "kernels")
                for launch in kernel.launches:
                    assert 1 <= launch.threads <= 1024 and 0 <= launch.smem_bytes <= 1 << 20
                    assert launch.entry.isascii() and launch.entry.isidentifier()
    assert refused > 300


@pytest.fixture
def decoding(tmp_path: Path) -> Path:
    """A folder with one kernel that decodes a cache in one piece and one for pages of 16."""
    return exported(tmp_path, (ONE,), (0, PAGE))


def test_any_value_at_any_place_of_a_decode_manifest_is_within_its_bounds(decoding: Path) -> None:
    good = json.loads((decoding / "manifest.json").read_text())
    of_decode = [
        p for p in places(good) if {"splits", "phase", "page", "if_split", "dependent"} & {*p}
    ]
    assert len(of_decode) >= 10
    refused = 0
    for path in of_decode:
        for value in (*WRONG, 0, 1025, 1 << 17, [1, 2], {"rows": 1}):
            data = copy.deepcopy(good)
            place = data
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = value
            (decoding / "manifest.json").write_text(json.dumps(sealed(data)))
            try:
                manifest = read(decoding)
            except ManifestError:
                refused += 1
                continue
            for kernel in manifest.kernels.values():
                assert kernel.splits is not None
                assert all(1 <= n <= 1024 for n in kernel.splits)
            assert all(0 <= key.page <= 1 << 16 for key in manifest.shapes)
    assert refused > 150


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, k: k.pop("splits"), "has no split rule"),
        (lambda s, k: s.pop("phase"), "phase 'prefill', page 16|has a split rule"),
        (lambda s, k: s.update(page=0 if s["page"] else 16), "reads (no )?pages"),
        (lambda s, k: s.update(phase="encode"), "phase 'encode'"),
        (lambda s, k: k["splits"].pop("keys"), "keys: None is not of type int"),
        (lambda s, k: k["splits"].update(min_tiles=0), "min_tiles: 0 is out of range"),
        (lambda s, k: k["launches"][1].update(if_split=1), "if_split: 1 is not of type bool"),
    ],
)
def test_a_shape_and_its_kernel_agree_about_decoding(
    decoding: Path, change: Callable[[Any, Any], Any], message: str
) -> None:
    data = json.loads((decoding / "manifest.json").read_text())
    for shape in data["shapes"]:
        change(shape, data["kernels"][shape["kernel"]])
    (decoding / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(ManifestError, match=message):
        read(decoding)


def test_folders_of_before_decoding_are_read_and_later_ones_are_not(folder: Path) -> None:
    assert json.loads((folder / "manifest.json").read_text())["version"] == 1
    assert {(k.phase, k.page) for k in read(folder).shapes} == {("prefill", 0)}
    changed(folder, lambda data: data.update(version=3))
    with pytest.raises(ManifestError, match="not a tltune-export of version 1 to 2"):
        read(folder)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", "[" * 200_000, "9" * 100_000, '{"format": NaN}', "\xff", "{}"],
    ids=lambda t: ascii(t[:12]),
)
def test_text_that_is_no_manifest_is_refused(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ManifestError):
        read(folder)


def test_a_digest_is_sixty_four_hex_digits(folder: Path) -> None:
    good = hashlib.sha256(cubin_of(folder).read_bytes()).hexdigest()
    for digest in (good.upper(), good[:-1], good + "0", f"{good}\n", "0x" + good[2:], ""):
        data = json.loads((folder / "manifest.json").read_text())
        kernel_of(data)["cubin_sha256"] = digest
        (folder / "manifest.json").write_text(json.dumps(data))
        with pytest.raises(ManifestError, match="cubin_sha256"):
            read(folder)
