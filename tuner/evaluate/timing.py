"""How long a right kernel takes on one shape: an adaptive sample, its median and interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from runs.record import Basis, Rejected, Stage, Timing, TrialClass
from space.gpu import GpuSpec
from space.variant import DType, Shape, flops, io_bytes
from tuner.evaluate.clock import Clock, Launcher

SHORT_US = 30.0  #: below this a window holds more launch than kernel
GRAPH_US = 200.0  #: what a graph of short kernels lasts
#: Datasheet rates hold at boost clock; a card may run some percent above it.
ROOFLINE_SLACK = 0.9
REPLAY_SLOTS = 2  #: slots that replayed launches rotate over, each a graph of its own
REPLAY_SAMPLES = 3  #: times as many samples as a plan has at most, of launches this short
BATCH_US, BATCH_MOST = 2000.0, 256  #: a batch to compare with the wall clock: length, launches
WALL_FACTOR, WALL_SLACK_US = 2.0, 300.0  #: what waiting for the device may add to a batch
BATCH_WALL_US = 20_000.0  #: a batch that takes this long by the wall clock is not made longer
WALL_TRIES = 5  #: a busy host or another process delays some batches, not each


@dataclass(frozen=True, slots=True)
class Plan:
    """How many samples a shape is worth."""

    min_samples: int = 5
    max_samples: int = 15
    budget_us: float = 12_000.0  #: sampling stops here once there are `min_samples`
    warmup_us: float = 10_000.0  #: work before the first window of a trial
    hopeless: float = 1.5  #: times the best known: no more than a first look is taken


TRIAL_PLAN = Plan()


@dataclass(frozen=True, slots=True)
class Sample:
    """Median of `count` windows and the 95% interval of the median, in microseconds."""

    median_us: float
    low_us: float
    high_us: float
    count: int

    def timing(self, shape: Shape) -> Timing:
        """Return the record of this sample."""
        return Timing(shape, self.median_us, self.low_us, self.high_us, self.count, Basis.MEASURED)


def summarise(times_us: Sequence[float]) -> Sample:
    """Return the median with its interval from order statistics, which assumes no distribution.

    With fewer than 6 samples no pair of order statistics covers 95%: the interval is the range.
    """
    ordered = sorted(times_us)
    n = len(ordered)
    rank = max(0, math.floor((n - 1.96 * math.sqrt(n)) / 2)) if n >= 6 else 0
    return Sample(statistics.median(ordered), ordered[rank], ordered[n - 1 - rank], n)


def warm_up(call: Launcher, clock: Clock, plan: Plan = TRIAL_PLAN) -> None:
    """Launch until the device has worked for the plan's warm-up time."""
    once = clock.windows_us([call])[0]
    count = min(int(plan.warmup_us / max(once, 1.0)), 1000)
    if count:
        clock.windows_us([call] * count)


def measure(
    slots: Sequence[Launcher], clock: Clock, plan: Plan = TRIAL_PLAN, best_us: float = math.inf,
    before: Launcher | None = None,
) -> Sample:  # fmt: skip
    """Time a launch whose inputs rotate over `slots`; the last launch is always slot 0's.

    A candidate slower than `plan.hopeless` times `best_us` is given two windows only. `before` is
    called ahead of each window.
    """
    per, calls = 1, list(slots)
    # the first after a wait reads low
    _, *first = clock.windows_us(_rotation(calls, 3), before=before)
    if min(first) < SHORT_US:
        per = max(len(calls), math.ceil(GRAPH_US / max(min(first), 1.0)))
        calls = [clock.graphed(_rotation(calls, per))]
        _, *first = (t / per for t in clock.windows_us(_rotation(calls, 3), before=before))
    if min(first) > plan.hopeless * best_us:
        return summarise(first)
    wanted = plan.budget_us / (max(min(first), 1e-3) * per)
    count = int(max(plan.min_samples, min(plan.max_samples, wanted)))
    rest = clock.windows_us(_rotation(calls, max(count - len(first), 1)), before=before)
    return summarise([*first, *(t / per for t in rest)])


