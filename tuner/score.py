"""What a trial is worth: its times against the floor that the hardware sets."""

from __future__ import annotations

import math
from dataclasses import replace

from runs.record import Measured, Outcome, Timing
from space.gpu import GpuSpec
from space.variant import DECODE_QUERIES_MAX, DType, Phase, Shape, flops, io_bytes


def floor_us(shape: Shape, dtype: DType, gpu: GpuSpec) -> float:
    """Return the least time the datasheet allows: of all FLOPs or all bytes, the longer."""
    compute = flops(shape) / (gpu.tensor_tflops * 1e6)
    memory = io_bytes(shape, dtype) / (gpu.bandwidth_gbs * 1e3)
    return max(compute, memory)


def tflops(timing: Timing) -> float:
    """Return the rate over visible pairs, in TFLOP/s."""
    return flops(timing.shape) / timing.median_us / 1e6


def gigabytes(timing: Timing, dtype: DType) -> float:
    """Return the rate over what must pass through device memory, in GB/s."""
    return io_bytes(timing.shape, dtype) / timing.median_us / 1e3


def rate(timing: Timing, phase: Phase, dtype: DType) -> float:
    """Return the rate that a reader of a phase looks for; `unit` names it."""
    return gigabytes(timing, dtype) if phase is Phase.DECODE else tflops(timing)


def unit(phase: Phase) -> str:
    """Return the unit of `rate`: decode is bound by memory, prefill by products."""
    return "GB/s" if phase is Phase.DECODE else "TFLOP/s"


def loss(outcome: Outcome, dtype: DType, gpu: GpuSpec) -> float | None:
    """Return the mean log of time over floor, or None when the kernel was not right.

    Its exponential is the geometric mean over the shapes, so a long shape does not outweigh
    the others.
    """
    if not isinstance(outcome, Measured) or not outcome.timings:
        return None
    logs = [math.log(t.median_us / floor_us(t.shape, dtype, gpu)) for t in outcome.timings]
    return sum(logs) / len(logs)


def focus_count(shapes: int) -> int:
    """Return how many foci a search of a problem with so many shapes has."""
    return 3 if shapes >= 4 else 1


def _length(shape: Shape) -> int:
    """What parts short problems from long ones: keys, for few queries those of the whole batch."""
    few = shape.seqlen_q <= DECODE_QUERIES_MAX
    return shape.seqlen_k * (shape.batch * shape.kv_heads if few else 1)


def focus_losses(
    outcome: Outcome, dtype: DType, gpu: GpuSpec, foci: int
) -> tuple[float, ...] | None:
    """Return the loss over all shapes and, with three foci, over the shorter and the longer half.

    A kernel that was not timed on all shapes counts with those it was timed on. None when it was
    not right.
    """
    mean = loss(outcome, dtype, gpu)
    if mean is None or not isinstance(outcome, Measured):
        return None
    if foci == 1:
        return (mean,)
    ordered = sorted(outcome.timings, key=lambda t: (_length(t.shape), t.shape.key))
    half = len(ordered) // 2
    parts = (tuple(ordered[:half]), tuple(ordered[half:]))
    of_parts = [loss(replace(outcome, timings=part), dtype, gpu) for part in parts]
    return (mean, *(mean if x is None else x for x in of_parts))
