"""Runs whose kernels decode, and what is exported of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fake_decode import RULE, decode_kernel
from records import SPEC, measured, timing, trial

from codegen.kernel import SplitRule
from runs.export import export
from runs.record import RunSpec
from runs.store import RunStore
from space.variant import DType, Phase, Problem, Shape

DIMS = (32, 32)
ONE = Shape(2, 8, 2, 1, 100, *DIMS)
FEW = dataclasses.replace(ONE, seqlen_q=3, causal=True)
LATENT = Shape(2, 16, 1, 1, 50, 576, 512)


def spec_of(shapes: tuple[Shape, ...], page: int) -> RunSpec:
    """The specification of a run that decodes."""
    return dataclasses.replace(
        SPEC, run_id=f"20261130T1200Z-decode-{page}", shapes=shapes, dtype=DType.FP16,
        phase=Phase.DECODE, page=page,
    )  # fmt: skip


def problem_of(shape: Shape, page: int) -> Problem:
    """What a kernel of a shape is compiled for."""
    dims = (shape.head_dim, shape.head_dim_v)
    return Problem("gqa", DType.FP16, *dims, shape.causal, Phase.DECODE, page)


def make_decode_run(
    root: Path, shapes: tuple[Shape, ...], page: int, rule: SplitRule | None = RULE
) -> RunStore:
    """A run with a kernel for each shape's problem."""
    with RunStore.create(root, spec_of(shapes, page)) as store:
        for index, shape in enumerate(shapes):
            source, cubin = decode_kernel(problem_of(shape, page))
            store.put_kernel(dataclasses.replace(source, splits=rule), cubin)
            outcome = measured(dataclasses.replace(timing(shape), splits=5))
            store.append(
                dataclasses.replace(
                    trial(index, outcome, cubin.key), problem=problem_of(shape, page),
                    source_digest=source.digest,
                )
            )  # fmt: skip
    return RunStore.open(store.path)


def exported(root: Path, shapes: tuple[Shape, ...], pages: tuple[int, ...] = (0,)) -> Path:
    """An exported folder of one run for each page size."""
    export([make_decode_run(root / "runs", shapes, page) for page in pages], root / "out")
    return root / "out"
