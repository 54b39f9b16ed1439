"""How the tiles of a launch spread over the SMs: their order, who runs them, what the L2 keeps."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace

from space.gpu import GpuSpec
from space.params import Point
from space.variant import Shape

#: tiles that decide when the last SM is done; those before them are taken to be spread evenly
TAIL_TILES = 4096
L2_SHARE = 0.5  #: of the L2 that keys and values fill: both of its halves may keep a copy


def block_queries(point: Point) -> int:
    """Return the queries that a row block spans: each is a row of all the heads it packs."""
    return point["BM"] // point.get("pack_heads", 1)


def head_packs(shape: Shape, point: Point) -> int:
    """Return the row blocks that the query heads of one KV head make of the same queries."""
    return -(-shape.group // point.get("pack_heads", 1))


def key_tiles(shape: Shape, queries: int, bn: int) -> list[int]:
    """Return the steps of each block of `queries` queries: the key tiles with a visible key."""
    blocks = -(-shape.seqlen_q // queries)
    if not shape.causal:
        return [-(-shape.seqlen_k // bn)] * blocks
    shift = shape.seqlen_k - shape.seqlen_q
    last_keys = [min(shape.seqlen_q, (i + 1) * queries) + shift for i in range(blocks)]
    return [-(-min(max(k, 0), shape.seqlen_k) // bn) for k in last_keys]


def launch_order(steps: Sequence[int], planes: int, group: int, longest_first: bool) -> list[int]:
    """Return the steps of every tile as the kernel numbers them: planes in groups, rows, planes.

    `group` 0 walks all planes (heads, or packs of them, of all batches) together, 1 one after the
    other.
    """
    rows = list(reversed(steps)) if longest_first else list(steps)
    width = group or planes
    whole = [n for n in rows for _ in range(width)] * (planes // width)
    return whole + [n for n in rows for _ in range(planes % width)]


def finish_us(
    order: Sequence[int], slots: int, step_us: float, around_us: float, static: bool
) -> float:
    """Return when the last of `slots` is done: tiles dealt in turn, or to whoever is free."""
    if static:
        hands = (order[i::slots] for i in range(min(slots, len(order))))
        return max((sum(h) * step_us + len(h) * around_us for h in hands), default=0.0)
    early, late = order[: max(len(order) - TAIL_TILES, 0)], order[-TAIL_TILES:]
    free_at = [(sum(early) * step_us + len(early) * around_us) / slots] * slots
    for steps in late:
        heapreplace(free_at, free_at[0] + steps * step_us + around_us)
    return max(free_at)


def dram_bytes(shape: Shape, point: Point, running: int, gpu: GpuSpec) -> float:
    """Return the bytes that come from device memory while `running` tiles run at once.

    Q and O pass once. Keys and values are read once where those of the planes that are walked
    together stay in the L2; else again by every group of tiles that share them while they run.
    """
    steps = key_tiles(shape, block_queries(point), point["BN"])
    packs = head_packs(shape, point)
    planes = shape.batch * shape.kv_heads * packs
    row_bytes = (shape.head_dim + shape.head_dim_v) * 2
    once = shape.batch * shape.heads * shape.seqlen_q * row_bytes
    keys = shape.batch * shape.kv_heads * shape.seqlen_k * row_bytes
    together = min(planes, max(point.get("head_group", 1) or planes, -(-running // len(steps))))
    kept = together * keys / planes
    missed = max(0.0, 1 - L2_SHARE * gpu.l2_bytes / kept) if kept else 0.0
    asked = planes * sum(steps) * point["BN"] * row_bytes
    sharing = max(1.0, running / (together / packs))
    return once + max(keys, missed * asked / sharing)
