"""An exported folder that serves every case: the known-good kernel of each of their problems."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import joblib

from codegen.cute import translate
from codegen.kernel import Cubin, KernelSource
from codegen.nvrtc import compile_source
from llm_proposer.seeds import seeds
from runs.export import export
from runs.record import Basis, Measured, RunSpec, Timing, TrialRecord
from runs.store import RunStore
from space.constraints import space_for
from space.gpu import GpuSpec
from space.variant import DType, Phase, Problem, Shape, SpaceError, check_shape
from tests.cases.case import PLANNED, Case, out_of_scope
from tests.cases.runners import program_of
from tuner.evaluate.checks import small_shape

LENGTH = 128  #: of the shape that a kernel is entered under; cases call it with their own


def problems(cases: Iterable[Case], gpu: GpuSpec) -> tuple[Problem, ...]:
    """Return the problems that a folder must hold a kernel for."""
    found: dict[Problem, None] = {}
    for case in cases:
        if out_of_scope(case) is not None or case.kind in PLANNED:
            continue
        if isinstance(case.raw["heads_kv"], dict) or case.dtype not in gpu.dtypes:
            continue
        for problem, check in case.runs():
            try:
                check_shape(check.shape)
            except SpaceError:  # a case that is to be refused
                continue
            found.setdefault(problem)
    return tuple(found)


def build(problem: Problem, gpu: GpuSpec) -> tuple[KernelSource, Cubin]:
    """Translate and compile the known-good kernel of a problem."""
    source = translate(program_of(problem, gpu, None), problem, gpu)
    return source, compile_source(source, gpu.arch, None)


def _kind(p: Problem) -> tuple[str, DType, Phase, int]:
    """What the problems of one run have in common."""
    return p.variant, p.dtype, p.phase, p.page


def _entered(p: Problem) -> Shape:
    """The shape that a kernel is entered under."""
    if p.phase is Phase.DECODE:
        return small_shape(p, 1, 2 if p.causal else 1, LENGTH)
    return small_shape(p, 1, LENGTH, LENGTH)


def export_cases(cases: Iterable[Case], gpu: GpuSpec, folder: Path) -> Path:
    """Build and export every kernel as `folder`/export; runs are left beside it."""
    todo = problems(cases, gpu)
    jobs = min(len(todo), len(os.sched_getaffinity(0)))
    built = joblib.Parallel(n_jobs=jobs)(joblib.delayed(build)(p, gpu) for p in todo)
    stores = []
    for kind in dict.fromkeys(map(_kind, todo)):
        mine = [(p, b) for p, b in zip(todo, built, strict=True) if _kind(p) == kind]
        shapes = tuple(_entered(p) for p, _ in mine)
        variant, dtype, phase, page = kind
        run_id = f"20261130T1200Z-{variant}-{dtype}-{phase}-{page}"
        spec = RunSpec(
            run_id, variant, gpu.name, dtype, shapes, 1, 0, Basis.MEASURED, phase=phase, page=page
        )
        with RunStore.create(folder / "runs", spec) as store:
            for index, ((problem, (source, cubin)), shape) in enumerate(
                zip(mine, shapes, strict=True)
            ):
                store.put_kernel(source, cubin)
                timing = Timing(shape, 1.0, 1.0, 1.0, 1, Basis.MEASURED)
                point = seeds(problem, gpu, space_for(problem, gpu))[0]
                store.append(
                    TrialRecord(
                        index, problem, "canonical", point, "first", Measured((timing,), 1.0),
                        source.digest, cubin.key, cubin.resources,
                    )
                )  # fmt: skip
            stores.append(store)
    export(stores, folder / "export")
    return folder / "export"
