"""Named predicates that prune a point before any compile, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from space.constraint import Constraint, over_block_smem, over_sm_smem
from space.decode import DECODE_CONSTRAINTS, decode_registers, decode_smem_bytes, decode_space
from space.decode_mma import (
    DECODE_MMA_CONSTRAINTS,
    is_decode_mma,
    mma_decode_registers,
    mma_decode_smem_bytes,
    mma_decode_space,
)
from space.gpu import GpuSpec
from space.hopper import HOPPER_CONSTRAINTS, hopper_smem_bytes, hopper_space
from space.params import Param, Point, Space
from space.tiles import CHUNK_BYTES, MMA_M, WARP, row_pitch_bytes
from space.variant import Phase, Problem, SpaceError

#: Parameters of the back ends with warp-level MMA: sm_75, sm_80, sm_89, and their code on sm_90a.
MMA_SYNC_PARAMS = (
    Param("BM", (32, 64, 96, 128, 192, 256), "query rows of a tile"),
    Param("BN", (16, 32, 48, 64, 80, 96, 112, 128, 160, 192), "key rows of a tile"),
    Param("warps", (2, 4, 8), "warps of a block, each with BM/warps rows"),
    Param("stages", (1, 2, 3), "K and V tiles in shared memory at once"),
    Param("swizzle", (128, 64, 32, 0), "shared-memory layout: bytes of the swizzle, 0 = padded"),
    Param("q_in_registers", (0, 1), "Q read from shared memory once, or at every step"),
    Param("p_in_registers", (1, 0), "P handed to the second GEMM in registers or through shared"),
    Param("rescale_threshold", (8, 0), "log2 growth of the maximum before O is rescaled"),
    Param("peel", (0, 1), "masked blocks in a loop of their own"),
    Param("blocks_per_sm", (1, 2, 3, 4), "resident blocks the compiler aims at"),
    Param("head_group", (1, 8, 32, 0), "heads walked together, for the L2; 0 = all"),
    Param(
        "epilogue_smem", (1, 0), "O written through shared memory in 16-byte chunks, or directly"
    ),
    Param("causal_longest_first", (1, 0), "row blocks with most keys start first"),
)


class Backend(StrEnum):
    """Which kind of kernel is written: the atoms decide the parameters."""

    AUTO = "auto"  # the fastest that the GPU has
    MMA_SYNC = "mma_sync"  # warp-level MMA, sm_75 and later
    WGMMA = "wgmma"  # TMA, wgmma and warp specialisation, sm_90a


def space_for(problem: Problem, gpu: GpuSpec, backend: Backend = Backend.AUTO) -> Space:
    """Return the search space of `problem` on `gpu`, without choices that are never legal.

    Raises SpaceError when the GPU does not have what `backend` needs.
    """
    if backend is Backend.WGMMA and gpu.sm != 90:
        raise SpaceError(f"{gpu.name} (sm_{gpu.sm}) has no wgmma; use --backend mma_sync")
    if backend is not Backend.MMA_SYNC and gpu.sm == 90:
        return decode_space(problem) if problem.phase is Phase.DECODE else hopper_space(problem)
    if problem.phase is Phase.DECODE:
        return mma_decode_space(problem, gpu)
    params = []
    for p in MMA_SYNC_PARAMS:
        choices = p.choices
        if p.name == "stages" and not gpu.has_cp_async:
            choices = (1,)  # register-staged copies hold one tile in flight
        if p.name == "causal_longest_first" and not problem.causal:
            choices = (0,)
        if p.name == "swizzle":
            chunks = (problem.head_dim // 8, problem.head_dim_v // 8)
            choices = tuple(
                c for c in choices if c == 0 or all(n % (c // CHUNK_BYTES) == 0 for n in chunks)
            )
        params.append(Param(p.name, choices, p.meaning))
    return Space(tuple(params))


def is_hopper(point: Point) -> bool:
    """Whether a point is one of the Hopper back end."""
    return point.get("consumer_warpgroups", 0) > 0


def is_decode_hopper(point: Point) -> bool:
    """Whether a point is one of the Hopper back end's decode kernels."""
    return is_hopper(point) and point.get("combine_groups", 0) > 0


