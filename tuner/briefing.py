"""What is said before the first compile: the card, its limits, the problem, the space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runs.record import Basis, RunSpec
from space.gpu import KIB, GpuSpec
from space.variant import Phase, Shape, variant_named
from tuner.lanes import Lane


@dataclass(frozen=True, slots=True)
class SpaceCount:
    """Configurations of one lane: how many are legal, and why the others are not."""

    sketch: str
    problem: str
    legal: int
    total: int
    pruned: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Briefing:
    """The facts of a run that are fixed before its first trial."""

    run: str
    lines: tuple[tuple[str, str], ...]  #: (subject, fact)
    spaces: tuple[SpaceCount, ...]


def briefing_of(spec: RunSpec, gpu: GpuSpec, lanes: Sequence[Lane], run: str) -> Briefing:
    """Gather what a reader needs to judge the run by."""
    causal = any(s.causal for s in spec.shapes)
    lines = [
        ("variant", _variant(spec)),
        ("card", card(gpu)),
        ("limits", limits(gpu)),
        ("dtype", f"{spec.dtype}, sums in f32"),
        ("shapes", f"{len(spec.shapes)} (B,Hq,Hkv,Sq,Sk,D,Dv; c = causal): {_shapes(spec.shapes)}"),
        ("scale", _scales(spec.shapes)),
        ("sketches", ", ".join(name for name, _ in spec.sketches)),
        ("budget", _budget(spec)),
        ("times", _times(spec, gpu)),
    ]
    if causal:
        lines.insert(5, ("causal", "aligned bottom-right: the last query sees the last key"))
    spaces = tuple(
        SpaceCount(
            lane.sketch,
            lane.problem.key,
            lane.legal.census.legal,
            lane.legal.census.total,
            lane.legal.census.pruned,
        )
        for lane in lanes
    )
    return Briefing(run, tuple(lines), spaces)


def _variant(spec: RunSpec) -> str:
    said = variant_named(spec.variant).described(spec.phase)
    if spec.phase is Phase.PREFILL:
        return f"{spec.variant}: {said}, prefill"
    cache = f"pages of {spec.page} keys" if spec.page else "a cache in one piece"
    return f"{spec.variant}: {said}, decode from {cache}"


def card(gpu: GpuSpec) -> str:
    """Return one line that names the card and its rates."""
    rate = gpu.tensor_tflops
    text = f"{gpu.title} ({gpu.arch}), {gpu.num_sms} SMs at {gpu.clock_ghz:g} GHz, "
    text += f"{rate:g} TFLOP/s 16-bit, {gpu.bandwidth_gbs:g} GB/s"
    if gpu.mma_sync_fraction < 1:
        text += f"; mma.sync reaches about {rate * gpu.mma_sync_fraction:.0f} TFLOP/s of it"
    return text


def limits(gpu: GpuSpec) -> str:
    """Return one line of what bounds a kernel on the card."""
    copies = "cp.async" if gpu.has_cp_async else "no cp.async (copies staged in registers)"
    return (
        f"{gpu.smem_per_block_bytes // KIB} KiB shared memory a block, "
        f"{gpu.registers_per_thread} registers a thread, {gpu.threads_per_sm} threads an SM, "
        f"{', '.join(gpu.dtypes)}, {copies}"
    )


def _shapes(shapes: Sequence[Shape]) -> str:
    keys = [s.key for s in shapes]
    return " ".join(keys) if len(keys) <= 6 else " ".join([*keys[:3], "...", *keys[-2:]])


def _scales(shapes: Sequence[Shape]) -> str:
    scales = {s.head_dim: s.default_scale for s in shapes}
    of = "of the head dim before absorption" if shapes[0].latent else "of the true head dim"
    return f"1/sqrt(D) {of}: " + ", ".join(f"D={d} {scales[d]:.6g}" for d in sorted(scales))


def _budget(spec: RunSpec) -> str:
    text = f"{spec.budget} distinct programs; repeats and pruned points are free"
    return text + (f"; at most {spec.minutes:g} minutes" if spec.minutes else "")


def _times(spec: RunSpec, gpu: GpuSpec) -> str:
    if spec.measure is Basis.MEASURED:
        return f"measured on the {gpu.title} in this machine"
    return f"predicted: kernels are compiled for the {gpu.title} and ranked by an analytic model"
