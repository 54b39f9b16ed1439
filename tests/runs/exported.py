"""Runs with right kernels, for the tests of exporting."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from records import SPEC, finalist, kernel, measured, timing, trial

from runs.record import Basis, Event, Note
from runs.store import RunStore
from runs.templates.manifest import digest_of
from space.variant import DType, Problem, Shape

FULL = Shape(2, 4, 2, 65, 65, 16, 16)
LONG = Shape(1, 4, 2, 300, 300, 16, 16)
CAUSAL = dataclasses.replace(FULL, causal=True)
SHAPES = (FULL, LONG, CAUSAL)


def problem(shape: Shape, dtype: DType = DType.FP16) -> Problem:
    return Problem("gqa", dtype, shape.head_dim, shape.head_dim_v, shape.causal)


def make_run(
    root: Path,
    *,
    gpu: str = "h200",
    arch: str = "sm_90a",
    basis: Basis = Basis.MEASURED,
    us: float = 100.0,
    events: tuple[Event, ...] = (),
) -> RunStore:
    """A run of one full and one causal kernel, the full one timed on both its shapes."""
    spec = dataclasses.replace(
        SPEC,
        run_id=f"20261130T1200Z-gqa-{gpu}",
        gpu=gpu,
        shapes=SHAPES,
        measure=basis,
        dtype=DType.FP16,
    )
    with RunStore.create(root, spec) as store:
        for index, (name, shapes) in enumerate((("full", (FULL, LONG)), ("causal", (CAUSAL,)))):
            source, cubin = kernel(f"{us:g} {name}", arch)
            store.put_kernel(source, cubin)
            outcome = measured(*(timing(s, us, basis) for s in shapes))
            record = dataclasses.replace(
                trial(index, outcome, cubin.key), problem=problem(shapes[0]),
                source_digest=source.digest,
            )  # fmt: skip
            store.append(record)
        store.append(Note("versions", (("torch", "2.13.0"), ("driver", "580"))))
        for event in events:
            store.append(event)
    return store


__all__ = ["CAUSAL", "FULL", "LONG", "SHAPES", "finalist", "make_run", "problem"]


def sealed(data: dict[str, Any]) -> dict[str, Any]:
    """Give a changed manifest its own digest, as who knows how it is made would."""
    return data | {"sha256": digest_of(data)}
