"""`tune ablate`: a table of what each parameter of a run's winners is worth."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from runs.record import Basis, RunSpec
from runs.store import Replay
from space.gpu import gpu_named, gpu_of_device_name
from tuner.ablation import Compiles, Effect, Judges, effects, open_run, table, winners
from tuner.devices import device_names
from tuner.errors import MachineError, NothingFound, UsageError
from tuner.reference import check_unchanged, examine


def run_ablate(
    run: Path, shapes: Sequence[str], as_json: bool, out: Callable[[str], object]
) -> None:
    """Measure and print. Raises UsageError, StoreError, NothingFound and MachineError."""
    from tuner.pools import CompilePool, GpuPool

    spec, replay = open_run(run)
    if spec.measure is Basis.PREDICTED:
        raise UsageError(
            f"{run} is predicted, and ablate takes a measured run; tune --resume {run} where a "
            f"{gpu_named(spec.gpu).title} is"
        )
    names = device_names()
    here = gpu_of_device_name(names[0]) if names else None
    if here is None or here.name != spec.gpu:
        raise MachineError(
            f"{run} was tuned on a {spec.gpu}, which is not in this machine; ablate there"
        )
    if spec.reference is not None:
        check_unchanged(spec.reference, run)
        examine(spec)
    compiles, judges = CompilePool(), GpuPool([0])
    try:
        measured = measure(spec, replay, shapes, compiles, judges, here.arch)
    finally:
        compiles.close()
        judges.close()
    for line in [json.dumps([asdict(e) for e in measured])] if as_json else table(measured):
        out(line)


def measure(
    spec: RunSpec, replay: Replay, shapes: Sequence[str], compiles: Compiles, judges: Judges,
    arch: str,
) -> list[Effect]:  # fmt: skip
    """Return the effects on every shape asked for, in order. Raises NothingFound when none."""
    chosen = winners(replay, spec, shapes)
    if not chosen:
        raise NothingFound("the run has no chosen kernel to change")
    return [
        effect
        for shape, record in chosen
        for effect in effects(spec, shape, record, compiles, judges, arch)
    ]
