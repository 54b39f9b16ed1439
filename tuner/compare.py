"""Who finds fast kernels soonest: the same space, judge, budget and seeds with four proposers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llm_proposer.session import BATCH
from runs import codec
from runs.errors import CodecError
from runs.files import read_regular
from runs.rebuild import stored_kernel
from runs.record import (
    Basis,
    Finalist,
    Finished,
    History,
    Measured,
    Resumed,
    RunSpec,
    TrialRecord,
)
from runs.store import RunStore, new_run_id
from space.gpu import GpuSpec, gpu_named
from space.variant import Shape
from tuner.errors import MachineError, NothingFound, UsageError
from tuner.finish import Contender, choose, unfinished
from tuner.guide import BATCH_PATIENCE_S, ModelGuide
from tuner.lanes import Lane
from tuner.loop import NOTHING_MORE, End, search
from tuner.options import (
    Options,
    basis_of,
    check_common,
    device_index,
    gpu_of,
    settings_of,
    spec_of,
    workers_of,
)
from tuner.plans import PLAN, begin_folder
from tuner.session import Machine, Workshop, guided, run_lanes, with_sketches

ARMS = ("llm", "search", "assisted", "random")
FORMAT = "tltune-comparison"
WAITS = "waits for the first replies"
MAX_SEEDS = 1000
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared. `base` is the specification that every run shares but arm and seed."""

    arms: tuple[str, ...]
    seeds: int
    base: RunSpec

    @property
    def runs(self) -> tuple[RunSpec, ...]:
        """Every run, arms in turn, so that a slow drift of the card meets all of them alike."""
        return tuple(
            replace(self.base, run_id=f"{self.base.run_id}-{arm}-s{seed}", seed=seed, arm=arm)
            for seed in range(self.base.seed, self.base.seed + self.seeds)
            for arm in self.arms
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """A finished comparison: every run's trials, and the best of each arm timed side by side."""

    folder: Path
    plan: Plan
    stores: tuple[RunStore, ...]
    final: RunStore | None
    #: (arm, shape) → trial of the final run
    entrants: dict[tuple[str, Shape], int]


def plan_of(options: Options, arms: str, seeds: int, devices: tuple[str, ...]) -> Plan:
    """Build the plan of a new comparison. Raises UsageError, SpaceError and MachineError."""
    check_common(options)
    chosen = tuple(dict.fromkeys(a.strip() for a in arms.split(",")))
    if unknown := [a for a in chosen if a not in ARMS]:
        raise UsageError(f"unknown arm {unknown[0]!r}; known arms: {', '.join(ARMS)}")
    if len(chosen) < 2:
        raise UsageError(f"--arms {arms} is one arm; name two or more of {', '.join(ARMS)}")
    if not 1 <= seeds <= MAX_SEEDS:
        raise UsageError(f"--seeds {str(seeds)[:20]} is not from 1 to {MAX_SEEDS}")
    check_model(options, options.proposer or "builtin", options.model)
    gpu = gpu_of(options, devices)
    basis = basis_of(options.measure, gpu, devices)
    name = new_run_id(f"compare-{options.variant}", gpu.name)
    base = with_sketches(spec_of(options, gpu, basis, name), options)
    return Plan(chosen, seeds, base)


def check_model(options: Options, proposer: str, model: str | None) -> None:
    """Raise UsageError when the model cannot be asked: without it there is nothing to compare."""
    from llm_proposer.errors import NotConfigured
    from llm_proposer.session import check_settings

    try:
        check_settings(settings_of(options, proposer, model), os.environ)
    except NotConfigured as error:
        raise UsageError(str(error)) from None


def begin(root: Path, plan: Plan) -> tuple[Path, Plan]:
    """Make the comparison's folder under `root`; its name may get a number. Raises StoreError."""

    def body(base: RunSpec) -> dict[str, Any]:
        return {
            "format": FORMAT, "arms": list(plan.arms), "seeds": plan.seeds,
            "base": codec.to_json(base),
        }  # fmt: skip

    folder, base = begin_folder(root, plan.base, body)
    return folder, replace(plan, base=base)


def read_plan(folder: Path) -> Plan:
    """Read the plan of a comparison. Raises UsageError."""
    try:
        body = codec.parse(read_regular(folder / PLAN).decode())
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise CodecError("its format is another")
        arms = tuple(str(a) for a in body["arms"])
        seeds = body["seeds"]
        if (
            type(seeds) is not int
            or not 1 <= seeds <= MAX_SEEDS
            or not set(arms) <= set(ARMS)
            or len(arms) < 2
        ):
            raise CodecError("arms or seeds are none")
        return Plan(arms, seeds, codec.from_json(RunSpec, body["base"]))
    except OSError as error:
        raise UsageError(f"{folder} is not a comparison's folder: {error.strerror}") from None
    except (UnicodeDecodeError, CodecError, KeyError, TypeError) as error:
        raise UsageError(f"{folder} is not a comparison's folder: {error}") from None


def compare(folder: Path, plan: Plan, options: Options, machine: Machine, say: Say) -> Compared:
    """Run what is missing of the comparison in `folder`, and the final timing.

    Raises MachineError, and NothingFound when no run has a right kernel.
    """
    gpu = gpu_named(plan.base.gpu)
    device = device_index(gpu, machine.devices)
    if plan.base.measure is Basis.MEASURED and device is None:
        raise MachineError(f"{folder} was measured on a {gpu.title}, which is not here")
    with closing(machine.open_workshop(plan.base, gpu, device, workers_of(options))) as bench:
        waiting = 0
        for number, spec in enumerate(plan.runs, start=1):
            told = _run(folder, spec, gpu, bench, options, say)
            waiting += WAITS in told
            say(f"{number}/{len(plan.runs)} {spec.arm} seed {spec.seed}: {told}")
        if waiting:
            replies = plan.base.proposer.removeprefix(BATCH)
            raise NothingFound(
                f"{waiting} runs wait for replies: answer {replies}/requests-*.jsonl, put the "
                f"output file beside it, then tune compare --resume {folder}"
            )
        stores = tuple(RunStore.open(folder / spec.run_id) for spec in plan.runs)
        merged, entrants = _merged(plan, stores)
        if not merged:
            raise NothingFound(f"nothing correct found by any of {len(stores)} runs in {folder}")
        final = _final(folder, plan, stores, merged, entrants, bench, say)
    return Compared(folder, plan, stores, final, entrants)


def _run(
    folder: Path, spec: RunSpec, gpu: GpuSpec, bench: Workshop, options: Options, say: Say
) -> str:
    """Begin a run, go on with it, or leave it when it is done; return one line about it."""
    path = folder / spec.run_id
    there = path.exists()
    with RunStore.open(path, write=True) if there else RunStore.create(folder, spec) as store:
        replay = store.replay()
        if replay.finished is not None and not _may_go_on(spec, replay.finished.reason):
            return f"{replay.history.spent()} programs, done before"
        if there:
            store.append(Resumed(len(replay.history)))
        end = _search(store, spec, run_lanes(spec, gpu), bench.again(spec), options, say)
        history = store.replay().history
        store.append(Finished(end.reason, len(history)))
    if end.reason == "interrupted":
        raise NothingFound(f"interrupted; go on with: tune compare --resume {folder}")
    right = sum(isinstance(r.outcome, Measured) for r in history)
    seconds = sum(r.compile_s + r.judge_s for r in history)
    return (
        f"{history.spent()} programs, {right} right, {seconds:.0f} s of compiling and judging; "
        f"{end.reason}"
    )


def _may_go_on(spec: RunSpec, reason: str) -> bool:
    """Whether a run that ended can be continued: stopped by hand, or short of batch replies."""
    batched = spec.proposer.startswith(BATCH) and spec.arm == "llm"
    return reason in ("interrupted", WAITS) or (batched and reason == NOTHING_MORE)


class _Silent:
    """Nobody watches the single trials of a comparison."""

    def trial(self, record: TrialRecord) -> None:
        """Show nothing."""


def _search(
    store: RunStore, spec: RunSpec, lanes: Sequence[Lane], bench: Workshop, options: Options,
    say: Say,
) -> End:  # fmt: skip
    guide = guided(store, spec, lanes, options, say, sketches=False)
    history = store.replay().history
    try:
        if guide is not None and _waits(guide, spec, lanes, history):
            return End(WAITS)
        for note in bench.facts():
            store.append(note)
        return search(spec, lanes, bench, store, _Silent(), history, guide)
    except KeyboardInterrupt:
        return End("interrupted")
    finally:
        if guide is not None:
            guide.close()


def _waits(guide: ModelGuide, spec: RunSpec, lanes: Sequence[Lane], history: History) -> bool:
    """Whether the run has to be left until somebody brings the first replies."""
    if not spec.proposer.startswith(BATCH) or len(history):
        return False
    return not guide.await_first(list(lanes), history, BATCH_PATIENCE_S)


# ---- the best of each arm, side by side ------------------------------------------------------


def _merged(
    plan: Plan, stores: Sequence[RunStore]
) -> tuple[list[tuple[RunStore, TrialRecord]], dict[tuple[str, Shape], int]]:
    """Gather the best trial of each arm and shape over the seeds, each program once."""
    histories = [(s, s.replay().history) for s in stores]
    merged: list[tuple[RunStore, TrialRecord]] = []
    index: dict[tuple[object, ...], int] = {}
    entrants: dict[tuple[str, Shape], int] = {}
    for arm in plan.arms:
        for shape in plan.base.shapes:
            found = [
                (best[1].median_us, n, store, best[0])
                for n, (store, history) in enumerate(histories)
                if store.spec.arm == arm and (best := history.best(shape)) is not None
            ]
            if found:
                _, _, store, record = min(found, key=lambda f: f[:2])
                key = (record.problem, record.sketch, record.point.key)
                if key not in index:
                    index[key] = len(merged)
                    merged.append((store, replace(record, index=len(merged))))
                entrants[arm, shape] = index[key]
    return merged, entrants


def _final(
    folder: Path,
    plan: Plan,
    stores: Sequence[RunStore],
    merged: Sequence[tuple[RunStore, TrialRecord]],
    entrants: dict[tuple[str, Shape], int],
    bench: Workshop,
    say: Say,
) -> RunStore | None:
    """Time the best of every arm and the peers together, in a run folder of its own."""
    name = f"{plan.base.run_id}-finals"
    records = tuple(r for _, r in merged)
    for path in sorted(folder.glob(f"{name}*")):
        if (known := RunStore.open(path)).replay().finished and (
            known.replay().history.records == records
        ):
            return known
    with RunStore.create(folder, replace(plan.base, run_id=name)) as store:
        spec = store.spec
        for origin, record in merged:
            kernel = stored_kernel(origin, record)
            store.put_kernel(kernel.source, kernel.cubin)
            store.append(record)
        for note in bench.facts():
            store.append(note)
        for finalist in _timed(store, spec, records, entrants, bench.again(spec), say):
            store.append(finalist)
        store.append(Finished("the best of each arm timed together", len(records)))
        return store


def _timed(
    store: RunStore, spec: RunSpec, records: Sequence[TrialRecord],
    entrants: dict[tuple[str, Shape], int], bench: Workshop, say: Say,
) -> Sequence[Finalist]:  # fmt: skip
    history = History(tuple(records))
    if spec.measure is Basis.PREDICTED:
        return unfinished(spec, history)
    shapes: dict[int, list[Shape]] = {}
    for (_, shape), trial in entrants.items():
        if shape not in shapes.setdefault(trial, []):
            shapes[trial].append(shape)
    entries = [Contender(records[n], tuple(found)) for n, found in sorted(shapes.items())]
    try:
        return choose(bench.finals(spec, store, entries))
    except MachineError as error:
        say(f"no final timing: {error}")
        return unfinished(spec, history)
