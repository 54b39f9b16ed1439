"""The main job: from options to a searched, finished and exported run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from llm_proposer.errors import NotConfigured
from llm_proposer.session import open_session
from runs.files import safe_name
from runs.record import (
    Basis,
    Finalist,
    Finished,
    History,
    Measured,
    Note,
    Resumed,
    RunSpec,
)
from runs.store import RunStore, new_run_id
from space.gpu import GpuSpec, gpu_named
from space.params import Point
from space.variant import Phase, Problem
from tuner.briefing import briefing_of
from tuner.drift import remark as drift_remark
from tuner.errors import MachineError, NothingFound, UsageError
from tuner.finish import (
    Contender,
    PeerTimes,
    choose,
    contenders,
    ranked,
    unfinished,
)
from tuner.guide import ModelGuide, model_sketches
from tuner.lanes import Lane, lanes_of
from tuner.loop import Bench, End, common_failure, search
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
from tuner.reference import check_unchanged, examine
from tuner.sketches import check_numbers, sketched_spaces, with_builtin_sketches, with_user_sketch
from tuner.view import View

SHORTLIST = 6  #: predicted points of each problem that are measured first on the real card


class Workshop(Bench, Protocol):
    """A bench that can also time finalists and peers."""

    def facts(self) -> Sequence[Note]:
        """Return what a reader needs to repeat the measurements: versions, clocks, protocol."""

    def peers(self, spec: RunSpec) -> PeerTimes:
        """Time the peers of this machine on every shape."""

    def finals(
        self, spec: RunSpec, store: RunStore, entries: Sequence[Contender]
    ) -> Sequence[Finalist]:
        """Time contenders and peers again, interleaved."""

    def again(self, spec: RunSpec) -> Workshop:
        """Return the same processes for another run; nothing learnt in this one is kept."""

    def close(self) -> None:
        """Stop every process at once."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the main job finds on this machine; tests put their own here."""

    devices: tuple[str, ...]
    open_workshop: Callable[[RunSpec, GpuSpec, int | None, int | None], Workshop]
    export: Callable[[RunStore, Path], Path]


def tune(options: Options, view: View, machine: Machine) -> None:
    """Run the main job. Raises TuneError, SpaceError, TLError or RunError for the user."""
    check_common(options)
    if options.resume is not None:
        _resume(options, view, machine)
    else:
        _begin(options, view, machine)


def _begin(options: Options, view: View, machine: Machine) -> None:
    gpu = gpu_of(options, machine.devices)
    basis = basis_of(options.measure, gpu, machine.devices)
    spec = spec_of(options, gpu, basis, new_run_id(options.variant or "", gpu.name))
    spec = with_sketches(spec, options)
    lanes = run_lanes(spec, gpu)
    if basis is Basis.PREDICTED and options.measure == "auto":
        here = ", ".join(machine.devices) or "no GPU"
        view.note(f"no {gpu.title} here ({here}): times are predicted, not measured")
    if spec.reference is not None:
        view.note(
            f"kernels are checked against {spec.reference.name}; TFLOP/s and predictions count "
            f"what plain attention computes"
        )
    with (
        closing(_workshop(machine, spec, gpu, options)) as bench,
        RunStore.create(options.runs_dir, spec) as store,
    ):
        view.briefing(briefing_of(store.spec, gpu, lanes, str(store.path)))
        _go(store, store.spec, lanes, bench, view, machine, options)


def with_sketches(spec: RunSpec, options: Options) -> RunSpec:
    """Return `spec` with the user's sketch, or the built-in ones. Raises UsageError, TLError."""
    if options.reference is not None:
        from tuner.reference_sketches import with_reference

        return with_reference(spec, options)
    if options.sketch is not None:
        spec = with_user_sketch(spec, options.sketch, options.causal)
        check_numbers(spec)
        return spec
    return with_builtin_sketches(spec)


def _resume(options: Options, view: View, machine: Machine) -> None:
    assert options.resume is not None
    _refuse_changes(options)
    with RunStore.open(options.resume, write=True) as store:
        spec = _renewed(store.spec, options)
        if spec.reference is not None:
            check_unchanged(spec.reference, options.resume)
            examine(spec)
        gpu = gpu_named(spec.gpu)
        present = device_index(gpu, machine.devices) is not None
        if spec.measure is Basis.MEASURED and not present:
            raise MachineError(
                f"{options.resume} was measured on a {gpu.title}, which is not here; "
                f"resume it on a machine that has one"
            )
        if spec.measure is Basis.PREDICTED and basis_of(
            options.measure, gpu, machine.devices
        ) is Basis.MEASURED:  # fmt: skip
            _measure_shortlist(store, spec, gpu, options, view, machine)
            return
        replay = store.replay()
        lanes = run_lanes(
            _with_model_sketches(spec, replay.notes),
            gpu,
            _shortlist_of(replay.notes, options.resume.parent),
        )
        with closing(_workshop(machine, spec, gpu, options)) as bench:
            store.append(Resumed(len(replay.history)))
            view.briefing(briefing_of(spec, gpu, lanes, str(store.path)))
            _go(store, spec, lanes, bench, view, machine, options)


