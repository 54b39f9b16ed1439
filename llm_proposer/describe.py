"""Problems, cards, parameters and trials in words: what a model is told about a search."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from runs.record import Basis, Finalist, History, Measured, Rejected, TrialRecord
from space.constraints import constraints_of, is_hopper, smem_bytes, violated
from space.gpu import KIB, GpuSpec
from space.params import Point, Space
from space.variant import Phase, Problem, Shape, flops, variant_named

ROWS = 40  #: trials shown at most, the fastest and then the newest
FAILURES = 12  #: kinds of failure shown at most
REASON_CHARS = 160

#: What each predicate of `space` asks for, by its name.
RULES = {
    "rows_per_warp": "BM / warps is 16, 32, 48 or 64",
    "atom_divides_keys": "BN is a multiple of 16",
    "fits_smem": "the tiles fit the shared memory of a block",
    "fits_registers": "accumulators fit the registers of a thread",
    "fits_sm": "blocks_per_sm blocks fit the shared memory, threads and registers of an SM",
    "warp_grid": "column_warps divides warps; BM * column_warps / warps is 16, 32 or 64",
    "columns_shared": "BN and V's head dim are multiples of 8 * column_warps; of swizzle and the "
    "bytes of V's row for each column warp one divides the other",
    "columns_of_warpgroups": "consumer_warpgroups = 2 where V is part of K, else 1",
    "tiles_of_pages": "of BN and the page size one is a multiple of the other",
    "fits_combine": "combine_groups * V's head dim / 4 is at most 1024",
    "rows_per_warpgroup": "BM = 64 * consumer_warpgroups",
    "takes_effect": "no switch is set that could do nothing",
    "walks_in_pairs": "cluster = 2 needs persistent = 0 or 1",
    "packs_columns": "a swizzle below 128 needs a head dim that fills fewer columns with it",
    "turns_end": "skip = 1 with pingpong = 1 and overlap = 1 needs stages >= 2",
    "rows_stay": "q_in_registers = 1 with overlap = 0 needs BN other than the head dim",
    "out_over_rows": "out_buffer = 0 needs a head dim of V no larger than that of Q",
}

#: What Hopper's switches need in order to do something: the details of `takes_effect`.
_NEEDS = {
    "pingpong": "pingpong = 1 needs consumer_warpgroups > 1",
    "skip": "skip = 1 needs consumer_warpgroups > 1",
    "integer_max": "integer_max = 1 needs rescale_threshold > 0",
    "q_stages": "q_stages = 2 needs persistent > 0",
}


def problem_text(problem: Problem, shapes: Iterable[Shape]) -> str:
    """Describe what is computed and on which shapes."""
    dims = f"head dim {problem.head_dim}"
    if problem.head_dim != problem.head_dim_v:
        dims = f"head dim {problem.head_dim} for Q and K, {problem.head_dim_v} for V and O"
    mask = "causal" if problem.causal else "not causal"
    description = variant_named(problem.variant).described(problem.phase)
    lines = [f"{description}; {problem.dtype}; {dims}; {mask}."]
    if problem.phase is Phase.DECODE:
        lines += _decode_lines(problem)
    served = [s for s in shapes if problem.serves(s)]
    if served:
        lines.append("Shapes (batch, query heads, K/V heads, query length, key length):")
        lines += [
            f"  {s.batch}, {s.heads}, {s.kv_heads}, {s.seqlen_q}, {s.seqlen_k}" for s in served
        ]
    return "\n".join(lines)


def _decode_lines(problem: Problem) -> list[str]:
    """What is different where a few queries meet a long cache."""
    cache = f"in pages of {problem.page} keys" if problem.page else "in one piece"
    lines = [
        f"Decode: a few queries against a long cache {cache}, so memory is the limit. The query "
        "heads of a K/V head are rows of one tile, the keys are split over blocks, and a second "
        "kernel combines the parts."
    ]
    if problem.latent:
        lines.append(
            f"V is the first {problem.head_dim_v} columns of K, which is loaded once for both."
        )
    return lines


def gpu_text(gpu: GpuSpec) -> str:
    """Describe the limits and rates of a card."""
    return (
        f"{gpu.title} (sm_{gpu.sm}): {gpu.num_sms} SMs; {gpu.smem_per_block_bytes // KIB} KiB of "
        f"shared memory a block, {gpu.smem_per_sm_bytes // KIB} KiB an SM; "
        f"{gpu.registers_per_sm} registers an SM, {gpu.registers_per_thread} a thread; "
        f"{gpu.threads_per_sm} threads an SM; {gpu.tensor_tflops:g} TFLOP/s of 16-bit products; "
        f"{gpu.bandwidth_gbs:g} GB/s; {gpu.l2_bytes >> 20} MiB of L2; "
        f"{gpu.mufu_per_clock_per_sm} exponentials a clock and SM."
    )


def space_text(space: Space) -> str:
    """List the parameters: name, choices, meaning."""
    return "\n".join(
        f"  {p.name} in {{{', '.join(map(str, p.choices))}}}: {p.meaning}" for p in space.params
    )


def rules_text(space: Space) -> str:
    """List what a legal configuration satisfies."""
    lines = [_rule(c.name) for c in constraints_of(space.names)]
    if "consumer_warpgroups" in space.names:
        lines += [text for name, text in _NEEDS.items() if name in space.names]
    return "\n".join(f"  {line}" for line in lines)


def _rule(name: str) -> str:
    return RULES.get(name, name.replace("_", " "))


def point_text(point: Point) -> str:
    """Return a point in full."""
    return ", ".join(f"{n}={v}" for n, v in point.items)


def change_text(point: Point, base: Point) -> str:
    """Return what a point changes of `base`."""
    before = base.as_dict()
    changed = [f"{n}={v}" for n, v in point.items if before.get(n) != v]
    return " ".join(changed) or "(base)"


def memory_text(problem: Problem, gpu: GpuSpec, space: Space, base: Point) -> str:
    """Say how much shared memory `base` takes, and which single changes of it are not legal."""
    there = gpu.smem_per_block_bytes
    lines = [f"The base takes {smem_bytes(problem, base)} of {there} bytes of shared memory."]
    barred = []
    for param in space.params:
        for choice in param.choices:
            point = base.replace(**{param.name: choice})
            if choice != base[param.name] and (found := violated(problem, point, gpu)) is not None:
                barred.append(f"  {param.name}={choice}: {found[1]}")
    if barred:
        lines += ["Not legal as the only change of the base:", *barred]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Subject:
    """One search: a dataflow, for one problem, on one card."""

    sketch: str  #: name of the sketch
    text: str  #: its TL
    problem: Problem
    gpu: GpuSpec
    space: Space
    shapes: tuple[Shape, ...]
    #: what proposals are differences against while nothing is right; the first seed for None
    start: Point | None = None

    def trials(self, history: History) -> tuple[TrialRecord, ...]:
        """Return the trials of this search in a space with these parameters."""
        return tuple(
            r
            for r in history
            if (r.sketch, r.problem) == (self.sketch, self.problem)
            and {n for n, _ in r.point.items} == set(self.space.names)
        )


def ranked(trials: Sequence[TrialRecord]) -> list[tuple[float, TrialRecord]]:
    """Return the right trials, fastest first, with their time over the best of each shape.

    The ratio is a geometric mean over the shapes, so long shapes do not outweigh the others.
    """
    best: dict[Shape, float] = {}
    right = [(r, r.outcome) for r in trials if isinstance(r.outcome, Measured)]
    for _, outcome in right:
        for t in outcome.timings:
            best[t.shape] = min(best.get(t.shape, math.inf), t.median_us)
    found = []
    for record, outcome in right:
        logs = [math.log(t.median_us / best[t.shape]) for t in outcome.timings]
        if logs:
            found.append((math.exp(sum(logs) / len(logs)), record))
    return sorted(found, key=lambda f: (f[0], f[1].index))


def trials_text(trials: Sequence[TrialRecord], base: Point) -> str:
    """List trials as changes of the base, with their time over the best, then the failures."""
    right = ranked(trials)
    lines = []
    if right:
        basis = _basis(right[0][1])
        lines.append(
            f"Right kernels ({basis}): time over the best, geometric mean of the shapes; change"
        )
        lines += [f"  {ratio:.3f}  {change_text(r.point, base)}" for ratio, r in right[:ROWS]]
        if len(right) > ROWS:
            lines.append(f"  ({len(right) - ROWS} slower ones are left out)")
    lines += _failures(trials, base)
    return "\n".join(lines) or "No trial has ended yet."


def _failures(trials: Sequence[TrialRecord], base: Point) -> list[str]:
    """Failures grouped by class and reason, each with up to four of the changes that met it."""
    groups: dict[tuple[str, str], list[str]] = {}
    for record in trials:
        if isinstance(record.outcome, Rejected):
            key = (record.outcome.trial_class.value, _head(record.outcome.reason))
            groups.setdefault(key, []).append(change_text(record.point, base))
    if not groups:
        return []
    lines = ["Failures: how and why; with which changes"]
    for (name, reason), changes in sorted(groups.items(), key=lambda g: -len(g[1]))[:FAILURES]:
        shown = "; ".join(changes[:4]) + (
            f"; and {len(changes) - 4} more" if len(changes) > 4 else ""
        )
        lines.append(f"  {name}: {reason} [{shown}]")
    if len(groups) > FAILURES:
        lines.append(f"  ({len(groups) - FAILURES} rarer kinds are left out)")
    return lines


def shapes_text(
    subject: Subject, trials: Sequence[TrialRecord], peers: Sequence[Finalist], base: Point
) -> str:
    """For each shape: the best time, which change gave it, and the best peer beside it."""
    history = History(tuple(trials))
    lines = []
    for shape in subject.shapes:
        if not subject.problem.serves(shape):
            continue
        best = history.best(shape)
        rival = min(
            (p for p in peers if p.shape == shape and p.trial is None),
            key=lambda p: p.timing.median_us,
            default=None,
        )
        if best is None and rival is None:
            continue
        parts = [f"  {shape.key}:"]
        if best is not None:
            record, timing = best
            parts.append(
                f"{timing.median_us:.1f} us, {_tflops(shape, timing.median_us):.0f} TFLOP/s "
                f"by {change_text(record.point, base)}"
            )
        if rival is not None:
            us = rival.timing.median_us
            parts.append(f"| best peer {rival.name} {us:.1f} us, {_tflops(shape, us):.0f} TFLOP/s")
        lines.append(" ".join(parts))
    return "\n".join(lines)


def base_of(subject: Subject, history: History, default: Point) -> Point:
    """Return the point that proposals are differences against: the best so far, or `default`."""
    right = ranked(subject.trials(history))
    return right[0][1].point if right else default


def known_points(trials: Iterable[TrialRecord]) -> Mapping[str, str]:
    """Return how each tried point ended, by its key."""
    return {r.point.key: f"trial {r.index} ({r.outcome.trial_class})" for r in trials}


def backend_text(base: Point) -> str:
    """Say in one line what kind of kernel the parameters belong to."""
    if is_hopper(base):
        return (
            "Kernels here are Hopper's: a producer warpgroup loads by TMA, consumer warpgroups "
            "compute by wgmma with P in registers, O leaves by TMA."
        )
    return "Kernels here use warp-level MMA (mma.sync) and copies by all threads."


def _basis(record: TrialRecord) -> str:
    outcome = record.outcome
    predicted = isinstance(outcome, Measured) and outcome.timings[0].basis is Basis.PREDICTED
    return "predicted by a model, not measured" if predicted else "measured"


def _tflops(shape: Shape, us: float) -> float:
    return flops(shape) / us / 1e6


def _head(reason: str) -> str:
    line = next((x for x in reason.strip().splitlines() if x.strip()), "no reason given")
    return line if len(line) <= REASON_CHARS else line[: REASON_CHARS - 3] + "..."
