"""Analytic model of decode: how long a split of the keys, and the combination, take on a GPU.

A block streams its key tiles: it waits for device memory once, then moves as fast as the tiles in
flight, its SM, the L2 and device memory let it, or as its products let it. Splits make waves of
blocks; more than one writes partial outputs that a second kernel reads back. Nothing here is
fitted: rates are the datasheet's, latencies those that such cards are known for.
"""

from __future__ import annotations

import math

from codegen.kernel import SplitRule
from runs.templates.lengths import problem_lengths, split_count
from space.gpu import GpuSpec
from space.params import Point
from space.variant import DType, Shape, io_bytes

START_US = 2.5  #: of a launch, from the window's first event to a block's first instruction
FIRST_TILE_US = 1.2  #: until the first keys have come from device memory
LATENCY_US = 0.9  #: of device memory under load: what the tiles in flight must bridge
STEP_US = 0.12  #: barriers and the softmax's dependent instructions of one key tile
END_US = 0.8  #: the last product, the division, and O on its way out
SECOND_US = 1.6  #: of a kernel that starts as the one before it ends
JOIN_US = 0.8  #: two meetings of a cluster's blocks, and what they read of each other between
PER_SPLIT_US = 0.02  #: of the combination's loop over the splits
TENSOR_SHARE = 0.77  #: of the datasheet's tensor rate that a large product of random data gets
READ_SHARE = 0.935  #: of the datasheet's bandwidth that a read of everything gets
SM_BYTES_PER_CLOCK = 64  #: what one SM takes from the L2
SPREAD = 0.3  #: half width of the interval, relative
PARTIAL_BYTES = 4  #: partial outputs are float32


def splits_of(point: Point, shape: Shape, gpu: GpuSpec) -> int:
    """Return the splits that a kernel at `point` gives the keys of `shape` on `gpu`."""
    rule = SplitRule(
        point["BM"], point["BN"], point["split_blocks"], point["min_split_tiles"],
        _sharing(point),
    )  # fmt: skip
    lengths = problem_lengths(
        shape.batch, shape.heads, shape.kv_heads, shape.seqlen_q, shape.seqlen_k
    )
    return split_count(rule, lengths, gpu.num_sms)


def _sharing(point: Point) -> int:
    """Blocks that work on one split."""
    return point.get("split_cluster", 1) * point.get("column_blocks", 1)


def decode_us(
    point: Point, shape: Shape, dtype: DType, gpu: GpuSpec, resident: int, warp_level: bool
) -> float:
    """Return predicted microseconds with at most `resident` blocks on an SM.

    `warp_level` says that products are made with mma.sync, which some cards run slower.
    """
    rows, keys = point["BM"], point["BN"]
    planes = shape.batch * shape.kv_heads
    splits = splits_of(point, shape, gpu)
    row_blocks = -(-shape.seqlen_q * shape.group // rows)
    cluster = point.get("split_cluster", 1)
    blocks = row_blocks * planes * splits * _sharing(point)
    steps = math.ceil(math.ceil(shape.seqlen_k / keys) / (splits * cluster))
    at_once = min(blocks, gpu.num_sms * resident)
    sharing = -(-at_once // gpu.num_sms)  # blocks of an SM that has most
    waves = -(-blocks // at_once)
    columns = shape.head_dim + (0 if shape.latent else shape.head_dim_v)
    tile_bytes = keys * columns * dtype.bytes
    bridged = point["stages"] * tile_bytes / LATENCY_US
    of_sm = SM_BYTES_PER_CLOCK * gpu.clock_ghz * 1e3 / sharing
    # blocks that share a plane's keys read them once from device memory and then from the L2
    read = gpu.bandwidth_gbs * 1e3 * READ_SHARE
    of_memory = read / at_once * row_blocks * point.get("column_blocks", 1)
    moved = tile_bytes / min(bridged, of_sm, of_memory)
    step = max(moved, _products_us(point, shape, gpu, warp_level) * sharing) + STEP_US / sharing
    us = START_US + FIRST_TILE_US + waves * steps * step + END_US
    us = max(us, START_US + io_bytes(shape, dtype) / read)
    us += JOIN_US if cluster > 1 else 0.0
    if splits == 1:
        return us
    combined = math.ceil(splits / point.get("combine_groups", 1))  # one after the other
    return us + SECOND_US + combined * PER_SPLIT_US + _partials_us(shape, splits, gpu)


def _products_us(point: Point, shape: Shape, gpu: GpuSpec, warp_level: bool) -> float:
    """Time of one key tile's two products and exponentials on an SM of its own, padding paid."""
    rows, keys = point["BM"], point["BN"]
    rate = gpu.tensor_tflops * 1e6 * TENSOR_SHARE / gpu.num_sms
    if warp_level:
        rate *= gpu.mma_sync_fraction
    columns = shape.head_dim_v // point.get("column_blocks", 1)
    tensor = 2 * rows * keys * (shape.head_dim + columns) / rate
    exponentials = rows * keys / (gpu.mufu_per_clock_per_sm * gpu.clock_ghz * 1e3)
    return tensor + exponentials


def _partials_us(shape: Shape, splits: int, gpu: GpuSpec) -> float:
    """Time to write the partial outputs and read them back, through the L2 where they fit."""
    rows = shape.batch * shape.heads * shape.seqlen_q
    partials = splits * rows * (shape.head_dim_v + 1) * PARTIAL_BYTES
    l2 = SM_BYTES_PER_CLOCK * gpu.num_sms * gpu.clock_ghz * 1e3
    rate = l2 if partials < gpu.l2_bytes else gpu.bandwidth_gbs * 1e3
    return 2 * partials / rate