def _measure_shortlist(
    parent: RunStore,
    spec: RunSpec,
    gpu: GpuSpec,
    options: Options,
    view: View,
    machine: Machine,
) -> None:
    """Start a measured run of its own whose first trials are the predicted run's best.

    Measured and predicted times never share a folder.
    """
    name = new_run_id(spec.variant, spec.gpu)
    spec = _with_model_sketches(spec, parent.replay().notes)
    spec = replace(spec, run_id=name, measure=Basis.MEASURED)
    origin = Note("shortlist", (("run", parent.path.name),))
    lanes = run_lanes(spec, gpu, _shortlist_of([origin], parent.path.parent))
    with (
        closing(_workshop(machine, spec, gpu, options)) as bench,
        RunStore.create(parent.path.resolve().parent, spec) as store,
    ):
        store.append(origin)
        view.note(f"{parent.path} was predicted; its shortlist is measured first, in {store.path}")
        view.briefing(briefing_of(store.spec, gpu, lanes, str(store.path)))
        _go(store, store.spec, lanes, bench, view, machine, options)


def _go(
    store: RunStore,
    spec: RunSpec,
    lanes: Sequence[Lane],
    bench: Workshop,
    view: View,
    machine: Machine,
    options: Options,
) -> None:
    """Search, finish and export; the store's journal says where an earlier part stopped."""
    history = store.replay().history
    # the model is asked first of all: what it says comes while peers and first trials run
    # in decode the parts that a model could write otherwise are fixed: it is asked for points alone
    asks = options.sketch is None and spec.phase is Phase.PREFILL
    guide = guided(store, spec, lanes, options, view.note, sketches=asks)
    try:
        for note in bench.facts():
            store.append(note)
        view.start(spec, history)
        if spec.measure is Basis.MEASURED:
            peers = _show_peers(bench, spec, view)
            if guide is not None:
                guide.peers = peers
        end = search(spec, lanes, bench, store, view, history, guide)
    except KeyboardInterrupt:  # before the search or between two of its steps
        end = End("interrupted")
    finally:
        if guide is not None:
            guide.close()
        view.close()
    history = store.replay().history
    view.note(f"stopped: {end.reason}")
    store.append(Finished(end.reason, len(history)))
    if not any(isinstance(r.outcome, Measured) for r in history):
        raise NothingFound(_nothing(history, spec, end, store.path))
    if end.reason == "interrupted":
        view.note("the best so far, by the times of the search alone")
        view.results(spec, history, unfinished(spec, history))
        view.note(f"go on with: tune --resume {store.path}")
        view.files(store.path, None)
        return
    finalists = _finalists(store, spec, history, bench, view)
    for finalist in finalists:
        store.append(finalist)
    view.results(spec, history, finalists)
    view.files(store.path, machine.export(store, store.path / "export"))


def guided(
    store: RunStore,
    spec: RunSpec,
    lanes: Sequence[Lane],
    options: Options,
    say: Callable[[str], None],
    sketches: bool,
) -> ModelGuide | None:
    """Ask the run's model for the first time; None where there is none, which is said."""
    if spec.proposer == "builtin" or spec.arm not in ("", "llm", "assisted"):
        return None
    settings = settings_of(options, spec.proposer, spec.model)
    try:
        model = open_session(settings, store.path, os.environ)
    except NotConfigured as error:
        text = f"the run goes on without the model: {error}"
        say(text)
        store.append(Note("model_said", (("text", text),)))
        return None
    guide = ModelGuide(spec, lanes[0].gpu, model, store, say)
    guide.begin(lanes, store.replay().history, sketches)
    return guide


def _with_model_sketches(spec: RunSpec, notes: Sequence[Note]) -> RunSpec:
    """The specification with the sketches that a model gave to an earlier part of the run."""
    return replace(spec, sketches=(*spec.sketches, *model_sketches(notes)))


def _show_peers(bench: Workshop, spec: RunSpec, view: View) -> tuple[Finalist, ...]:
    try:
        times = bench.peers(spec)
    except MachineError as error:
        view.note(f"peers are not shown: {error}")
        return ()
    view.peers(times.finalists)
    for remark in times.remarks:
        view.note(remark)
    return times.finalists


