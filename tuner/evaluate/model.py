"""Analytic model: predicted microseconds of a candidate on a GPU that is not here.

A block's step over one key tile keeps four units of its SM busy: tensor cores, shared-memory
reads, exponentials (MUFU) and FP32 arithmetic. The busiest one sets the pace; the others hide
behind it the better the more warps are resident. Steps add up to blocks, blocks to waves over
the SMs, and no kernel is faster than its device-memory or L2 traffic. Everything it gives is
`Basis.PREDICTED`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codegen.kernel import Resources
from runs.record import Basis, Timing
from space.constraints import (
    MMA_M,
    WARP,
    is_hopper,
    register_estimate,
    row_pitch_bytes,
    smem_bytes,
)
from space.gpu import GpuSpec
from space.hopper import accumulator_registers
from space.params import Point
from space.variant import Problem, Shape
from tuner.evaluate.waves import dram_bytes, finish_us, key_tiles, launch_order

SMEM_BYTES_PER_CLOCK = 128  #: what one SM reads from or writes to shared memory
CHUNK_BYTES = 16
SCHEDULERS = 4
MAX_BLOCKS_PER_SM = {75: 16, 80: 32, 89: 24, 90: 32}
FP32_LANES = {75: 64, 80: 64, 89: 128, 90: 128}
LAUNCH_US = 2.0
RESCALE_RATE = 0.05  #: share of steps that rescale once a threshold is set
SPILL_WEIGHT = 0.001
FILL_SHARE = 0.5
STORE_BESIDE_FETCH = 0.35
BLOCK_START_US = 0.6
ALU_PER_MASK = 3.0
SPREAD = 0.15  #: half width of the interval, relative


@dataclass(frozen=True, slots=True)
class MmaSync:
    """What the datasheet does not say of kernels with warp-level MMA."""

    tensor_efficiency: float = 0.70  #: of the mma.sync rate, in a loop with nothing else
    smem_efficiency: float = 0.95
    alu_per_score: float = 3.5  #: FP32 slots for scale, maximum, sum and conversion of a score
    alu_per_mask: float = 1.0  #: more of them where the mask is compared
    serial_share: float = (
        0.25  #: of the units' time that does not overlap with one warp a scheduler
    )
    step_us: float = 0.25  #: barrier and copy latency of one step, one stage, one block
    tile_us: float = 4.0  #: prologue and epilogue of a block
    direct_store_us: float = 1.7  #: more of it when O is not staged through shared memory
    spill_weight: float = 0.001  #: slowdown for each spilled byte of a thread
    peel_weight: float = 0.02  #: slowdown of the code that has a second loop
    l2_bytes_per_clock_per_sm: float = 40.0
    blend: float = 4.0  #: exponent with which SMs, L2 and device memory add up; max at infinity


@dataclass(frozen=True, slots=True)
class Wgmma:
    """What the datasheet does not say of the Hopper back end's kernels."""

    tensor_efficiency: float = 0.85  #: of the tensor rate, with the clocks that the power leaves
    alu_per_score: float = 5.0  #: FP32 slots for scale, maximum, sum and conversion of a score
    integer_max_saves: float = 1.0  #: of them when maxima are of three
    serial_share: float = 0.6  #: of the units' time that does not overlap with one warpgroup
    overlap_gain: float = 0.5  #: share left of it: scores issued early
    pingpong_gain: float = 0.8  #: and warpgroups in turns
    step_us: float = 0.2  #: barriers of one step, one stage
    tile_us: float = 1.0  #: first scores and last product of a tile, with nothing beside them
    fetch_us: float = 0.6  #: waiting for the next tile's Q when it has no second stage
    store_us: float = 0.9  #: waiting for O to leave when it has no buffer of its own
    l2_bytes_per_clock_per_sm: float = 40.0
    blend: float = 4.0  #: exponent with which SMs, L2 and device memory add up; max at infinity


Coefficients = MmaSync | Wgmma

MMA_SYNC = MmaSync()
WGMMA = Wgmma()


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the model looks at: the point and what the compiler made of it."""

    problem: Problem
    point: Point
    registers: int
    spilled_bytes: int
    smem_bytes: int

    @classmethod
    def of(
        cls, problem: Problem, point: Point, resources: Sequence[Resources], smem: int
    ) -> Candidate:
        """Take registers and spills from the cubin's kernels, the worst of them."""
        return cls(
            problem,
            point,
            max(r.registers for r in resources),
            max(r.spill_store_bytes + r.spill_load_bytes for r in resources),
            smem,
        )

    @classmethod
    def uncompiled(cls, problem: Problem, point: Point) -> Candidate:
        """Estimate registers and shared memory from the point alone."""
        if is_hopper(point):
            registers = accumulator_registers(problem.head_dim_v, point)
        else:
            registers = register_estimate(problem, point)
        return cls(problem, point, min(registers, 255), 0, smem_bytes(problem, point))