def smem_bytes(problem: Problem, point: Point) -> int:
    """Exact dynamic shared memory of the forward kernel at `point`; the plan's map agrees."""
    if is_decode_mma(point):
        return mma_decode_smem_bytes(problem, point)
    if is_decode_hopper(point):
        return decode_smem_bytes(problem, point)
    if is_hopper(point):
        return hopper_smem_bytes(problem.head_dim, problem.head_dim_v, point)
    swizzle, stages = point["swizzle"], point["stages"]
    k_pitch = row_pitch_bytes(problem.head_dim, swizzle)
    v_pitch = row_pitch_bytes(problem.head_dim_v, swizzle)
    q = point["BM"] * k_pitch
    kv = stages * point["BN"] * (k_pitch + v_pitch)
    p = 0 if point["p_in_registers"] else point["BM"] * row_pitch_bytes(point["BN"], 0)
    # Q in registers is read once, before the first K tile lands on the same bytes
    tiles = max(q, kv) + p if point["q_in_registers"] else q + kv + p
    # O is staged over the tiles once they are read no more
    return max(tiles, point["BM"] * v_pitch) if point["epilogue_smem"] else tiles


def register_estimate(problem: Problem, point: Point) -> int:
    """Estimated registers a thread needs: accumulators, Q fragments and addressing."""
    if is_decode_mma(point):
        return mma_decode_registers(problem, point)
    if is_decode_hopper(point):
        return decode_registers(problem, point)
    tiles_m = point["BM"] // point["warps"] // MMA_M
    o = tiles_m * problem.head_dim_v // 2
    s = tiles_m * point["BN"] // 2
    q = tiles_m * problem.head_dim // 4 if point["q_in_registers"] else 4 * tiles_m
    return o + s + q + 8 * tiles_m + 28


def _rows_per_warp(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    rows = point["BM"] / point["warps"]
    if rows % MMA_M or rows > 64:
        return f"BM/warps = {rows:g} rows a warp is not 16, 32, 48 or 64"
    return None


def _fits_smem(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    return over_block_smem(smem_bytes(problem, point), gpu)


def _fits_registers(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    wanted = register_estimate(problem, point)
    if wanted > gpu.registers_per_thread + 12:
        return f"about {wanted} registers a thread wanted, {gpu.registers_per_thread} there"
    return None


def _fits_sm(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    blocks = point["blocks_per_sm"]
    if (fault := over_sm_smem(smem_bytes(problem, point), blocks, gpu)) is not None:
        return fault
    threads = blocks * point["warps"] * WARP
    if threads > gpu.threads_per_sm:
        return f"{blocks} blocks an SM want {threads} threads, {gpu.threads_per_sm} there"
    registers = register_estimate(problem, point)
    budget = min(gpu.registers_per_sm // threads // 8 * 8, gpu.registers_per_thread)
    if blocks > 1 and registers > budget + 12:
        return f"{blocks} blocks an SM leave {budget} registers a thread, about {registers} wanted"
    return None


def _atom_divides_keys(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    if point["BN"] % 16:
        return f"BN={point['BN']} is not a multiple of the 16 keys of an MMA step"
    return None


CONSTRAINTS = (
    Constraint("rows_per_warp", _rows_per_warp),
    Constraint("atom_divides_keys", _atom_divides_keys),
    Constraint("fits_smem", _fits_smem),
    Constraint("fits_registers", _fits_registers),
    Constraint("fits_sm", _fits_sm),
)


def constraints_of(names: tuple[str, ...]) -> tuple[Constraint, ...]:
    """Return the predicates of the back end and phase whose parameters are called `names`."""
    if "consumer_warpgroups" in names:
        return DECODE_CONSTRAINTS if "combine_groups" in names else HOPPER_CONSTRAINTS
    return DECODE_MMA_CONSTRAINTS if "column_warps" in names else CONSTRAINTS


def violated(problem: Problem, point: Point, gpu: GpuSpec) -> tuple[str, str] | None:
    """Return (name, reason) of the first constraint that `point` breaks, or None when legal."""
    for c in constraints_of(tuple(name for name, _ in point.items)):
        if (reason := c.reason(problem, point, gpu)) is not None:
            return c.name, reason
    return None


@dataclass(frozen=True, slots=True)
class Census:
    """How many points are legal, and how many each predicate prunes first."""

    legal: int
    total: int
    pruned: tuple[tuple[str, int], ...]


def census(problem: Problem, gpu: GpuSpec, space: Space) -> Census:
    """Count the legal points of `space`, and the others by the predicate that prunes them."""
    pruned: dict[str, int] = {}
    legal = 0
    for point in space.points():
        found = violated(problem, point, gpu)
        if found is None:
            legal += 1
        else:
            pruned[found[0]] = pruned.get(found[0], 0) + 1
    return Census(legal, space.size(), tuple((k, n) for k, n in pruned.items() if n))