def _finalists(
    store: RunStore, spec: RunSpec, history: History, bench: Workshop, view: View
) -> Sequence[Finalist]:
    if spec.measure is Basis.PREDICTED:
        return unfinished(spec, history)
    try:
        chosen = choose(bench.finals(spec, store, contenders(spec, store.replay().sound)))
        drift = tuple(n for n in store.replay().notes if n.topic == "drift")
        if (said := drift_remark(drift)) is not None:
            view.note(said)
        return chosen
    except MachineError as error:
        view.note(f"no final timing: {error}; the choice is by the search's own times")
        return unfinished(spec, store.replay().sound)


def run_lanes(
    spec: RunSpec, gpu: GpuSpec, shortlist: Sequence[tuple[Problem, Point]] = ()
) -> tuple[Lane, ...]:
    """Make the run's lanes. Raises UsageError when one has no legal point."""
    lanes = lanes_of(spec, gpu, sketched_spaces(spec, gpu), shortlist)
    for lane in lanes:
        if not len(lane.legal):
            why = ", ".join(f"{name} {count}" for name, count in lane.legal.census.pruned)
            raise UsageError(
                f"no configuration of {lane.problem.key} with sketch {lane.sketch} is legal "
                f"on {gpu.name}; pruned by {why}"
            )
    return lanes


def _shortlist_of(notes: Sequence[Note], folder: Path) -> list[tuple[Problem, Point]]:
    """Return the best predicted points of the run that a note names, best of each problem first."""
    said = [str(n.as_dict().get("run")) for n in notes if n.topic == "shortlist"]
    named = [safe_name(run, "run id") for run in said]
    points: dict[tuple[Problem, str], tuple[Problem, Point]] = {}
    for name in named[:1]:
        parent = RunStore.open(folder / name)
        history = parent.replay().history
        counts: dict[Problem, int] = {}
        per_shape = [ranked(history, shape) for shape in parent.spec.shapes]
        for place in range(SHORTLIST):
            for column in per_shape:
                if place < len(column):
                    record = column[place][0]
                    key = (record.problem, record.point.key)
                    if key not in points and counts.get(record.problem, 0) < SHORTLIST:
                        counts[record.problem] = counts.get(record.problem, 0) + 1
                        points[key] = (record.problem, record.point)
    return list(points.values())


def _workshop(machine: Machine, spec: RunSpec, gpu: GpuSpec, options: Options) -> Workshop:
    return machine.open_workshop(spec, gpu, device_index(gpu, machine.devices), workers_of(options))


def _refuse_changes(options: Options) -> None:
    """Raise UsageError when --resume comes with an option that the run itself fixes."""
    fixed = (
        "variant", "gpu", "dtype", "causal", "sketch", "seed", "proposer", "phase", "backend",
        "model", "page_size", "reference",
    )  # fmt: skip
    for name in fixed:
        if getattr(options, name) is not None:
            flag = name.replace("_", "-")
            raise UsageError(f"--resume takes {flag} from the run; leave --{flag} out")
    if options.scalars:
        raise UsageError("--resume takes scalars from the run; leave --scalar out")
    if options.shapes:
        raise UsageError("--resume takes shapes from the run; leave --shapes out")


def _renewed(spec: RunSpec, options: Options) -> RunSpec:
    """The run's specification with the budget and time of this call."""
    return replace(
        spec,
        budget=spec.budget if options.budget is None else options.budget,
        minutes=spec.minutes if options.minutes is None else options.minutes,
    )


def _nothing(history: History, spec: RunSpec, end: End, run: Path) -> str:
    """Say in one line that nothing was found, why, and how to see it again."""
    if not len(history):
        return f"nothing found: {end.reason} before the first trial"
    cause = end.cause or common_failure(history, at_least=1)
    if cause is None:
        classes = sorted({str(r.outcome.trial_class) for r in history})
        cause = f"{len(history)} trials ended in {', '.join(classes)}"
    first = history.records[0]
    decode = f"--phase decode --page-size {spec.page} " if spec.phase is Phase.DECODE else ""
    point = " ".join(f"-p {n}={v}" for n, v in first.point.items)
    return (
        f"nothing correct found: {cause}. See it again with: tune emit "
        f"{run}/sketches/{first.sketch}.tl --gpu {spec.gpu} --variant {spec.variant} "
        f"--dtype {spec.dtype} {decode}"
        f"--head-dim {first.problem.head_dim},{first.problem.head_dim_v} {point}"
    )
