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
from space.variant import Problem, Shape, io_bytes

SMEM_BYTES_PER_CLOCK = 128  #: what one SM reads from or writes to shared memory
CHUNK_BYTES = 16
SCHEDULERS = 4
MAX_BLOCKS_PER_SM = {75: 16, 80: 32, 89: 24, 90: 32}
FP32_LANES = {75: 64, 80: 64, 89: 128, 90: 128}


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What the datasheet does not say; fitted to measured trials."""

    tensor_efficiency: float = 0.70  #: of the mma.sync rate, in a loop with nothing else
    smem_efficiency: float = 0.95
    alu_per_score: float = 3.5  #: FP32 slots for scale, maximum, sum and conversion of a score
    alu_per_mask: float = 3.0  #: more of them where the mask is compared
    alu_per_rescale: float = 1.0  #: for each element of O at each rescale
    rescale_rate: float = 0.05  #: share of steps that rescale once a threshold is set
    serial_share: float = 0.25  #: of the units' time, not overlapped with one warp a scheduler
    step_latency_us: float = 0.25  #: barrier and copy latency of one step, one stage, one block
    block_latency_us: float = 4.0  #: prologue and epilogue of a block
    persistent_share: float = 0.45  #: of it that is left when blocks persist
    launch_us: float = 2.0
    l2_bytes_per_clock_per_sm: float = 40.0
    spill_weight: float = 0.004  #: slowdown for each spilled byte of a thread
    shuffled_tail: float = (
        0.5  #: of the longest block, idle at the end when blocks come in any order
    )
    wgmma_efficiency: float = 0.85  #: of the tensor rate, with the clocks that the power leaves
    overlap_gain: float = 0.3  #: share left of what does not overlap: scores issued early
    pingpong_gain: float = 0.6  #: and warpgroups in turns
    spread: float = 0.15  #: half width of the interval, relative


FITTED = Coefficients()


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


def predict(candidate: Candidate, shape: Shape, gpu: GpuSpec, fit: Coefficients = FITTED) -> Timing:
    """Return the predicted time of `candidate`; the interval is the model's own error."""
    us = predict_us(candidate, shape, gpu, fit)
    return Timing(shape, us, us * (1 - fit.spread), us * (1 + fit.spread), 0, Basis.PREDICTED)


def predict_us(
    candidate: Candidate, shape: Shape, gpu: GpuSpec, fit: Coefficients = FITTED
) -> float:
    """Return predicted microseconds: launch plus the slower of the SMs and the memories."""
    compute = _waves_us(candidate, shape, gpu, fit)
    dram = io_bytes(shape, candidate.problem.dtype) / (gpu.bandwidth_gbs * 1e3)
    l2_rate = fit.l2_bytes_per_clock_per_sm * gpu.num_sms * gpu.clock_ghz * 1e3  # bytes/us
    l2 = _l2_bytes(candidate, shape) / l2_rate
    return fit.launch_us + max(compute, dram, l2)


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


def key_tiles(shape: Shape, bm: int, bn: int) -> list[int]:
    """Return the steps of each row block: the key tiles that hold a visible key."""
    blocks = -(-shape.seqlen_q // bm)
    if not shape.causal:
        return [-(-shape.seqlen_k // bn)] * blocks
    shift = shape.seqlen_k - shape.seqlen_q
    last_keys = [min(shape.seqlen_q, (i + 1) * bm) + shift for i in range(blocks)]
    return [-(-min(max(k, 0), shape.seqlen_k) // bn) for k in last_keys]


def conflict_ways(columns: int, swizzle: int) -> int:
    """Return how many of eight consecutive rows meet in one bank group in an ldmatrix."""
    pitch = row_pitch_bytes(columns, swizzle)
    shift, mask = {128: (0, 7), 64: (1, 3), 32: (2, 1)}.get(swizzle, (0, 0))
    # the first chunk of each row, in units of the eight 16-byte bank groups
    slots = [(row * pitch // CHUNK_BYTES + ((row >> shift) & mask)) % 8 for row in range(8)]
    return max(slots.count(s) for s in slots)


def _waves_us(candidate: Candidate, shape: Shape, gpu: GpuSpec, fit: Coefficients) -> float:
    """Time of all blocks on all SMs, from the longest tiles to the last partial wave."""
    point = candidate.point
    tiles = key_tiles(shape, point["BM"], point["BN"])
    copies = shape.heads * shape.batch
    blocks = len(tiles) * copies
    resident = min(resident_blocks(candidate, gpu), -(-blocks // gpu.num_sms))
    step = _step_us(candidate, resident, gpu, fit)
    # a persistent block fetches the next tile while this one ends
    around = fit.block_latency_us * (fit.persistent_share if point.get("persistent", 0) else 1.0)
    if not shape.causal:
        full, rest = divmod(blocks, resident * gpu.num_sms)
        us = full * (tiles[0] * step + around)
        if rest:
            last = _step_us(candidate, -(-rest // gpu.num_sms), gpu, fit)
            us += tiles[0] * last + around
        return us
    longest = max(tiles) * step + around
    even = (sum(tiles) * copies * step + blocks * around) / (resident * gpu.num_sms)
    tail = 0.0 if point.get("causal_longest_first", 0) else fit.shuffled_tail * longest
    return max(even, longest) + tail


def _step_us(candidate: Candidate, resident: int, gpu: GpuSpec, fit: Coefficients) -> float:
    """Time in which each of `resident` blocks of an SM makes one step."""
    units = _unit_us(candidate, gpu, fit)
    busiest = max(units)
    point = candidate.point
    warps_per_scheduler = max(resident * _computing_warps(point) / SCHEDULERS, 0.5)
    exposed = fit.serial_share * (sum(units) - busiest) / warps_per_scheduler
    exposed *= fit.overlap_gain if point.get("overlap", 0) else 1.0
    exposed *= fit.pingpong_gain if point.get("pingpong", 0) else 1.0
    latency = fit.step_latency_us / (point["stages"] * resident)
    spill = 1 + fit.spill_weight * candidate.spilled_bytes
    return (resident * (busiest + exposed) + latency) * spill


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
    rate = gpu.tensor_tflops * 1e6 / gpu.num_sms
    if is_hopper(point):
        rate *= fit.wgmma_efficiency
    else:
        rate *= gpu.mma_sync_fraction * fit.tensor_efficiency
    tensor = 2 * bm * bn * (depth + depth_v) / rate
    moved = _smem_traffic(candidate, depth, depth_v)
    smem = moved / (SMEM_BYTES_PER_CLOCK * sm_clock * fit.smem_efficiency)

    scores = bm * bn
    mufu = scores / (gpu.mufu_per_clock_per_sm * sm_clock)
    slots = scores * fit.alu_per_score
    if problem.causal and not (is_hopper(point) or point.get("peel", 0)):
        slots += scores * fit.alu_per_mask
    rescales = fit.rescale_rate if point.get("rescale_threshold", 0) else 1.0
    slots += bm * depth_v * fit.alu_per_rescale * rescales
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
