"""The final timing: the best trials and the peers in turn, so that clocks and heat fall on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from runs.record import Finalist, Rejected, Stage, TrialClass
from space.variant import Problem, Shape
from tuner.evaluate.arena import Bay
from tuner.evaluate.checks import hidden_checks, trial_checks
from tuner.evaluate.clock import Clock, Launcher
from tuner.evaluate.judge import MANY_REPEATS, Judge, Kernel, ask
from tuner.evaluate.launch import LaunchError
from tuner.evaluate.peers import Make, PeerAbsent, Run, start
from tuner.evaluate.timing import SHORT_US, Sample, check_possible, summarise
from tuner.evaluate.verify import compare
from tuner.job import Absent, Entry, FinalsResult

ROUNDS = 25
WARM_ROUNDS = 3
HIDDEN_CHECKS = 8
SHORT_QUERIES = 8  #: at most so many query rows: timed as a graph, as the referee does
PEER_FACTOR = 10.0  #: a peer further than this times plain attention's error is not a peer


def run_finals(
    judge: Judge, problem: Problem, entries: Sequence[Entry], shapes: tuple[Shape, ...], seed: int,
    peers: Mapping[str, Make], rounds: int = ROUNDS,
) -> FinalsResult:  # fmt: skip
    """Check every entry on hidden problems, then time entries and peers, interleaved by shape.

    Device faults are raised.
    """
    kernels: dict[int, Kernel] = {}
    rejected: list[tuple[int, Rejected]] = []
    checks = (*trial_checks(problem), *hidden_checks(problem, seed + 1, HIDDEN_CHECKS))
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
    arena = judge.arena(shapes, problem.dtype, seed)
    for shape in shapes:
        bay = arena.bay(shape)
        ours: dict[str, Launcher] = {}
        trials: dict[str, int] = {}
        for entry in entries:
            if shape not in entry.shapes or entry.trial not in kernels:
                continue
            launch = _enter(kernels[entry.trial], bay)
            if isinstance(launch, Rejected):
                rejected.append((entry.trial, launch))
                continue
            name = f"trial {entry.trial}"
            ours[name], trials[name] = launch, entry.trial
        bay.fill(0)
        theirs = _present(peers, bay, absent)
        samples = interleave(_short({**ours, **theirs}, shape, judge.clock), judge.clock, rounds)
        for name, sample in samples.items():
            trial = trials.get(name)
            if trial is not None and judge.gpu is not None:
                impossible = check_possible(sample, shape, problem.dtype, judge.gpu)
                if impossible is not None:
                    rejected.append((trial, impossible))
                    continue
            finalists.append(Finalist(shape, trial, name, sample.timing(shape)))
    for kernel in kernels.values():
        kernel.unload()
    return FinalsResult(tuple(finalists), tuple(absent), tuple(rejected))


def _enter(kernel: Kernel, bay: Bay) -> Launcher | Rejected:
    """Check a kernel on both data sets of the shape and return its launch."""
    bay.fill(0)
    for data_set in range(len(bay.exams)):
        verdict = ask(kernel.prepare, bay, data_set)
        if isinstance(verdict, Rejected):
            return verdict
    inputs = bay.slots[0]
    return kernel.prepare(*inputs.tensors, bay.output.tensor, inputs.scale)


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
    calls: Mapping[str, Callable[[], object]], clock: Clock, rounds: int
) -> dict[str, Sample]:
    """Time every call once a round, each round starting with another; drop the warm rounds."""
    names = list(calls)
    order = [
        names[(i + r) % len(names)] for r in range(rounds + WARM_ROUNDS) for i in range(len(names))
    ]
    times: dict[str, list[float]] = {n: [] for n in names}
    for name, us in zip(order, clock.windows_us([calls[n] for n in order]), strict=True):
        times[name].append(us)
    return {n: summarise(t[WARM_ROUNDS:]) for n, t in times.items()}
