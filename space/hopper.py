"""Parameters and predicates of the Hopper back end: TMA, wgmma and warp specialisation."""

from __future__ import annotations

from space.constraint import Constraint, over_block_smem
from space.gpu import GpuSpec
from space.params import Param, Point, Space
from space.variant import Problem

WARPGROUP_ROWS = 64  #: rows of one wgmma, and of one consumer warpgroup
MMA_STEP = 16  #: head dim columns that one wgmma multiplies
ELEMENT_BYTES = 2
SWIZZLES = (128, 64, 32)  #: bytes of a panel's row: what TMA and wgmma know
SHARING = ("gqa", "mqa")  #: variants in which query heads share a KV head
TILE_BARRIERS = 4  #: two slots of the tile scheduler, full and empty
TILE_SLOT_BYTES = 8

#: consumer warpgroups -> registers a thread of (consumer, producer); the pool is what the launch
#: gives, 65536 / threads rounded down to 8
REGISTERS_BY_ROLE = {1: (240, 24), 2: (240, 24), 3: (160, 32), 4: (112, 32)}
#: with the dynamic scheduler the producer has more to hold
REGISTERS_DYNAMIC = {**REGISTERS_BY_ROLE, 2: (232, 40)}
#: of a cluster too: with fewer ptxas spills in the producer's loop
REGISTERS_CLUSTER = {**REGISTERS_DYNAMIC, 1: (240, 40)}
#: registers beside the accumulators and P; with fewer left ptxas serialises the products
SPARE_REGISTERS = 28

HOPPER_PARAMS = (
    Param("BM", (64, 128, 192, 256), "query rows of a tile, 64 for each consumer warpgroup"),
    Param("BN", (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192), "key rows of a tile"),
    Param("consumer_warpgroups", (1, 2, 3, 4), "warpgroups that compute"),
    Param("stages", (1, 2, 3, 4), "K and V tiles in shared memory at once"),
    Param("q_stages", (1, 2), "Q tiles in shared memory at once: 2 fetches the next block's early"),
    Param("out_buffer", (1, 0, 2), "O staged in its own buffer (1), over Q (0), or not at all (2)"),
    Param("q_in_registers", (0, 1), "Q read from shared memory at every step, or once"),
    Param("exp2_fma", (0, 8, 4), "one column of so many takes 2^x on the FMA pipes"),
    Param("overlap", (1, 0), "next scores issued before this tile's softmax"),
    Param("pingpong", (0, 1), "consumer warpgroups take turns at the tensor cores"),
    Param("rescale_threshold", (8, 0), "log2 growth of the maximum before O is rescaled"),
    Param("late_wait", (0, 1), "last product waited for after the vote, or after the exponentials"),
    Param("integer_max", (0, 1), "maxima of three by integer comparison"),
    Param("persistent", (1, 0, 2), "0 a tile a block, 1 static, 2 dynamic tile scheduler"),
    Param("head_group", (0, 1, 2, 4, 8, 16, 32), "heads walked together, for the L2; 0 = all"),
    Param("skip", (0, 1), "a warpgroup passes over key tiles that none of its rows sees"),
    Param("causal_longest_first", (1, 0), "row blocks with most keys start first"),
    Param("swizzle", SWIZZLES, "bytes of a row of the panels in which tiles lie in shared memory"),
    Param("cluster", (1, 2), "blocks on neighbouring rows that load each K and V tile together"),
    Param("pack_heads", (1, 2, 4, 8), "query heads of one KV head that are rows of one tile"),
)


def hopper_space(problem: Problem) -> Space:
    """Return the search space of `problem` on the Hopper back end."""
    only_causal = ("skip", "causal_longest_first")
    offered = []
    for p in HOPPER_PARAMS:
        choices = p.choices
        if p.name in only_causal and not problem.causal:
            choices = (0,)
        if p.name == "pack_heads" and problem.variant not in SHARING:
            choices = (1,)
        if p.name == "swizzle":
            choices = tuple(c for c in choices if _packs(problem, c))
        offered.append(Param(p.name, choices, p.meaning))
    return Space(tuple(offered))


