"""Deterministic first points of a search: known to work, then known to be fast elsewhere.

Each seed starts from the tile sizes that hand-written kernels use for its head dim and is then
moved to the closest point that every constraint of the GPU admits. They are the offline default
and the first trials of every run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llm_proposer.decode_seeds import hopper_decode_rows, mma_decode_rows
from space.constraints import violated
from space.gpu import GpuSpec
from space.params import Param, Point, Space
from space.variant import Phase, Problem

#: What a seed says about the parameters that its row leaves out: the least risky choice.
CONSERVATIVE = {
    "swizzle": 128,
    "q_in_registers": 0,
    "p_in_registers": 1,
    "rescale_threshold": 0,
    "peel": 1,
    "blocks_per_sm": 1,
    "head_group": 1,
    "epilogue_smem": 1,
    "causal_longest_first": 1,
    "q_stages": 1,
    "out_buffer": 1,
    "overlap": 0,
    "pingpong": 0,
    "integer_max": 0,
    "persistent": 0,
    "skip": 0,
    "late_wait": 0,
    "exp2_fma": 0,
    "cluster": 1,
    "split_cluster": 1,
    "column_blocks": 1,
    "pack_heads": 1,
}

Row = Mapping[str, int]


def _sync(rows: int, keys: int, warps: int, stages: int, **others: int) -> Row:
    """A row for the back ends with warp-level MMA."""
    return {"BM": rows, "BN": keys, "warps": warps, "stages": stages, **others}


def _hopper(rows: int, keys: int, stages: int, **others: int) -> Row:
    """A row for the Hopper back end: 64 query rows a consumer warpgroup, blocks that persist."""
    return {
        "BM": rows, "BN": keys, "consumer_warpgroups": rows // 64, "stages": stages,
        "persistent": 1, "head_group": 1, "overlap": 1, "rescale_threshold": 8,
        "integer_max": 1, **others,
    }  # fmt: skip


#: Rows by the largest head dim they are meant for; the first of each is the known-good trial.
AMPERE: dict[int, tuple[Row, ...]] = {
    64: (
        _sync(128, 64, 4, 1),
        _sync(128, 64, 4, 2, rescale_threshold=8),
        _sync(128, 128, 4, 1, rescale_threshold=8, q_in_registers=1),
        _sync(128, 64, 4, 2, rescale_threshold=8, q_in_registers=1, blocks_per_sm=2),
        _sync(128, 128, 4, 2, rescale_threshold=8, blocks_per_sm=2),
        _sync(64, 64, 4, 2, rescale_threshold=8, q_in_registers=1, blocks_per_sm=3),
        _sync(256, 64, 8, 2, rescale_threshold=8),
        _sync(192, 64, 4, 2, rescale_threshold=8),
    ),
    128: (
        _sync(128, 64, 4, 1),
        _sync(128, 64, 4, 2, rescale_threshold=8),
        _sync(128, 64, 4, 1, rescale_threshold=8, blocks_per_sm=2),
        _sync(128, 32, 4, 1, rescale_threshold=8, blocks_per_sm=2),
        _sync(64, 64, 4, 1, rescale_threshold=8, blocks_per_sm=2, q_in_registers=1),
        _sync(128, 64, 8, 2, rescale_threshold=8),
        _sync(128, 128, 8, 1, rescale_threshold=8),
        _sync(256, 64, 8, 1, rescale_threshold=8),
    ),
    192: (
        _sync(128, 64, 8, 1),
        _sync(128, 64, 8, 2, rescale_threshold=8),
        _sync(128, 32, 4, 2, rescale_threshold=8),
        _sync(128, 32, 4, 1, rescale_threshold=8, blocks_per_sm=2),
        _sync(64, 64, 4, 1, rescale_threshold=8, blocks_per_sm=2),
        _sync(128, 48, 4, 1, rescale_threshold=8),
        _sync(256, 32, 8, 1, rescale_threshold=8),
    ),
    256: (
        _sync(64, 32, 4, 1),
        _sync(64, 64, 4, 1, rescale_threshold=8),
        _sync(64, 32, 4, 2, rescale_threshold=8),
        _sync(128, 64, 8, 1, rescale_threshold=8),
        _sync(128, 32, 8, 2, rescale_threshold=8),
        _sync(128, 32, 8, 1, rescale_threshold=8),
    ),
}
#: 64 KiB of shared memory and no asynchronous copies: small tiles, two blocks where they fit.
TURING: dict[int, tuple[Row, ...]] = {
    64: (
        _sync(64, 64, 4, 1),
        _sync(128, 64, 4, 1, rescale_threshold=8),
        _sync(64, 64, 4, 1, rescale_threshold=8, blocks_per_sm=2, q_in_registers=1),
        _sync(128, 64, 8, 1, rescale_threshold=8),
        _sync(128, 32, 4, 1, rescale_threshold=8, blocks_per_sm=2),
    ),
    128: (
        _sync(64, 64, 4, 1),
        _sync(128, 32, 4, 1, rescale_threshold=8),
        _sync(128, 64, 8, 1, rescale_threshold=8),
        _sync(64, 32, 4, 1, rescale_threshold=8, blocks_per_sm=2),
    ),
    192: (
        _sync(64, 32, 4, 1),
        _sync(64, 48, 4, 1, rescale_threshold=8),
        _sync(128, 16, 8, 1, rescale_threshold=8),
    ),
    256: (
        _sync(64, 32, 4, 1),
        _sync(64, 16, 4, 1, rescale_threshold=8),
        _sync(32, 32, 2, 1, rescale_threshold=8),
    ),
}
#: Tiles that FlashAttention-3 uses and those that were measured to be faster.
HOPPER: dict[int, tuple[Row, ...]] = {
    64: (
        _hopper(256, 64, 2, pingpong=1, q_stages=2, late_wait=1),
        _hopper(256, 64, 3, q_stages=2),
        _hopper(192, 128, 2, pingpong=1, q_stages=2, late_wait=1),
        _hopper(256, 64, 3, pingpong=1, persistent=2, late_wait=1),
        _hopper(192, 128, 2, late_wait=1),
    ),
    128: (
        _hopper(128, 128, 2, pingpong=1, q_stages=2, late_wait=1),
        _hopper(192, 80, 2, pingpong=1, late_wait=1),
        _hopper(128, 128, 2, q_stages=2, late_wait=1),
        _hopper(192, 64, 2, q_stages=2, out_buffer=0, pingpong=1),
        _hopper(192, 80, 2, persistent=2, late_wait=1),
        _hopper(128, 128, 2, pingpong=1, q_stages=2, late_wait=1, head_group=32),
        _hopper(128, 64, 3, pingpong=1, q_stages=2),
    ),
    192: (
        _hopper(128, 96, 2, pingpong=1, q_stages=2, out_buffer=0, late_wait=1),
        _hopper(128, 128, 2, pingpong=1, out_buffer=0),
        _hopper(128, 96, 2, pingpong=1, q_stages=2, out_buffer=0),
        _hopper(128, 112, 2, pingpong=1),
        _hopper(128, 96, 2, pingpong=1, late_wait=1),
        _hopper(128, 64, 2, pingpong=1, q_stages=2),
        _hopper(192, 64, 2, pingpong=1, out_buffer=0),
    ),
    256: (
        _hopper(128, 64, 2, pingpong=1, out_buffer=0, late_wait=1),
        _hopper(128, 64, 2, pingpong=1, out_buffer=0, head_group=8),
        _hopper(128, 64, 2, pingpong=1, out_buffer=0),
        _hopper(128, 64, 2, out_buffer=0, head_group=4),
    ),
}
#: Rows of packed heads, behind the first one where query heads share KV heads.
HOPPER_PACKED: dict[int, tuple[Row, ...]] = {
    64: (_hopper(256, 64, 3, pingpong=1, q_stages=2, pack_heads=4),),
    128: (
        _hopper(192, 80, 2, pingpong=1, q_stages=2, late_wait=1, pack_heads=4),
        _hopper(192, 80, 2, pingpong=1, q_stages=2, late_wait=1, pack_heads=8),
        _hopper(192, 80, 2, pingpong=1, late_wait=1, pack_heads=4),
        _hopper(128, 96, 2, pingpong=1, q_stages=2, late_wait=1, pack_heads=4),
    ),
}
#: Which row is the first under a causal mask, where it is not the first: at head dim 64 turns and
#: the late wait cost short triangular work more than they give, and a third stage is worth more.
HOPPER_CAUSAL_FIRST = {64: 1}


def seeds(problem: Problem, gpu: GpuSpec, space: Space) -> tuple[Point, ...]:
    """Return the legal first points of `problem` on `gpu`, best guess order, without repeats.

    The first is the known-good trial: it should work when anything does. Empty only when no
    point of `space` is legal.
    """
    found: dict[str, Point] = {}
    for nth, row in enumerate(_rows(problem, gpu, space)):
        if problem.causal and problem.phase is Phase.PREFILL and (nth or "overlap" in row):
            row = _for_causal(row)
        point = nearest_legal(problem, gpu, space, {**CONSERVATIVE, **row})
        if point is not None:
            found.setdefault(point.key, point)
    return tuple(found.values())


def _for_causal(row: Row) -> Row:
    """A row for triangular work: uneven blocks are started longest first, over several heads."""
    if "overlap" not in row:
        return {**row, "head_group": 0}
    heads = row["head_group"] if row["head_group"] > 1 else 16
    return {**row, "persistent": 2, "head_group": heads, "skip": int(row["BM"] > 128)}


def _rows(problem: Problem, gpu: GpuSpec, space: Space) -> tuple[Row, ...]:
    if "column_warps" in space.names:
        return mma_decode_rows(problem)
    if "combine_groups" in space.names:
        return hopper_decode_rows(problem)
    if "consumer_warpgroups" in space.names:
        table = HOPPER
    else:
        table = AMPERE if gpu.has_cp_async else TURING
    widest = max(problem.head_dim, problem.head_dim_v)
    limit = next(limit for limit in table if widest <= limit)
    first = HOPPER_CAUSAL_FIRST.get(limit, 0) if table is HOPPER and problem.causal else 0
    rows = table[limit]
    rows = (rows[first], *rows[:first], *rows[first + 1 :])
    if "pack_heads" in space.names and len(space.param("pack_heads").choices) > 1:
        most = 8 if problem.variant == "mqa" else 4  # groups of 4 heads are the common ones
        packed = (r for r in HOPPER_PACKED.get(limit, ()) if r["pack_heads"] <= most)
        rows = (rows[0], *packed, *rows[1:])
    return rows


#: What is given up to make a seed legal, in this order: cheap speed first, the tile last.
_CONCESSIONS = (
    "combine_groups",
    "blocks_per_sm",
    "epilogue_smem",
    "q_stages",
    "integer_max",
    "pingpong",
    "skip",
    "late_wait",
    "cluster",
    "stages",
    "out_buffer",
    "q_in_registers",
    "p_in_registers",
    "BN",
    "overlap",
    "BM",
    "warps",
    "column_warps",
    "consumer_warpgroups",
    "persistent",
    "swizzle",
)


def nearest_legal(
    problem: Problem, gpu: GpuSpec, space: Space, wanted: Mapping[str, int]
) -> Point | None:
    """Return the legal point closest to `wanted`, or None when the space has none.

    Values that the space does not offer are first replaced by the closest choice. Then fewer
    and earlier parameters of `_CONCESSIONS` are changed as long as nothing is legal.
    """
    start = Point(tuple((p.name, _closest(p, wanted.get(p.name))) for p in space.params))
    if violated(problem, start, gpu) is None:
        return start
    free = [p for p in (space.param(n) for n in _CONCESSIONS if n in space.names)]
    for count in range(1, len(free) + 1):
        for point in _moves(start, free[:count]):
            if violated(problem, point, gpu) is None:
                return point
    return None


def _moves(start: Point, free: list[Param]) -> Iterator[Point]:
    """Yield the points reached by changing `free`, the last parameter least."""
    if not free:
        yield start
        return
    *earlier, last = free
    for value in _by_distance(last, start[last.name]):
        yield from _moves(start.replace(**{last.name: value}), earlier)


def _by_distance(param: Param, wanted: int) -> list[int]:
    return sorted(param.choices, key=lambda c: (abs(c - wanted), c))


def _closest(param: Param, wanted: int | None) -> int:
    return param.choices[0] if wanted is None else _by_distance(param, wanted)[0]
