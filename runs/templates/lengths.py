"""The run-time lengths of a call, the number of key splits among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .description import SplitRuleLike

MAX_SPLITS = 256


def problem_lengths(
    batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int
) -> dict[str, int]:
    """Return the lengths that every attention kernel may ask for, by argument name.

    `rows` are those of a decode kernel: the queries of all heads that read one KV head.
    """
    group = heads // kv_heads
    return {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "group": group,
        "M": seqlen_q,
        "N": seqlen_k,
        "rows": seqlen_q * group,
    }


def split_count(rule: SplitRuleLike, lengths: Mapping[str, int], num_sms: int) -> int:
    """Return how many splits a decode launch gives the keys, 1 to 256.

    As many as give every SM `blocks_per_sm` blocks, none with fewer than `min_tiles` tiles of keys
    for each block that works on it; then as few as leave none empty when every sequence has N keys.
    """
    planes = lengths["batch"] * lengths["kv_heads"]
    blocks = max(-(-lengths["rows"] // rule.rows) * planes, 1) * rule.sharing
    tiles = max(-(-lengths["N"] // rule.keys), 1)
    most = min(max(tiles // (rule.min_tiles * rule.sharing), 1), MAX_SPLITS)
    wanted = min(max(rule.blocks_per_sm * num_sms // blocks, 1), most)
    return -(-tiles // -(-tiles // wanted))


def workspace_shape(axes: Iterable[str], lengths: Mapping[str, int]) -> tuple[int, ...]:
    """Return a workspace's sizes: each axis is a whole number or the name of a length.

    With one split nothing is handed from kernel to kernel: an axis `splits` is then 0 long.
    """
    return tuple(int(a) if a.isdecimal() else _extent(a, lengths) for a in axes)


def _extent(name: str, lengths: Mapping[str, int]) -> int:
    length = lengths[name]
    return 0 if name == "splits" and length == 1 else length