def padded(columns: int, swizzle: int) -> int:
    """Columns of shared memory that a tile of `columns` takes: whole panels, the rest is zero."""
    panel = swizzle // ELEMENT_BYTES
    return -(-columns // panel) * panel


def _packs(problem: Problem, swizzle: int) -> bool:
    """Whether tiles take less shared memory than with the next wider swizzle; 128 always does."""
    if swizzle == SWIZZLES[0]:
        return True
    dims = (problem.head_dim, problem.head_dim_v)
    return any(padded(d, swizzle) < padded(d, 2 * swizzle) for d in dims)


def hopper_smem_bytes(head_dim: int, head_dim_v: int, point: Point) -> int:
    """Exact dynamic shared memory: Q, the K and V rings, O's buffer if it has one, barriers."""
    rows, stages, row_stages = point["BM"], point["stages"], point.get("q_stages", 1)
    swizzle = point.get("swizzle", SWIZZLES[0])
    row, row_v = (padded(d, swizzle) * ELEMENT_BYTES for d in (head_dim, head_dim_v))
    q = row_stages * rows * row
    kv = stages * point["BN"] * (row + row_v)
    o = rows * row_v if point.get("out_buffer", 1) == 1 else 0
    barriers = 8 * (2 * (row_stages + 2 * stages) + TILE_BARRIERS)
    return q + kv + o + barriers + TILE_SLOT_BYTES


def registers_by_role(consumers: int, scheduler: int, cluster: int = 1) -> tuple[int, int]:
    """Registers of a (consumer, producer) thread."""
    if cluster > 1:
        return REGISTERS_CLUSTER[consumers]
    return (REGISTERS_DYNAMIC if scheduler == 2 else REGISTERS_BY_ROLE)[consumers]


def accumulator_registers(head_dim: int, head_dim_v: int, point: Point) -> int:
    """Registers a consumer thread needs for O, S, P and, by choice, Q."""
    p = point["BN"] // 4 if point["overlap"] else 0  # else P takes the place of S
    q = padded(head_dim, SWIZZLES[0]) // 4 if point.get("q_in_registers", 0) else 0
    return head_dim_v // 2 + point["BN"] // 2 + p + q


def _rows_per_warpgroup(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    rows, consumers = point["BM"], point["consumer_warpgroups"]
    if rows != consumers * WARPGROUP_ROWS:
        return f"BM={rows} is not {WARPGROUP_ROWS} rows for each of {consumers} warpgroups"
    return None


def _fits_smem(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    return over_block_smem(hopper_smem_bytes(problem.head_dim, problem.head_dim_v, point), gpu)


def _fits_registers(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    consumers = point["consumer_warpgroups"]
    there, _ = registers_by_role(consumers, point["persistent"], point.get("cluster", 1))
    wanted = accumulator_registers(problem.head_dim, problem.head_dim_v, point) + SPARE_REGISTERS
    if wanted > there:
        return f"about {wanted} registers a thread wanted, {there} with {consumers} warpgroups"
    return None


def _out_over_rows(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    if point["out_buffer"] == 0 and problem.head_dim_v > problem.head_dim:
        return f"O has {problem.head_dim_v} columns and Q only {problem.head_dim} to hold them"
    return None


def _takes_effect(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    if point["consumer_warpgroups"] == 1 and (point["pingpong"] or point["skip"]):
        return "pingpong and skip are for more than one consumer warpgroup"
    if point.get("late_wait", 0) and not point["overlap"]:
        return "late_wait is for overlapped products"
    if point["integer_max"] and not point["rescale_threshold"]:
        return "integer_max needs a rescale threshold"
    if point["q_stages"] > 1 and not point["persistent"]:
        return "a second Q stage is for persistent blocks"
    return None


def _packs_columns(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    swizzle = point.get("swizzle", SWIZZLES[0])
    if not _packs(problem, swizzle):
        return (
            f"swizzle={swizzle} pads head dims {problem.head_dim} and {problem.head_dim_v} to as "
            f"many columns as {2 * swizzle}"
        )
    return None


def _walks_in_pairs(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    """A ticket is drawn by one block; its cluster must take the same tile of keys and rows."""
    if point.get("cluster", 1) > 1 and point["persistent"] == 2:
        return "blocks of a cluster take their tiles together: persistent 0 or 1, not tickets"
    return None


def _turns_end(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    """A warpgroup passes its turn after the hidden tile's values came, which in one stage wait
    for the product that the next warpgroup issues in that turn."""
    if point["skip"] and point["pingpong"] and point["overlap"] and point["stages"] == 1:
        return "passing over tiles in turns needs 2 stages, with 1 the warpgroups wait for ever"
    return None


def _rows_stay(problem: Problem, point: Point, gpu: GpuSpec) -> str | None:
    """ptxas 13.0 puts P into the registers of Q's fragments, which the next key tile reads again.

    Seen in the machine code of every such kernel and of no other; their outputs were wrong.
    """
    columns = -(-problem.head_dim // MMA_STEP) * MMA_STEP
    if point.get("q_in_registers", 0) and not point["overlap"] and columns == point["BN"]:
        return f"ptxas loses Q in registers where its {columns} columns are as many as BN"
    return None


HOPPER_CONSTRAINTS = (
    Constraint("rows_per_warpgroup", _rows_per_warpgroup),
    Constraint("takes_effect", _takes_effect),
    Constraint("packs_columns", _packs_columns),
    Constraint("turns_end", _turns_end),
    Constraint("rows_stay", _rows_stay),
    Constraint("out_over_rows", _out_over_rows),
    Constraint("fits_smem", _fits_smem),
    Constraint("fits_registers", _fits_registers),
    Constraint("walks_in_pairs", _walks_in_pairs),
)
