"""Analytic model: predicted microseconds of a candidate on a GPU that is not here.

A block's step over one key tile keeps four units of its SM busy: tensor cores, shared memory,
exponentials (MUFU) and FP32 arithmetic. The busiest one sets the pace; the others hide behind it
the better the more independent work is resident. Steps and what a tile costs beside them add up
to tiles, tiles to a launch over the SMs (`waves`), and the SMs share L2 and device memory.
Everything it gives is `Basis.PREDICTED`.

The coefficients were fitted, by least squares on the log of the time, to trials measured on an
H200 on 2026-11-30: bf16 and fp16 at head dims 16 to 256 and lengths 512 to 16384, 16384 tokens in
all. Other GPUs differ only by their datasheet. An efficiency above 1 is a clock above the
datasheet's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codegen.kernel import Resources
from runs.record import Basis, Timing
from space.constraints import is_decode_hopper, is_hopper, register_estimate, smem_bytes
from space.decode import decode_threads
from space.gpu import GpuSpec
from space.hopper import WARPGROUP_ROWS
from space.params import Point
from space.tiles import MMA_M, WARP, row_pitch_bytes
from space.variant import Phase, Problem, Shape
from tuner.evaluate import decode_model
from tuner.evaluate.waves import (
    block_queries,
    dram_bytes,
    finish_us,
    head_packs,
    key_tiles,
    launch_order,
)

SMEM_BYTES_PER_CLOCK = 128  #: what one SM reads from or writes to shared memory
CHUNK_BYTES = 16
MAX_BLOCKS_PER_SM = {75: 16, 80: 32, 89: 24, 90: 32}
FP32_LANES = {75: 64, 80: 64, 89: 128, 90: 128}
REGISTER_FILE = 65536
LAUNCH_US = 2.0
SPREAD = 0.15  #: half width of the interval, relative: two of three trials are well within
L2_BYTES_PER_CLOCK_PER_SM = 64
RESCALE_RATE = 0.05  #: share of steps that rescale once a threshold is set
TILE_ELEMENTS = 128 * 128  #: of the tile that `fetch_us` and `store_us` are given for

# Hopper, what the trials say too little of to fit
BOOST = 1.08  #: of the clock over the datasheet's, for what is not throttled
SPILL_WEIGHT = 0.0015  #: slowdown for each spilled byte of a thread
SINGLE_STAGE = 2.0  #: times `step_us`, when the next tile waits for this one's slot
STORE_BESIDE_FETCH = 0.35  #: of `store_us`, when the next Q is here or O goes out directly
BLOCK_START_US = 0.6  #: barriers and descriptors of a block that does not persist
ALU_PER_MASK = 3.0  #: FP32 slots of a score in a tile that the mask crosses
FMA_PER_EXP2 = 10.0  #: FP32 slots of an exponential that does not take the MUFU
SKIP_SAVES = 0.6  #: of the hidden steps' time: the other warpgroups use the units meanwhile


@dataclass(frozen=True, slots=True)
class MmaSync:
    """What the datasheet does not say of kernels with warp-level MMA."""

    tensor_efficiency: float = 0.718  #: of the mma.sync rate, in a loop with nothing else
    smem_efficiency: float = 1.08
    alu_per_score: float = 9.3  #: FP32 slots of a score: scale, maximum, sum, conversion, moves
    alu_per_mask: float = 0.29  #: more of them where the mask is compared
    serial_share: float = 0.123  #: of the idle units' time, with one row of MMA tiles resident
    step_us: float = 0.522  #: barrier and copy latency of one step, one stage, one block
    tile_us: float = 3.07  #: prologue and epilogue of a block
    direct_store_us: float = 0.66  #: more of it when O is not staged through shared memory
    spill_weight: float = 0.00096  #: slowdown for each spilled byte of a thread
    peel_weight: float = 0.0047  #: slowdown of the code that has a second loop
    blend: float = 1.84  #: exponent with which SMs and device memory add up; max at infinity


@dataclass(frozen=True, slots=True)
class Wgmma:
    """What the datasheet does not say of the Hopper back end's kernels."""

    tensor_efficiency: float = 1.08  #: of the tensor rate, in a loop with nothing else
    alu_per_score: float = 3.93  #: FP32 slots of a score: scale, maximum, sum, conversion
    integer_max_saves: float = 2.49  #: of them when maxima are of three
    serial_share: float = 1.80  #: of the shorter phase, divided among warpgroups: never above all
    overlap_gain: float = 0.695  #: share left of it: scores issued early
    pingpong_gain: float = 0.929  #: and warpgroups in turns
    step_us: float = 0.131  #: barriers of one step
    fill_share: float = 0.483  #: of a step: first scores and last product, nothing beside them
    fetch_us: float = 0.193  #: waiting for the next tile's Q when it has no second stage
    store_us: float = 0.689  #: waiting for O to leave when it has no buffer of its own
    turn_us: float = 0.419  #: waiting for turns at the diagonal, each warpgroup beyond two
    blend: float = 1.88  #: exponent with which SMs and device memory add up; max at infinity


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
            registers = REGISTER_FILE // (WARP * block_warps(point)) // 8 * 8  # all of them
        else:
            registers = register_estimate(problem, point)
        return cls(problem, point, min(registers, 255), 0, smem_bytes(problem, point))


