"""Kernels of the published runs are built again from what was kept, and only as what ran."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from runs.errors import StoreError
from runs.export import winners_of
from runs.rebuild import kernel_of
from runs.store import RunStore

PUBLISHED = Path(__file__).parents[2] / "runs/published"
RUNS = sorted(p.parent for p in PUBLISHED.glob("*/spec.json"))


def test_there_are_published_runs() -> None:
    assert {RunStore.open(r).spec.variant for r in RUNS} == {"mha", "gqa", "mqa", "mla"}


def test_a_kernel_that_was_not_kept_is_built_again() -> None:
    store = RunStore.open(next(r for r in RUNS if "mqa" in r.name))
    record = winners_of(store, store.replay())[0].record
    stored = kernel_of(store, record)
    assert stored.source.digest == record.source_digest
    assert stored.cubin.image.startswith(b"\x7fELF")
    assert stored.cubin.resources == record.resources


def test_another_text_than_what_ran_is_refused() -> None:
    store = RunStore.open(next(r for r in RUNS if "mqa" in r.name))
    record = dataclasses.replace(
        winners_of(store, store.replay())[0].record, source_digest="0" * 64
    )
    with pytest.raises(StoreError, match="is another text in this version"):
        kernel_of(store, record)


def test_a_sketch_that_the_run_does_not_hold_is_named() -> None:
    store = RunStore.open(next(r for r in RUNS if "mqa" in r.name))
    record = dataclasses.replace(winners_of(store, store.replay())[0].record, sketch="other")
    with pytest.raises(StoreError, match="'other' that the run does not hold"):
        kernel_of(store, record)