def measure_replays(
    slots: Sequence[Launcher], clock: Clock, plan: Plan = TRIAL_PLAN, best_us: float = math.inf,
    before: Launcher | None = None,
) -> Sample:  # fmt: skip
    """Time a launch of few microseconds as a decoder makes it: as the replay of a graph.

    Each window holds one replay, so that no launch hides behind another. Inputs rotate over two
    of the `slots`; the last launch is slot 0's.
    """
    calls = [clock.graphed([call]) for call in slots[:REPLAY_SLOTS]]
    _, *first = clock.windows_us(_rotation(calls, 3), before=before)
    if min(first) > plan.hopeless * best_us:
        return summarise(first)
    more = plan.max_samples * REPLAY_SAMPLES
    wanted = plan.budget_us / max(min(first), 1e-3)
    count = int(max(plan.min_samples, min(more, wanted)))
    rest = clock.windows_us(_rotation(calls, max(count - len(first), 1)), before=before)
    return summarise([*first, *rest])


def check_stream(call: Launcher, clock: Clock, name: str) -> Rejected | None:
    """Return the rejection of work that the events do not see, because it ran beside them."""
    count, tries = 1, 0
    while tries < WALL_TRIES:
        batch = clock.batch([call] * count)
        short = batch.event_us < BATCH_US and batch.wall_us < BATCH_WALL_US
        if short and count < BATCH_MOST:
            count *= 4  # what the host adds to a batch is no part of a longer one
            continue
        tries += 1
        if batch.wall_us <= WALL_FACTOR * batch.event_us + WALL_SLACK_US:
            return None
    return Rejected(
        TrialClass.TIMING_INVALID, Stage.TIME,
        f"{name}: {count} launch(es) took {batch.event_us:.0f} us between events and "
        f"{batch.wall_us:.0f} us by the wall clock, {WALL_TRIES} times over: work ran outside the "
        "timed stream, or another process keeps the device busy",
    )  # fmt: skip


def _rotation(slots: Sequence[Launcher], count: int) -> list[Launcher]:
    return [slots[i % len(slots)] for i in range(count - 1, -1, -1)]


def roofline_us(shape: Shape, dtype: DType, gpu: GpuSpec, plain: bool = True) -> float:
    """Return the least time the hardware allows: FLOPs at peak or bytes at full bandwidth.

    What is written may stay in L2, so only what must be read counts as bytes. What a function that
    is not plain attention passes over is unknown: its every query is read, and no more is certain.
    """
    if not plain:
        queries = shape.batch * shape.seqlen_q * shape.heads * shape.head_dim * dtype.bytes
        return queries / (gpu.bandwidth_gbs * 1e3)
    written = shape.batch * shape.seqlen_q * shape.heads * shape.head_dim_v * dtype.bytes
    compute = flops(shape) / (gpu.tensor_tflops * 1e6)
    memory = (io_bytes(shape, dtype) - written) / (gpu.bandwidth_gbs * 1e3)
    return max(compute, memory)


def check_possible(
    sample: Sample, shape: Shape, dtype: DType, gpu: GpuSpec, plain: bool = True
) -> Rejected | None:
    """Return the rejection of a time that no kernel on `gpu` can have, with the numbers."""
    if not all(math.isfinite(t) and t > 0 for t in (sample.low_us, sample.median_us)):
        return Rejected(
            TrialClass.TIMING_INVALID, Stage.TIME, f"{shape.key}: {sample.median_us} us measured"
        )
    floor = ROOFLINE_SLACK * roofline_us(shape, dtype, gpu, plain)
    if sample.median_us >= floor:
        return None
    return Rejected(
        TrialClass.IMPOSSIBLE_TIME, Stage.TIME,
        f"{shape.key}: {sample.median_us:.2f} us measured, {floor:.2f} us is the least that "
        f"{gpu.title} allows ({gpu.tensor_tflops:g} TFLOP/s, {gpu.bandwidth_gbs:g} GB/s)",
    )  # fmt: skip
