"""The final timing: the best trials and the peers in turn, so that clocks and heat fall on all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from runs.record import Finalist, Rejected, Stage, TrialClass
from space.variant import Problem, Shape
from tuner.evaluate.arena import Bay
from tuner.evaluate.checks import hidden_checks, neighbour_checks, trial_checks
from tuner.evaluate.clock import Clock, Launcher
from tuner.evaluate.conditions import Conditions
from tuner.evaluate.freshness import check_call, redraw
from tuner.evaluate.judge import COOL_S, COOL_TRIES, MANY_REPEATS, Judge, Kernel, ask
from tuner.evaluate.launch import LaunchError
from tuner.evaluate.peers import Make, PeerAbsent, Run, start
from tuner.evaluate.splits import multiprocessors, with_splits
from tuner.evaluate.timing import SHORT_US, Sample, check_possible, check_stream, summarise
from tuner.evaluate.verify import check_whole, compare, grade
from tuner.evaluate.witness import Witness
from tuner.job import Absent, Entry, FinalsResult, Reading

ROUNDS = 25
WARM_ROUNDS = 3
HIDDEN_CHECKS = 8
NEIGHBOUR_SCORES = 1 << 29  #: finalists are asked one past the tuned shapes up to 16k by 16k
SHORT_QUERIES = 8  #: at most so many query rows: timed as a graph, as the referee does
PEER_FACTOR = 10.0  #: a peer further than this times plain attention's error is not a peer


class Meter(Protocol):
    """Reads the state of the card."""

    def read(self) -> Conditions | None: ...
    def overheated(self) -> bool: ...


def run_finals(
    judge: Judge, problem: Problem, entries: Sequence[Entry], shapes: tuple[Shape, ...], seed: int,
    peers: Mapping[str, Make], rounds: int = ROUNDS, meter: Meter | None = None,
) -> FinalsResult:  # fmt: skip
    """Check every entry on hidden problems, then time entries and peers, interleaved by shape.

    Device faults are raised.
    """
    kernels: dict[int, Kernel] = {}
    sources = {entry.trial: entry.source for entry in entries}
    sms = multiprocessors(judge.device, judge.gpu)
    rejected: list[tuple[int, Rejected]] = []
    checks = (
        *judge.races(problem),
        *trial_checks(problem),
        *hidden_checks(problem, seed + 1, HIDDEN_CHECKS),
        *neighbour_checks(problem, shapes, NEIGHBOUR_SCORES),
    )
    judge.clock.tampered()  # what an earlier kernel left is none of these'
    for entry in entries:
        try:
            kernel = judge.load(entry.source, entry.image, judge.device)
        except LaunchError as error:
            reason = Rejected(TrialClass.LAUNCH_FAILED, Stage.LAUNCH, str(error))
            rejected.append((entry.trial, reason))
            continue
        verdict = judge.check(kernel.prepare, problem, checks, MANY_REPEATS)
        if isinstance(verdict, Rejected):
            rejected.append((entry.trial, verdict))
            kernel.unload()
        else:
            kernels[entry.trial] = kernel
    finalists: list[Finalist] = []
    absent: list[Absent] = []
    readings: list[Reading] = []
    arena = judge.arena(shapes, problem.dtype, seed, problem.page)
    for shape in shapes:
        bay = arena.bay(shape)
        ours: dict[str, Launcher] = {}
        trials: dict[str, int] = {}
        witness = Witness(bay.output)
        for entry in entries:
            if shape not in entry.shapes or entry.trial not in kernels:
                continue
            name = f"trial {entry.trial}"
            launch = _enter(kernels[entry.trial], bay, judge.clock, name, witness)
            if isinstance(launch, Rejected):
                rejected.append((entry.trial, launch))
                continue
            ours[name], trials[name] = launch, entry.trial
        bay.fill(0)
        theirs = _present(peers, bay, absent)
        calls = _short({**ours, **theirs}, shape, judge.clock)
        samples, reading = _timed(calls, judge.clock, rounds, meter, shape, witness.look)
        if reading is not None:
            readings.append(reading)
        for name, sample in samples.items():
            trial = trials.get(name)
            if trial is not None and (
                doubt := witness.against(name, f"timed shape {shape.key}")
                or _disbelieved(calls[name], sample, bay, problem, judge)
            ):
                rejected.append((trial, doubt))
                continue
            timing = sample.timing(shape)
            if trial is not None:
                timing = with_splits(timing, sources[trial], sms, problem.page)
            finalists.append(Finalist(shape, trial, name, timing))
    for kernel in kernels.values():
        kernel.unload()
    return FinalsResult(tuple(finalists), tuple(absent), tuple(rejected), readings=tuple(readings))


def _timed(
    calls: Mapping[str, Launcher], clock: Clock, rounds: int, meter: Meter | None, shape: Shape,
    before: Callable[[str | None], object],
) -> tuple[dict[str, Sample], Reading | None]:  # fmt: skip
    """Interleave the calls, again after a pause while the card is too hot, and read its state."""
    seen: list[Conditions] = []

    def look() -> None:
        if meter is not None and (state := meter.read()) is not None:
            seen[:] = [state]

    samples = interleave(calls, clock, rounds, look, before)
    redone = 0
    while meter is not None and meter.overheated() and redone < COOL_TRIES:
        time.sleep(COOL_S)
        redone += 1
        samples = interleave(calls, clock, rounds, look, before)
    if not seen or not calls:
        return samples, None
    (now,) = seen
    return samples, Reading(
        shape, now.sm_clock_mhz, now.memory_clock_mhz, now.temperature_c, now.power_w,
        ", ".join(now.throttle), redone,
    )  # fmt: skip


def _enter(
    kernel: Kernel, bay: Bay, clock: Clock, name: str, witness: Witness
) -> Launcher | Rejected:
    """Check a kernel on both data sets of the shape, and its stream, and return its launch.

    What it gives for the data that is timed is shown to the witness.
    """
    bay.fill(0)
    for data_set in range(len(bay.exams)):
        verdict = ask(kernel.prepare, bay, data_set)
        if isinstance(verdict, Rejected):
            return verdict
        if data_set == 0:
            witness.remember(name)
    if (wrong := check_whole(bay.exams[-1])) is not None:
        return wrong
    inputs = bay.slots[0]
    launch = inputs.given_to(kernel.prepare, bay.output.tensor)
    place = f"timed shape {bay.shape.key}"
    aside = check_stream(launch, clock, place)
    if aside is None and (left := clock.tampered()) is not None:
        aside = Rejected(TrialClass.TIMING_INVALID, Stage.TIME, f"{place}: {left}")
    return launch if aside is None else aside


def _disbelieved(
    call: Launcher, sample: Sample, bay: Bay, problem: Problem, judge: Judge
) -> Rejected | None:
    """Return why a trial's final time cannot be: too fast for the card, or on known data only.

    It is launched as it was timed: on an output that is spoiled, not poisoned.
    """
    if judge.gpu is not None:
        plain = judge.function is None
        impossible = check_possible(sample, bay.shape, problem.dtype, judge.gpu, plain)
        if impossible is not None:
            return impossible
    bay.fill(0)
    bay.output.poison()
    bay.output.spoil()
    judge.clock.windows_us([call])
    as_timed = grade(bay.exams[0])
    if isinstance(as_timed, Rejected):
        return replace(as_timed, stage=Stage.TIME)
    return check_call(call, 1, bay, judge.clock, sample, fresh=redraw)


def _present(peers: Mapping[str, Make], bay: Bay, absent: list[Absent]) -> dict[str, Run]:
    """Return the peers that give the right answer on this shape; the others go to `absent`."""
    found: dict[str, Run] = {}
    for name, make in peers.items():
        try:
            run, out = start(make, bay.slots[0])
            _check_peer(out, bay)
        except PeerAbsent as missing:
            absent.append(Absent(bay.shape, name, str(missing)))
        else:
            found[name] = run
    return found


def _check_peer(out: torch.Tensor, bay: Bay) -> None:
    for part in bay.exams[0].expected:
        verdict = compare(out[part.index], part, "peer", PEER_FACTOR)
        if isinstance(verdict, Rejected):
            raise PeerAbsent(f"wrong on this shape: {verdict.reason}")


def _short(calls: dict[str, Launcher], shape: Shape, clock: Clock) -> dict[str, Launcher]:
    """Replace calls by graphs where the host's part would show."""
    if not calls:
        return calls
    quickest = min(min(clock.windows_us([call] * 3)[1:]) for call in calls.values())
    if shape.seqlen_q > SHORT_QUERIES and quickest >= SHORT_US:
        return calls
    return {name: _graphed(call, clock) for name, call in calls.items()}


def _graphed(call: Launcher, clock: Clock) -> Launcher:
    try:
        return clock.graphed([call])
    except RuntimeError:  # some peers allocate or synchronise: theirs is timed as it is
        return call


def interleave(
    calls: Mapping[str, Callable[[], object]], clock: Clock, rounds: int,
    during: Callable[[], object] | None = None,
    before: Callable[[str | None], object] | None = None,
) -> dict[str, Sample]:  # fmt: skip
    """Time every call once a round, each round starting with another; drop the warm rounds.

    `during` is called once while the device is at work. `before` is called ahead of each window,
    and once after the last, with the name of the window before.
    """
    names = list(calls)
    order = [
        names[(i + r) % len(names)] for r in range(rounds + WARM_ROUNDS) for i in range(len(names))
    ]
    times: dict[str, list[float]] = {n: [] for n in names}
    done: Iterator[str | None] = iter((None, *order))
    ahead = None if before is None else lambda: before(next(done))
    windows = clock.windows_us([calls[n] for n in order], during, ahead)
    if ahead is not None:
        ahead()
    for name, us in zip(order, windows, strict=True):
        times[name].append(us)
    return {n: summarise(t[WARM_ROUNDS:]) for n, t in times.items()}
