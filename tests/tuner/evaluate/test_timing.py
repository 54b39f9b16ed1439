"""Sampling with a scripted clock: adaptive counts, hopeless candidates, intervals, roofline."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence

import pytest
from scripted_clock import ScriptedClock

from runs.record import Basis, TrialClass
from space.gpu import gpu_named
from space.variant import DType, Shape
from tuner.evaluate.clock import Batch, Launcher
from tuner.evaluate.timing import (
    Plan,
    Sample,
    check_possible,
    check_stream,
    measure,
    measure_replays,
    roofline_us,
    summarise,
    warm_up,
)

H200 = gpu_named("h200")
LONG = Shape(1, 16, 16, 16384, 16384, 128, 128)


def slots(clock: ScriptedClock, *us: float) -> list[Launcher]:
    return [clock.call(f"slot {i}", t) for i, t in enumerate(us)]


def test_long_kernel_gets_the_fewest_samples() -> None:
    clock = ScriptedClock()
    sample = measure(slots(clock, 6500.0), clock)
    assert sample == Sample(6500.0, 6500.0, 6500.0, 5)
    assert len(clock.log) == 6  # and one window that is dropped


def test_middling_kernel_gets_the_most_samples() -> None:
    clock = ScriptedClock()
    assert measure(slots(clock, 200.0), clock).count == 15


def test_first_window_after_a_wait_is_dropped() -> None:
    clock = ScriptedClock(first_factor=0.5)
    assert measure(slots(clock, 6500.0), clock, Plan(max_samples=5)).low_us >= 3250.0
    assert measure(slots(clock, 6500.0), clock).median_us == 6500.0


def test_hopeless_candidate_gets_two_windows() -> None:
    clock = ScriptedClock()
    sample = measure(slots(clock, 6500.0), clock, best_us=4000.0)
    assert sample.count == 2
    assert len(clock.log) == 3
    assert sample.median_us == 6500.0


def test_candidate_near_the_best_is_timed_in_full() -> None:
    clock = ScriptedClock()
    assert measure(slots(clock, 6500.0), clock, best_us=5000.0).count == 5


def test_short_kernel_is_timed_as_a_graph_over_rotating_inputs() -> None:
    clock = ScriptedClock()
    sample = measure(slots(clock, 4.0, 4.0, 4.0), clock)
    assert sample.median_us == pytest.approx(4.0)
    assert clock.graphs == [50]
    assert {"slot 0", "slot 1", "slot 2"} <= set(clock.log[-50:])


def test_replays_have_a_window_each_and_many_of_them() -> None:
    clock = ScriptedClock()
    sample = measure_replays(slots(clock, 4.0, 4.0, 4.0), clock)
    assert sample == Sample(4.0, 4.0, 4.0, 45)
    assert clock.graphs == [1, 1]
    assert len(clock.log) == 46  # and one window that is dropped
    assert set(clock.log) == {"slot 0", "slot 1"}
    assert clock.log[-1] == "slot 0"


def test_long_replays_end_with_the_time_they_may_take() -> None:
    clock = ScriptedClock()
    assert measure_replays(slots(clock, 960.0), clock).count == 12
    assert measure_replays(slots(clock, 6500.0), clock).count == 5


def test_hopeless_replays_get_two_windows() -> None:
    clock = ScriptedClock()
    assert measure_replays(slots(clock, 9.0), clock, best_us=4.0).count == 2


def test_roofline_of_a_latent_cache_reads_it_once() -> None:
    shape = Shape(16, 16, 1, 1, 4096, 576, 512)
    read = 16 * (4096 + 16) * 576 * 2
    assert roofline_us(shape, DType.BF16, H200) == pytest.approx(read / 4.8e6, rel=1e-3)
    assert check_possible(Sample(12.0, 12.0, 12.0, 9), shape, DType.BF16, H200) is not None
    assert check_possible(Sample(24.0, 24.0, 24.0, 9), shape, DType.BF16, H200) is None


@pytest.mark.parametrize("us", [4.0, 100.0, 6500.0])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_last_launch_is_slot_0(us: float, count: int) -> None:
    clock = ScriptedClock()
    measure(slots(clock, *[us] * count), clock)
    assert clock.log[-1] == "slot 0"


def test_warm_up_is_by_time() -> None:
    clock = ScriptedClock()
    warm_up(clock.call("k", 1000.0), clock, Plan(warmup_us=20_000.0))
    assert len(clock.log) == 21


def test_median_and_interval_of_order_statistics() -> None:
    sample = summarise([float(n) for n in range(1, 26)])
    assert (sample.median_us, sample.low_us, sample.high_us) == (13.0, 8.0, 18.0)
    assert summarise([3.0, 1.0, 2.0]) == Sample(2.0, 1.0, 3.0, 3)


def test_interval_covers_the_true_median_19_times_in_20() -> None:
    rng = random.Random(5)
    hits = 0
    for _ in range(2000):
        sample = summarise([rng.lognormvariate(0, 0.3) for _ in range(25)])
        hits += sample.low_us <= 1.0 <= sample.high_us
    assert hits / 2000 > 0.94


def test_timing_is_called_measured() -> None:
    timing = Sample(2.0, 1.0, 3.0, 9).timing(LONG)
    assert timing.basis is Basis.MEASURED
    assert (timing.shape, timing.samples) == (LONG, 9)


def test_roofline_is_flops_or_bytes() -> None:
    flops = 2 * 16 * 16384 * 16384 * 256
    assert roofline_us(LONG, DType.BF16, H200) == pytest.approx(flops / 989e6)
    decode = Shape(64, 32, 8, 1, 4096, 128, 128)
    read = (64 * 32 * 128 + 64 * 4096 * 8 * 256) * 2
    assert roofline_us(decode, DType.BF16, H200) == pytest.approx(read / 4800e3)


def test_faster_than_the_hardware_is_impossible() -> None:
    fast = check_possible(Sample(1900.0, 1890.0, 1910.0, 5), LONG, DType.BF16, H200)
    assert fast is not None
    assert fast.trial_class is TrialClass.IMPOSSIBLE_TIME
    assert "1900.00 us measured" in fast.reason and "989 TFLOP/s" in fast.reason
    assert check_possible(Sample(2900.0, 2890.0, 2910.0, 5), LONG, DType.BF16, H200) is None


@pytest.mark.parametrize("us", [0.0, -1.0, math.nan, math.inf])
def test_no_time_is_invalid(us: float) -> None:
    found = check_possible(Sample(us, us, us, 5), LONG, DType.BF16, H200)
    assert found is not None and found.trial_class is TrialClass.TIMING_INVALID


class BusyHost(ScriptedClock):
    """Each batch waits for the host, `delayed` of them for several milliseconds."""

    def __init__(self, delayed: int) -> None:
        super().__init__()
        self.delayed = delayed

    def batch(self, calls: Sequence[Launcher]) -> Batch:
        """See `Clock.batch`."""
        batch = super().batch(calls)
        self.delayed -= 1
        return Batch(batch.event_us, batch.wall_us + (8000.0 if self.delayed >= 0 else 250.0))


@pytest.mark.parametrize("us", [5.0, 200.0, 3000.0])
def test_busy_host_makes_no_honest_kernel_invalid(us: float) -> None:
    clock = BusyHost(delayed=4)
    assert check_stream(clock.call("honest", us), clock, "shape") is None


@pytest.mark.parametrize(("us", "aside_us"), [(5.0, 20.0), (200.0, 400.0), (3000.0, 9000.0)])
def test_work_aside_shows_on_a_busy_host(us: float, aside_us: float) -> None:
    clock = BusyHost(delayed=4)
    found = check_stream(clock.call("cheat", us, aside_us=aside_us), clock, "shape")
    assert found is not None and found.trial_class is TrialClass.TIMING_INVALID


def test_scripted_clock_is_honest() -> None:
    clock = ScriptedClock()
    calls: Sequence[Launcher] = slots(clock, 1.0, 2.0)
    assert clock.windows_us(calls) == [1.0, 2.0]
    assert statistics.fmean(itertools.chain(clock.windows_us([clock.graphed(calls)]))) == 3.0
