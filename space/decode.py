"""Parameters and predicates of decode kernels on the Hopper back end.

A block has 64 packed rows (the query heads of one KV head, for 1 to 8 queries) and one split of the
keys. One consumer warpgroup computes the scores and the output; for absorbed MLA, whose output has
512 columns, a second one takes half of them.
"""

from __future__ import annotations

from space.constraint import Constraint, over_block_smem, over_sm_smem
from space.gpu import GpuSpec
from space.hopper import MMA_STEP, REGISTERS_BY_ROLE, WARPGROUP_ROWS
from space.params import Param, Point, Space
from space.variant import Problem

PANEL_COLUMNS, ROW_BYTES = 64, 128  #: of a panel of a tile, with 128-byte swizzle
BARRIER_BYTES = 8
PRODUCER_THREADS = 32
BLOCK_THREADS_MAX = 1024
COMBINE_WIDTH = 4  #: output columns of a thread that combines splits
PANEL_REGISTERS = 16  #: of a thread, for 64 columns of its warpgroup's rows of Q
#: registers beside the accumulators, the scores, P and Q
SPARE_REGISTERS = 44

DECODE_PARAMS = (
    Param("BM", (WARPGROUP_ROWS,), "packed rows of a block: query heads of one KV head"),
    Param("BN", (32, 48, 64, 80, 96, 112, 128, 160, 192), "key rows of a tile"),
    Param("consumer_warpgroups", (1, 2), "warpgroups that share the output's columns"),
    Param("stages", (2, 3, 4, 5, 6, 8), "K and V tiles in shared memory at once"),
    Param("blocks_per_sm", (1, 2, 3), "blocks that share an SM"),
    Param("overlap", (1, 0), "next scores issued before this tile's softmax"),
    Param("evict_first", (1, 0), "keys and values are the first to leave the L2"),
    Param("rescale_threshold", (8, 0), "log2 growth of the maximum before O is rescaled"),
    Param("integer_max", (0, 1), "maxima of three by integer comparison"),
    Param("split_blocks", (1, 2, 3, 4), "blocks for each SM that the splits of the keys aim at"),
    Param("min_split_tiles", (1, 2, 4), "fewest key tiles of a split"),
    Param("combine_early", (0, 1), "splits' combination is scheduled before results are stored"),
    Param("combine_groups", (1, 4, 8, 16), "groups of threads that share the splits of a row"),
    Param("q_panels", (0, 1), "panels of 64 columns of Q that stay in registers"),
    Param("split_cluster", (1, 2), "blocks of a cluster, which combine their splits"),
    Param("column_blocks", (1, 2), "blocks of the same rows that share the output's columns"),
)


def decode_space(problem: Problem) -> Space:
    """Return the search space of a decode problem on the Hopper back end."""
    shared: dict[str, tuple[int, ...]] = {"consumer_warpgroups": (2 if problem.latent else 1,)}
    if not problem.latent:  # memory bounds these: their products may read Q as often as they like
        shared |= {"q_panels": (0,), "column_blocks": (1,)}
    return Space(DECODE_PARAMS).restrict(shared)


def panels(columns: int) -> int:
    """Panels of 64 columns that hold `columns`."""
    return -(-columns // PANEL_COLUMNS)


def exchange_bytes(keys: int) -> int:
    """Shared memory by which P, and two numbers a thread, go from one warpgroup to the other."""
    return 128 * (keys // MMA_STEP * 16 + 8)


def decode_smem_bytes(problem: Problem, point: Point) -> int:
    """Exact dynamic shared memory: Q, the rings of K and V, the exchange of P, barriers."""
    keys, stages = point["BN"], point["stages"]
    q = WARPGROUP_ROWS * panels(problem.head_dim) * ROW_BYTES
    columns = panels(problem.head_dim) + (0 if problem.latent else panels(problem.head_dim_v))
    ring = stages * keys * columns * ROW_BYTES
    exchange = exchange_bytes(keys) if point["consumer_warpgroups"] > 1 else 0
    parts = 3 if problem.latent else 2
    return q + ring + exchange + 2 * parts * stages * BARRIER_BYTES


def decode_threads(consumers: int) -> int:
    """Threads of a block: the consumer warpgroups, and one warp that loads.

    Beside two consumers it is a warpgroup, which gives its registers to them.
    """
    return 128 * consumers + (PRODUCER_THREADS if consumers == 1 else 128)


def decode_registers(problem: Problem, point: Point) -> int:
    """Registers that the warpgroup with the scores needs, about."""
    keys = point["BN"]
    p = keys // 4 if point["overlap"] else 0  # else P takes the place of S
    own = problem.head_dim_v // point["consumer_warpgroups"] // point.get("column_blocks", 1)
    q = PANEL_REGISTERS * point.get("q_panels", 0)
    return own // 2 + keys // 2 + p + q + SPARE_REGISTERS


def _columns_of_warpgroups(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    consumers = point["consumer_warpgroups"]
    if problem.latent != (consumers == 2):
        return "two warpgroups share the columns of absorbed MLA, one has all others"
    return None


def _fits_smem(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    wanted = decode_smem_bytes(problem, point)
    return over_block_smem(wanted, gpu) or over_sm_smem(wanted, point["blocks_per_sm"], gpu)


def _fits_registers(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    consumers, blocks = point["consumer_warpgroups"], point["blocks_per_sm"]
    threads = decode_threads(consumers) * blocks
    # an SM's quarters each hold a quarter of the registers and whole warps
    warps = -(-threads // 128) * 4
    there = min(gpu.registers_per_thread, gpu.registers_per_sm // (32 * warps) // 8 * 8)
    if consumers > 1 and blocks == 1:
        there, _ = REGISTERS_BY_ROLE[consumers]
    wanted = decode_registers(problem, point)
    if wanted > there:
        return f"about {wanted} registers a thread wanted, {there} for {threads} threads an SM"
    return None


def _tiles_of_pages(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    page, keys = problem.page, point["BN"]
    if page and page % keys and keys % page:
        return f"tiles of {keys} keys and pages of {page}: one must be a multiple of the other"
    return None


def _takes_effect(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    if point["integer_max"] and not point["rescale_threshold"]:
        return "integer_max needs a rescale threshold"
    if point.get("split_cluster", 1) > 1 and point.get("column_blocks", 1) > 1:
        return "a cluster combines splits of all columns: column_blocks 1"
    return None


def fits_combine(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    """Return why the threads that combine a row do not fit a block, or None."""
    threads = point["combine_groups"] * problem.head_dim_v // COMBINE_WIDTH
    if point["combine_groups"] > 1 and threads > BLOCK_THREADS_MAX:
        return f"{threads} threads would combine a row, {BLOCK_THREADS_MAX} fit a block"
    return None


DECODE_CONSTRAINTS = (
    Constraint("columns_of_warpgroups", _columns_of_warpgroups),
    Constraint("takes_effect", _takes_effect),
    Constraint("tiles_of_pages", _tiles_of_pages),
    Constraint("fits_smem", _fits_smem),
    Constraint("fits_registers", _fits_registers),
    Constraint("fits_combine", fits_combine),
)
