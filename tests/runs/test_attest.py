"""Attestations are written whole, read strictly, and notice a changed program."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from records import POINT, PROBLEM, timing

from runs import attest
from runs.attest import Attestation
from runs.errors import CodecError, StoreError

ONE = Attestation(
    "gqa-128-causal", "aa" * 32, PROBLEM, "canonical", POINT, "a100", "NVIDIA H200", 0.8,
    (timing(),), (("torch", "2.13.0"),), "2026-11-30T12:00:00Z",
)  # fmt: skip
TWO = dataclasses.replace(ONE, name="another", digest="bb" * 32)


def test_comes_back_sorted_by_name(tmp_path: Path) -> None:
    path = tmp_path / "attested.json"
    assert attest.load(path) == ()
    attest.add(path, [ONE])
    attest.add(path, [TWO])
    assert attest.load(path) == (TWO, ONE)
    assert [p.name for p in tmp_path.iterdir()] == ["attested.json"]


def test_replaces_what_the_same_card_said_before(tmp_path: Path) -> None:
    path = tmp_path / "attested.json"
    again = dataclasses.replace(ONE, digest="cc" * 32, date="2026-12-01T00:00:00Z")
    elsewhere = dataclasses.replace(ONE, card="NVIDIA L40S")
    attest.add(path, [ONE, elsewhere])
    attest.add(path, [again])
    assert attest.load(path) == (again, elsewhere)


def test_a_changed_or_absent_program_is_a_fault() -> None:
    same = {ONE.name: ONE.digest, TWO.name: TWO.digest, "unattested": "ff"}
    assert attest.changes((ONE, TWO), same) == ()
    (line,) = attest.changes((ONE, TWO), same | {ONE.name: "dd" * 32})
    assert line == (
        "gqa-128-causal: its text changed (aaaaaaaaaaaa ran right on NVIDIA H200 at "
        "2026-11-30T12:00:00Z, today's is dddddddddddd); run it on a GPU and attest it again"
    )
    assert attest.changes((ONE,), {}) == ("gqa-128-causal: attested, but no such program is built",)


def test_any_card_s_text_counts() -> None:
    older = dataclasses.replace(ONE, card="NVIDIA L40S", digest="ee" * 32)
    assert attest.changes((ONE, older), {ONE.name: older.digest}) == ()


@pytest.mark.parametrize("text", ["", "[]", '{"v": 1}', '{"v": 9, "attestations": []}'])
def test_a_damaged_file_is_named_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "attested.json"
    path.write_text(text)
    with pytest.raises(StoreError, match=r"attested.json is damaged"):
        attest.add(path, [ONE])
    assert path.read_text() == text


def test_an_error_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "attested.json"
    with pytest.raises(CodecError):
        attest.add(path, [dataclasses.replace(ONE, error_ratio=float("inf"))])
    assert not path.exists()
