"""The folder store against the shared suite, its kernels and its summaries."""

from __future__ import annotations

import dataclasses
import os
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from records import (
    EVENTS,
    OTHER,
    PROBLEM,
    SHAPE,
    SPEC,
    finalist,
    kernel,
    measured,
    timing,
    trial,
)
from store_contract import StoreContract

from runs.errors import StoreError
from runs.record import Basis, Event, Finished, Note, Resumed, RunSpec, TrialRecord
from runs.store import Replay, RunStore, new_run_id
from space.variant import DType


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def spec() -> RunSpec:
    return SPEC


@pytest.fixture
def events() -> tuple[Event, ...]:
    return EVENTS


class TestRunStore(StoreContract):
    """RunStore keeps the contract."""


def test_keeps_the_sketches_as_files(root: Path) -> None:
    with RunStore.create(root, SPEC) as store:
        text = (store.path / "sketches" / "canonical.tl").read_text()
    assert text == SPEC.sketches[0][1]
    assert sorted(p.name for p in root.iterdir()) == [SPEC.run_id]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match=f"cannot write a run into {tmp_path}"):
        RunStore.create(tmp_path / "runs", SPEC)


def test_a_root_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(StoreError, match=r"cannot write a run into .*runs: File exists"):
        RunStore.create(tmp_path / "runs", SPEC)


def test_a_kernel_comes_back_as_it_was(root: Path) -> None:
    source, cubin = kernel()
    with RunStore.create(root, SPEC) as store:
        folder = store.put_kernel(source, cubin)
        assert store.put_kernel(source, cubin) == folder
    stored = RunStore.open(store.path).kernel(cubin.key)
    assert (stored.source, stored.cubin) == (source, cubin)
    assert (folder / "source.cu").read_text() == source.text
    assert [p.name for p in folder.parent.iterdir()] == [cubin.key]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("image.cubin", "not the code that was judged"),
        ("source.cu", "not the text that was compiled"),
        ("kernel.json", r"kernel.json is damaged"),
    ],
)
def test_a_damaged_kernel_is_not_used(root: Path, file: str, message: str) -> None:
    source, cubin = kernel()
    with RunStore.create(root, SPEC) as store:
        folder = store.put_kernel(source, cubin)
        data = bytearray((folder / file).read_bytes())
        data[-2] ^= 1
        (folder / file).write_bytes(data)
        with pytest.raises(StoreError, match=message):
            store.kernel(cubin.key)


def test_an_absent_kernel_is_named(root: Path) -> None:
    with RunStore.create(root, SPEC) as store:
        with pytest.raises(StoreError, match=r"cannot read kernel .*deadbeef"):
            store.kernel("deadbeef")
        with pytest.raises(StoreError, match="cannot be a file name"):
            store.kernel("../../etc")
        source, cubin = kernel()
        with pytest.raises(StoreError, match="cannot be a file name"):
            store.put_kernel(source, dataclasses.replace(cubin, key=""))


def test_final_timings_after_a_resume_replace_those_of_their_shape() -> None:
    old, other = finalist(0, SHAPE, chosen=True), finalist(0, OTHER, chosen=True)
    new = finalist(1, SHAPE, 80.0, chosen=True)
    replay = Replay((trial(0), old, other, Resumed(1), trial(1), new))
    assert set(replay.finalists) == {other, new}
    assert len(replay.history) == 2


def test_a_run_that_went_on_is_not_finished() -> None:
    end = Finished("budget spent", 3)
    assert Replay((end,)).finished == end
    assert Replay((end, Note("clocks", ()))).finished == end
    assert Replay((end, Resumed(3))).finished is None
    assert Replay((Resumed(3), end)).finished == end


def test_run_ids_are_utc() -> None:
    noon = datetime(2026, 11, 30, 13, 0, tzinfo=timezone(timedelta(hours=1)))
    assert new_run_id("mla", "l40s", noon) == "20261130T1200Z-mla-l40s"
    assert new_run_id("mla", "l40s")[:4] == str(datetime.now(UTC).year)


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (trial(0), "trial 0 is there twice"),
        (dataclasses.replace(trial(9), problem=dataclasses.replace(PROBLEM, dtype=DType.FP16)),
         "trial 9 is of fp16 prefill and the run of bf16 prefill"),
        (trial(9, measured(timing(basis=Basis.PREDICTED))), "a time is predicted and the run's"),
    ],
    ids=["doubled", "another dtype", "predicted"],
)  # fmt: skip
def test_an_event_that_the_run_did_not_write_is_damage(
    event: TrialRecord, said: str, tmp_path: Path
) -> None:
    with RunStore.create(tmp_path, SPEC) as store:
        store.append(trial(0))
        store.append(event)
    with pytest.raises(StoreError, match=f"journal.jsonl line 2 is damaged: {said}"):
        RunStore.open(store.path).replay()