def coefficients(point: Point) -> Coefficients:
    """Return the fitted coefficients of the point's back end."""
    return WGMMA if is_hopper(point) else MMA_SYNC


def predict(candidate: Candidate, shape: Shape, gpu: GpuSpec) -> Timing:
    """Return the predicted time of `candidate`; the interval is the model's own error."""
    us = predict_us(candidate, shape, gpu)
    decode = candidate.problem.phase is Phase.DECODE
    spread = decode_model.SPREAD if decode else SPREAD
    splits = decode_model.splits_of(candidate.point, shape, gpu) if decode else 1
    low, high = us * (1 - spread), us * (1 + spread)
    return Timing(shape, us, low, high, 0, Basis.PREDICTED, splits)


def predict_us(
    candidate: Candidate, shape: Shape, gpu: GpuSpec, fit: Coefficients | None = None
) -> float:
    """Return predicted microseconds: launch plus SMs and memories, the slowest above all."""
    if candidate.problem.phase is Phase.DECODE:
        return decode_model.decode_us(
            candidate.point, shape, candidate.problem.dtype, gpu,
            resident_blocks(candidate, gpu), not is_hopper(candidate.point),
        )  # fmt: skip
    fit = fit or coefficients(candidate.point)
    planes = shape.batch * shape.kv_heads * head_packs(shape, candidate.point)
    blocks = planes * -(-shape.seqlen_q // block_queries(candidate.point))
    resident = min(resident_blocks(candidate, gpu), -(-blocks // gpu.num_sms))
    compute = _waves_us(candidate, shape, gpu, fit, resident)
    running = min(blocks, resident * gpu.num_sms)
    dram = dram_bytes(shape, candidate.point, running, gpu) / (gpu.bandwidth_gbs * 1e3)
    l2_rate = L2_BYTES_PER_CLOCK_PER_SM * gpu.num_sms * gpu.clock_ghz * 1e3  # bytes/us
    l2 = _l2_bytes(candidate, shape) / l2_rate
    on_chip = max(compute, l2)
    both: float = (on_chip**fit.blend + dram**fit.blend) ** (1 / fit.blend)
    return LAUNCH_US + both


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
    if is_decode_hopper(point):
        return decode_threads(point["consumer_warpgroups"]) // WARP
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
    tiles = key_tiles(shape, block_queries(point), point["BN"])
    planes = shape.batch * shape.kv_heads * head_packs(shape, point)
    step = _step_us(candidate, resident, gpu, fit)
    around = _around_us(candidate, gpu, fit, step)
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


def _around_us(candidate: Candidate, gpu: GpuSpec, fit: Coefficients, step: float) -> float:
    """Time of a tile outside its steps, each of which takes `step` us."""
    point, problem = candidate.point, candidate.problem
    if isinstance(fit, MmaSync):
        return fit.tile_us + (0.0 if point["epilogue_smem"] else fit.direct_store_us)
    tensor, _, mufu, alu = _unit_us(candidate, gpu, fit)
    bm, bn, warpgroups = point["BM"], point["BN"], point["consumer_warpgroups"]
    us = fit.fill_share * (tensor + mufu + alu)
    alone = point.get("q_stages", 1) == 1
    if alone:
        us += fit.fetch_us * bm * problem.head_dim / TILE_ELEMENTS
    if point.get("out_buffer", 1) != 1:
        waited = 1.0 if alone and not point["out_buffer"] else STORE_BESIDE_FETCH
        us += fit.store_us * waited * bm * problem.head_dim_v / TILE_ELEMENTS
    if not point["persistent"]:
        us += BLOCK_START_US
    if problem.causal:
        masked = -(-block_queries(point) // bn) * bm * bn * ALU_PER_MASK
        us += masked / (FP32_LANES.get(gpu.sm, 128) * gpu.clock_ghz * 1e3)
        if point["pingpong"]:
            us += fit.turn_us * max(warpgroups - 2, 0)
        if point["skip"]:
            own = WARPGROUP_ROWS / point.get("pack_heads", 1)
            hidden = (warpgroups - 1) / 2 * own / bn  # steps, the mean warpgroup's
            us -= SKIP_SAVES * hidden * step
    return max(us, 0.0)


def _step_us(candidate: Candidate, resident: int, gpu: GpuSpec, fit: Coefficients) -> float:
    """Time in which each of `resident` blocks of an SM makes one step."""
    tensor, smem, mufu, alu = _unit_us(candidate, gpu, fit)
    point = candidate.point
    if isinstance(fit, Wgmma):
        latency = fit.step_us * (1.0 if point["stages"] > 1 else SINGLE_STAGE)
        products, softmax = max(tensor, smem), mufu + alu
        share = fit.serial_share / point["consumer_warpgroups"]
        share *= fit.overlap_gain if point["overlap"] else 1.0
        share *= fit.pingpong_gain if point["pingpong"] else 1.0
        exposed = min(share, 1.0) * min(products, softmax)
        slowdown = 1.0 + SPILL_WEIGHT * candidate.spilled_bytes
        return (max(products, softmax) + exposed + latency) * slowdown
    latency = fit.step_us / (point["stages"] * resident)
    units = (tensor, smem, mufu, alu)
    # a block's warps meet at its barriers: other blocks and a warp's other rows fill the gaps
    independent = resident * point["BM"] / (MMA_M * point["warps"])
    busiest = max(units)
    exposed = fit.serial_share * (sum(units) - busiest) / independent
    slowdown = 1 + fit.spill_weight * candidate.spilled_bytes
    slowdown += fit.peel_weight if point["peel"] else 0.0
    return (resident * (busiest + exposed) + latency) * slowdown


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
        smem_rate *= BOOST
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
    on_fma = 1 / point["exp2_fma"] if point.get("exp2_fma", 0) else 0.0
    slots += scores * on_fma * FMA_PER_EXP2
    mufu = scores * (1 - on_fma) / (gpu.mufu_per_clock_per_sm * sm_clock)
    alu = slots / (FP32_LANES.get(gpu.sm, 128) * sm_clock)
    return tensor, smem, mufu, alu


def _smem_traffic(candidate: Candidate, depth: int, depth_v: int) -> int:
    """Bytes that one step reads from and writes to shared memory, conflicts counted as bytes."""
    problem, point = candidate.problem, candidate.point
    bm, bn = point["BM"], point["BN"]
    filled = bn * 2 * (depth + depth_v)
    if is_hopper(point):
        # each warpgroup's wgmma reads K and V once, and Q again at every step
        rows = 0 if point.get("q_in_registers", 0) else bm * depth * 2
        return filled * (1 + point["consumer_warpgroups"]) + rows
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
    """Bytes that all blocks ask of L2: every block reads its Q, writes its O, streams K and V.

    Blocks of a cluster ask for each tile of K and V once.
    """
    point = candidate.point
    bm, bn = point["BM"], point["BN"]
    width = (shape.head_dim + shape.head_dim_v) * candidate.problem.dtype.bytes
    tiles = key_tiles(shape, block_queries(point), bn)
    keys = sum(tiles) * bn // point.get("cluster", 1)
    planes = shape.batch * shape.kv_heads * head_packs(shape, point)
    return planes * width * (len(tiles) * bm + keys)
