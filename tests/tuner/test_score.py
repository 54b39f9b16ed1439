"""What a trial is worth: rates by phase, and which shapes are the short ones."""

from __future__ import annotations

import pytest

from runs.record import Basis, Measured, Timing
from space.gpu import gpu_named
from space.variant import DType, Phase, Shape
from tuner.score import floor_us, focus_losses, gigabytes, rate, unit

H200 = gpu_named("h200")


def timing(shape: Shape, over_floor: float) -> Timing:
    us = floor_us(shape, DType.BF16, H200) * over_floor
    return Timing(shape, us, us, us, 9, Basis.MEASURED)


def test_decode_is_told_by_its_bytes() -> None:
    shape = Shape(64, 32, 8, 1, 4096, 128, 128)
    (told,) = (timing(shape, 1.0),)
    assert rate(told, Phase.DECODE, DType.BF16) == pytest.approx(H200.bandwidth_gbs)
    keys_and_values = 64 * 4096 * 8 * 2 * 128 * 2  # bytes
    queries_and_outputs = 64 * 32 * 2 * 128 * 2
    moved = keys_and_values + queries_and_outputs
    assert gigabytes(Timing(shape, 100.0, 99.0, 101.0, 9, Basis.MEASURED), DType.BF16) == (
        pytest.approx(moved / 100e-6 / 1e9)
    )
    assert (unit(Phase.DECODE), unit(Phase.PREFILL)) == ("GB/s", "TFLOP/s")
    assert rate(told, Phase.PREFILL, DType.BF16) < 0.1 * H200.tensor_tflops


def test_short_caches_of_large_batches_are_long_problems() -> None:
    near, far = 1.5, 3.0
    shapes = {
        Shape(1, 32, 8, 1, 4096, 128, 128): near,
        Shape(1, 32, 8, 1, 32768, 128, 128): near,
        Shape(64, 32, 8, 1, 4096, 128, 128): far,
        Shape(128, 32, 8, 1, 4096, 128, 128): far,
    }
    outcome = Measured(tuple(timing(s, t) for s, t in shapes.items()), 1.0)
    losses = focus_losses(outcome, DType.BF16, H200, 3)
    assert losses is not None
    _, short, long = losses
    assert short < long