def coefficients(point: Point) -> Coefficients:
    """Return the fitted coefficients of the point's back end."""
    return WGMMA if is_hopper(point) else MMA_SYNC


def predict(candidate: Candidate, shape: Shape, gpu: GpuSpec) -> Timing:
    """Return the predicted time of `candidate`; the interval is the model's own error."""
    us = predict_us(candidate, shape, gpu)
    return Timing(shape, us, us * (1 - SPREAD), us * (1 + SPREAD), 0, Basis.PREDICTED)


def predict_us(
    candidate: Candidate, shape: Shape, gpu: GpuSpec, fit: Coefficients | None = None
) -> float:
    """Return predicted microseconds: launch plus SMs and memories, the slowest above all."""
    fit = fit or coefficients(candidate.point)
    blocks = shape.batch * shape.heads * -(-shape.seqlen_q // candidate.point["BM"])
    resident = min(resident_blocks(candidate, gpu), -(-blocks // gpu.num_sms))
    compute = _waves_us(candidate, shape, gpu, fit, resident)
    running = min(blocks, resident * gpu.num_sms)
    dram = dram_bytes(shape, candidate.point, running, gpu) / (gpu.bandwidth_gbs * 1e3)
    l2_rate = fit.l2_bytes_per_clock_per_sm * gpu.num_sms * gpu.clock_ghz * 1e3  # bytes/us
    l2 = _l2_bytes(candidate, shape) / l2_rate
    slowest = max(compute, dram, l2)
    blended = sum((us / slowest) ** fit.blend for us in (compute, dram, l2)) ** (1 / fit.blend)
    return LAUNCH_US + slowest * blended


def resident_blocks(candidate: Candidate, gpu: GpuSpec) -> int:
    """Return how many blocks an SM holds at once, by shared memory, registers and threads."""
    warps = block_warps(candidate.point)
    by_smem = gpu.smem_per_sm_bytes // (candidate.smem_bytes + gpu.smem_reserved_bytes)
    registers = -(-candidate.registers // 8) * 8  # a warp's registers come in units of 256
    by_registers = gpu.registers_per_sm // (registers * WARP * warps)
    by_threads = gpu.threads_per_sm // (WARP * warps)
    return max(1, min(by_smem, by_registers, by_threads, MAX_BLOCKS_PER_SM.get(gpu.sm, 16)))


def block_warps(point: Point) -> int:
    """Return the warps of a block, a Hopper block's producer included."""
    return 4 * (point["consumer_warpgroups"] + 1) if is_hopper(point) else point["warps"]


def conflict_ways(columns: int, swizzle: int) -> int:
    """Return how many of eight consecutive rows meet in one bank group in an ldmatrix."""
    pitch = row_pitch_bytes(columns, swizzle)
    shift, mask = {128: (0, 7), 64: (1, 3), 32: (2, 1)}.get(swizzle, (0, 0))
    # the first chunk of each row, in units of the eight 16-byte bank groups
    slots = [(row * pitch // CHUNK_BYTES + ((row >> shift) & mask)) % 8 for row in range(8)]
    return max(slots.count(s) for s in slots)


def _waves_us(
    candidate: Candidate, shape: Shape, gpu: GpuSpec, fit: Coefficients, resident: int
) -> float:
    """Time of all blocks on all SMs, from the longest tiles to the last partial wave."""
    point = candidate.point
    tiles = key_tiles(shape, point["BM"], point["BN"])
    planes = shape.heads * shape.batch
    step = _step_us(candidate, resident, gpu, fit)
    around = _around_us(candidate, gpu, fit)
    if shape.causal:
        order = launch_order(
            tiles, planes, point.get("head_group", 1), bool(point.get("causal_longest_first", 0))
        )
        static = point.get("persistent", 0) == 1
        return finish_us(order, resident * gpu.num_sms, step, around, static)
    full, rest = divmod(len(tiles) * planes, resident * gpu.num_sms)
    us = full * (tiles[0] * step + around)
    if rest:
        last = _step_us(candidate, -(-rest // gpu.num_sms), gpu, fit)
        us += tiles[0] * last + around
    return us


def _around_us(candidate: Candidate, gpu: GpuSpec, fit: Coefficients) -> float:
    """Time of a tile outside its steps; less than nothing is never returned."""
    point = candidate.point
    if isinstance(fit, MmaSync):
        return fit.tile_us + (0.0 if point["epilogue_smem"] else fit.direct_store_us)
    alone = point.get("q_stages", 1) == 1
    us = FILL_SHARE * sum(_unit_us(candidate, gpu, fit)) + fit.tile_us
    us += fit.fetch_us if alone else 0.0
    if not point.get("out_buffer", 1):
        us += fit.store_us * (1.0 if alone else STORE_BESIDE_FETCH)
    if not point.get("persistent", 0):
        us += BLOCK_START_US
    if candidate.problem.causal:
        bm, bn = point["BM"], point["BN"]
        masked = -(-bm // bn) * bm * bn * ALU_PER_MASK
        us += masked / (FP32_LANES.get(gpu.sm, 128) * gpu.clock_ghz * 1e3)
    return us


def _step_us(candidate: Candidate, resident: int, gpu: GpuSpec, fit: Coefficients) -> float:
    """Time in which each of `resident` blocks of an SM makes one step."""
    tensor, smem, mufu, alu = _unit_us(candidate, gpu, fit)
    point = candidate.point
    latency = fit.step_us / (point["stages"] * resident)
    if isinstance(fit, Wgmma):
        products, softmax = max(tensor, smem), mufu + alu
        exposed = fit.serial_share * min(products, softmax) / point["consumer_warpgroups"]
        exposed *= fit.overlap_gain if point["overlap"] else 1.0
        exposed *= fit.pingpong_gain if point["pingpong"] else 1.0
        slowdown = 1.0 + SPILL_WEIGHT * candidate.spilled_bytes
        return (max(products, softmax) + exposed + latency) * slowdown
    units = (tensor, smem, mufu, alu)
    tiles_per_scheduler = max(resident * point["BM"] / (MMA_M * SCHEDULERS), 0.5)
    busiest = max(units)
    exposed = fit.serial_share * (sum(units) - busiest) / tiles_per_scheduler
    slowdown = 1 + fit.spill_weight * candidate.spilled_bytes
    slowdown += fit.peel_weight if point["peel"] else 0.0
    return (resident * (busiest + exposed) + latency) * slowdown


def _computing_warps(point: Point) -> int:
    return 4 * point["consumer_warpgroups"] if is_hopper(point) else point["warps"]


def _unit_us(
    candidate: Candidate, gpu: GpuSpec, fit: Coefficients
) -> tuple[float, float, float, float]:
    """Time that one step of one block keeps tensor cores, shared memory, MUFU and FP32 busy."""
    problem, point = candidate.problem, candidate.point
    bm, bn = point["BM"], point["BN"]
    depth, depth_v = (-(-d // MMA_M) * MMA_M for d in (problem.head_dim, problem.head_dim_v))
    sm_clock = gpu.clock_ghz * 1e3  # cycles a microsecond
    scores = bm * bn
    slots = scores * fit.alu_per_score
    rate = gpu.tensor_tflops * 1e6 / gpu.num_sms * fit.tensor_efficiency
    smem_rate = SMEM_BYTES_PER_CLOCK * sm_clock
    if isinstance(fit, Wgmma):
        slots -= scores * fit.integer_max_saves * point.get("integer_max", 0)
    else:
        rate *= gpu.mma_sync_fraction
        smem_rate *= fit.smem_efficiency
        if problem.causal and not point.get("peel", 0):
            slots += scores * fit.alu_per_mask
    rescales = RESCALE_RATE if point.get("rescale_threshold", 0) else 1.0
    slots += bm * depth_v * rescales
    tensor = 2 * bm * bn * (depth + depth_v) / rate
    smem = _smem_traffic(candidate, depth, depth_v) / smem_rate
    mufu = scores / (gpu.mufu_per_clock_per_sm * sm_clock)
    alu = slots / (FP32_LANES.get(gpu.sm, 128) * sm_clock)
    return tensor, smem, mufu, alu


def _smem_traffic(candidate: Candidate, depth: int, depth_v: int) -> int:
    """Bytes that one step reads from and writes to shared memory, conflicts counted as bytes."""
    problem, point = candidate.problem, candidate.point
    bm, bn = point["BM"], point["BN"]
    filled = bn * 2 * (depth + depth_v)
    if is_hopper(point):
        # each warpgroup's wgmma reads K and V once, and Q again at every step
        return filled * (1 + point["consumer_warpgroups"]) + bm * depth * 2
    ways_k, ways_v = (
        conflict_ways(d, point["swizzle"]) for d in (problem.head_dim, problem.head_dim_v)
    )
    # every warp reads all of K and V for its own rows, so few rows a warp read more in all
    moved = filled + point["warps"] * bn * 2 * (depth * ways_k + depth_v * ways_v)
    if not point["q_in_registers"]:
        moved += bm * depth * 2 * ways_k
    if not point["p_in_registers"]:
        moved += 2 * bm * bn * 2
    return moved


def _l2_bytes(candidate: Candidate, shape: Shape) -> int:
    """Bytes that all blocks ask of L2: every block reads its Q, writes its O, streams K and V."""
    bm, bn = candidate.point["BM"], candidate.point["BN"]
    width = (shape.head_dim + shape.head_dim_v) * candidate.problem.dtype.bytes
    tiles = key_tiles(shape, bm, bn)
    return shape.batch * shape.heads * width * (len(tiles) * bm + sum(tiles) * bn)
