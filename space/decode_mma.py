"""Parameters and predicates of decode kernels with warp-level MMA: sm_75 to sm_89, and sm_90a.

A block holds few rows (query heads of one KV head), so its warps form a grid: `warps` /
`column_warps` of them down the rows, `column_warps` across. Warps of the same rows take shares of a
tile's keys in Q.K^T and shares of V's columns in P.V; P and the row maxima meet in shared memory.
"""

from __future__ import annotations

from space.constraint import Constraint, over_block_smem, over_sm_smem
from space.decode import fits_combine
from space.gpu import GpuSpec
from space.params import Param, Point, Space
from space.tiles import CHUNK_BYTES, MMA_M, MMA_N, WARP, row_pitch_bytes
from space.variant import Problem

DECODE_MMA_PARAMS = (
    Param("BM", (16, 32, 64), "rows of a tile: query heads of one KV head, of all its queries"),
    Param("BN", (16, 32, 64, 128), "key rows of a tile"),
    Param("warps", (2, 4, 8), "warps of a block"),
    Param("column_warps", (1, 2, 4, 8), "warps that share rows, keys and columns split over them"),
    Param("stages", (1, 2, 3, 4), "K and V tiles in shared memory at once"),
    Param("swizzle", (128, 64, 32, 0), "shared-memory layout: bytes of the swizzle, 0 = padded"),
    Param("q_in_registers", (0, 1), "Q read from shared memory once, or at every step"),
    Param("rescale_threshold", (8, 0), "log2 growth of the maximum before O is rescaled"),
    Param("blocks_per_sm", (1, 2, 3, 4), "resident blocks the compiler aims at"),
    Param("split_blocks", (1, 2, 3, 4), "blocks for each SM that the keys are split to give"),
    Param("min_split_tiles", (1, 2, 4), "key tiles of a split at least"),
    Param("combine_groups", (1, 4, 8, 16), "groups of threads that share the splits of a row"),
)

#: registers beside the tiles: addresses, bounds, strides
SPARE_REGISTERS = 48


def mma_decode_space(problem: Problem, gpu: GpuSpec) -> Space:
    """Return the search space of a decode problem, without choices that are never legal."""
    params = []
    for p in DECODE_MMA_PARAMS:
        choices = p.choices
        if p.name == "stages" and not gpu.has_cp_async:
            choices = (1,)  # register-staged copies hold one tile in flight
        if p.name == "swizzle":
            rows = (2 * problem.head_dim, 2 * problem.head_dim_v)
            choices = tuple(c for c in choices if c == 0 or all(n % c == 0 for n in rows))
        params.append(Param(p.name, choices, p.meaning))
    return Space(tuple(params))


def is_decode_mma(point: Point) -> bool:
    """Whether a point is one of this back end."""
    return point.get("column_warps", 0) > 0


def shares_rows_buffer(problem: Problem, point: Point) -> bool:
    """Whether key tiles lie over Q, which is in registers by then.

    Only where Q is large: elsewhere the first tiles are on their way while Q is read.
    """
    return bool(point["q_in_registers"]) and problem.latent


def mma_decode_smem_bytes(problem: Problem, point: Point) -> int:
    """Exact dynamic shared memory of the partial kernel; the plan's map agrees.

    Q, the K and V stages (V is part of K where it is latent), and where warps share rows P and
    one float a row and column warp.
    """
    rows, keys, shared = point["BM"], point["BN"], point["column_warps"] > 1
    k_pitch = row_pitch_bytes(problem.head_dim, point["swizzle"])
    v_pitch = 0 if problem.latent else row_pitch_bytes(problem.head_dim_v, point["swizzle"])
    q, kv = rows * k_pitch, point["stages"] * keys * (k_pitch + v_pitch)
    tiles = max(q, kv) if shares_rows_buffer(problem, point) else q + kv
    if not shared:
        return tiles
    return tiles + rows * row_pitch_bytes(keys, 0) + 4 * rows * point["column_warps"]


def mma_decode_registers(problem: Problem, point: Point, staged: bool = False) -> int:
    """Estimated registers of a thread; `staged` when its copies pass through them."""
    columns = point["column_warps"]
    tiles_m = point["BM"] * columns // point["warps"] // MMA_M
    o = tiles_m * problem.head_dim_v // columns // 2
    s = tiles_m * point["BN"] // columns // 2
    p = s // 2
    q = tiles_m * problem.head_dim // 4 if point["q_in_registers"] else 4 * tiles_m
    copies = 0
    if staged:
        width = problem.head_dim + (0 if problem.latent else problem.head_dim_v)
        chunks = -(-point["BN"] * width * 2 // CHUNK_BYTES // (point["warps"] * WARP))
        copies = 4 * chunks + problem.head_dim // 16
    return o + s + p + q + copies + 8 * tiles_m + SPARE_REGISTERS


def _warp_grid(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    warps, columns = point["warps"], point["column_warps"]
    if warps % columns:
        return f"column_warps={columns} does not divide warps={warps}"
    rows = point["BM"] * columns / warps
    if rows not in (16, 32, 64):
        return f"BM * column_warps / warps = {rows:g} rows a warp is not 16, 32 or 64"
    return None


def uneven_share(problem: Problem, point: Point) -> str | None:
    """Return why column warps cannot share BN and Dv at the point's swizzle, or None."""
    columns, swizzle = point["column_warps"], point["swizzle"]
    for what, length in (("BN", point["BN"]), ("Dv", problem.head_dim_v)):
        if length % (MMA_N * columns):
            return f"{what}={length} is not a multiple of 8 for each of {columns} column warps"
    if problem.head_dim % 16 and point["BN"] // columns % 16:
        return (
            f"BN / column_warps = {point['BN'] // columns} keys a warp is not a multiple of 16, "
            f"as head dim {problem.head_dim} needs"
        )
    share = problem.head_dim_v // columns * 2
    if columns > 1 and swizzle and share % swizzle and swizzle % share:
        return f"swizzle={swizzle} and the {share} bytes of V's row for each warp divide unevenly"
    return None


def _columns_shared(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    return uneven_share(problem, point)


def _fits_smem(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    return over_block_smem(mma_decode_smem_bytes(problem, point), gpu)


def _fits_registers(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    wanted = mma_decode_registers(problem, point, not gpu.has_cp_async)
    if wanted > gpu.registers_per_thread:
        return f"about {wanted} registers a thread wanted, {gpu.registers_per_thread} there"
    return None


def _fits_sm(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    blocks = point["blocks_per_sm"]
    if (fault := over_sm_smem(mma_decode_smem_bytes(problem, point), blocks, gpu)) is not None:
        return fault
    threads = blocks * point["warps"] * WARP
    registers = mma_decode_registers(problem, point, not gpu.has_cp_async)
    budget = min(gpu.registers_per_sm // threads // 8 * 8, gpu.registers_per_thread)
    if registers > budget:
        return f"{blocks} blocks an SM leave {budget} registers a thread, about {registers} wanted"
    return None


DECODE_MMA_CONSTRAINTS = (
    Constraint("warp_grid", _warp_grid),
    Constraint("columns_shared", _columns_shared),
    Constraint("fits_smem", _fits_smem),
    Constraint("fits_registers", _fits_registers),
    Constraint("fits_sm", _fits_sm),
    Constraint("fits_combine", fits_combine),
)
