"""Which small decode problems a kernel must get right: ragged caches, splits, pages, few queries.

The kinds of data are those of prefill (`checks`). Every problem says the keys of each sequence;
what lies behind them is NaN. A paged kernel is only ever given pages, in random order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from space.variant import DECODE_QUERIES_MAX, DType, Problem, Shape
from tuner.evaluate.inputs import Check, Data, Layout

#: (query heads, KV heads) by variant, in the order that checks take them
HEADS = {
    "mha": ((3, 3), (8, 8)),
    "gqa": ((28, 4), (32, 8), (64, 8), (6, 2)),
    "mqa": ((71, 1), (32, 1), (5, 1)),
    "mla": ((16, 1), (128, 1), (64, 1)),
}
QUERIES = {False: (1, 2, 5, 8), True: (2, 5, 8, 3)}  #: by whether the mask is causal
#: keys of the sequences of one batch: none, one, and around the tiles and pages there may be
RAGGED = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257, 300)
LAYOUTS = (
    Layout.PACKED, Layout.HEADS_FIRST, Layout.INTERLEAVED, Layout.EMBEDDED, Layout.OFFSET,
    Layout.PITCH,
)  # fmt: skip
VERIFY_LAYOUTS = (*LAYOUTS, Layout.MIXED, Layout.ROWS_FIRST, Layout.SECOND_ROW)
DATA = (Data.NORMAL, Data.MEAN_ONE, Data.NORMAL_3, Data.NEGATIVE, Data.SINK, Data.RISING)
#: how one key past a tuned shape lies, in turn
NEIGHBOUR_LAYOUTS = (Layout.EMBEDDED, Layout.MIXED, Layout.HEADS_FIRST)
#: (query heads, KV heads) of problems with more rows than a block has, and with many KV heads
MANY_ROWS_HEADS = {"gqa": (64, 4)}
MANY_KV_HEADS = {"mha": (32, 32), "gqa": (64, 32)}
#: more keys than a sum of short rows, or a maximum of the first tiles, can pass for
LONG_KEYS = 2213
#: so many alike have 2^-13 of the weight each: half precision tells them from 0
MORE_KEYS = 8201
#: a cache longer than any tuned shape need be: an exported kernel takes any
LONGEST_KEYS, MORE_SPLITS = 33_000, 200
MANY_SEQUENCES = (*(1, 2, 3) * 23, 1)
MANY_PAGES, POOL_BYTES_MOST = 70_000, 1 << 30
DEVICE_KEYS = 70_000  #: of one sequence, for devices only: their number has 17 bits
VERIFY_DATA = (*DATA, Data.SENTINEL, Data.SCORES_OVERFLOW, Data.NAN_QUERIES)
#: keys that give more than 32 splits some of their own at any tile up to 128, and lie in more than
#: 256 pages of 16: a call on one long cache gets as many, and no tuned shape need have them
MANY_KEYS, MANY_SPLITS = 4200, 64
SPLITS = (0, 1, 2, 5, 9)  #: of drawn problems; 0 leaves them to the kernel's rule


def small_shape(problem: Problem, batch: int, queries: int, keys: int, nth: int = 0) -> Shape:
    """A shape of `problem` at the nth head counts of its variant."""
    table = HEADS[problem.variant]
    heads, kv_heads = table[nth % len(table)]
    return Shape(
        batch, heads, kv_heads, queries, keys, problem.head_dim, problem.head_dim_v,
        problem.causal,
    )  # fmt: skip


def trial_checks(problem: Problem) -> tuple[Check, ...]:
    """The special problems of every trial."""
    found: list[Check] = []

    def check(
        name: str, counts: Sequence[int], data: Data, layout: Layout = Layout.PACKED,
        splits: int = 0, queries: int = 0, scale: float | None = None,
        heads: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        nth = len(found)
        table = QUERIES[problem.causal]
        shape = small_shape(
            problem, len(counts), queries or table[nth % len(table)], max(*counts, 1), nth
        )
        if heads is not None:
            shape = replace(shape, heads=heads[0], kv_heads=heads[1])
        found.append(
            Check(name, shape, data, layout, len(name), scale, tuple(counts), problem.page, splits)
        )

    minus = -0.7 * problem.default_scale  # no kernel may know it
    check("ragged cache", RAGGED, Data.NORMAL, Layout.HEADS_FIRST)
    check("three splits, some empty", (300, 129, 20), Data.MEAN_ONE, splits=3)
    check("one split", (300, 129, 20), Data.MEAN_ONE, splits=1)
    check("seven splits", (700, 333), Data.NORMAL_3, Layout.INTERLEAVED, splits=7)
    check("more splits than tiles", (100, 0), Data.MEAN_ONE, splits=64)
    check("very negative logits", (331, 66), Data.NEGATIVE, Layout.EMBEDDED, splits=2)
    check("logits past a sentinel", (203, 64), Data.SENTINEL, Layout.EMBEDDED)
    check("raw scores past 65504", (129, 31), Data.SCORES_OVERFLOW, splits=2)
    check("negative scale", (230, 128), Data.NORMAL, Layout.MIXED, scale=minus)
    check("queries that are NaN", (150, 75), Data.NAN_QUERIES, queries=DECODE_QUERIES_MAX)
    check("fewer keys than queries", (3, 1, 0, 9), Data.NORMAL, splits=2, queries=5)
    check("many splits, none empty", (MANY_KEYS,), Data.NORMAL, splits=MANY_SPLITS)
    check("many keys alike", (LONG_KEYS, 700), Data.FLAT, Layout.PITCH, splits=1)
    check("scores that rise over many keys", (LONG_KEYS,), Data.RISING, splits=2)
    check("one key as heavy as many others", (MORE_KEYS,), Data.SINK, splits=1)
    check("scale of 1", (230, 128), Data.NORMAL, Layout.OFFSET, scale=1.0)
    check("scale of 0", (130, 9), Data.MEAN_ONE, Layout.PITCH, scale=0.0)
    few = min(HEADS[problem.variant])
    check("many sequences", MANY_SEQUENCES, Data.NORMAL, heads=few)
    check(
        "a cache longer than any tuned", (LONGEST_KEYS,), Data.NEWEST, splits=MORE_SPLITS,
        queries=2, heads=few,
    )  # fmt: skip
    if problem.dtype is DType.BF16:
        check("values past 65504", (129, 31), Data.LARGE_VALUES)
    if (heads := MANY_ROWS_HEADS.get(problem.variant)) is not None:
        check("more rows than a block's", (150, 40), Data.MEAN_ONE, queries=8, heads=heads)
    if (heads := MANY_KV_HEADS.get(problem.variant)) is not None:
        check("many KV heads", (40,), Data.MEAN_ONE, heads=heads)
    return tuple(found)


def pool_checks(problem: Problem) -> tuple[Check, ...]:
    """Keys whose number has 17 bits, and pages, where such a pool of K takes no more than 1 GiB.

    For devices only.
    """
    longest = small_shape(problem, 1, 2, DEVICE_KEYS)
    heads, kv_heads = min(HEADS[problem.variant])
    long = Check(
        "keys past 65536", replace(longest, heads=heads, kv_heads=kv_heads), Data.NEWEST,
        seed=11, counts=(DEVICE_KEYS,), page=problem.page,
    )  # fmt: skip
    size = MANY_PAGES * problem.page * problem.head_dim * problem.dtype.bytes
    if not problem.page or size > POOL_BYTES_MOST:
        return (long,)
    shape = replace(small_shape(problem, 2, 2, 200), heads=4, kv_heads=1)
    if problem.variant == "mha":
        shape = replace(shape, heads=1)
    return (
        long,
        Check(
            "pages past 65536", shape, Data.NORMAL, seed=9, counts=(200, 40), page=problem.page,
            pool=MANY_PAGES,
        ),
    )  # fmt: skip


def hidden_checks(problem: Problem, seed: int, count: int) -> tuple[Check, ...]:
    """`count` problems drawn from `seed`: what no tuning saw."""
    rng = random.Random(f"{problem.key} {seed}")
    return tuple(
        _drawn(problem, rng, rng.choice(LAYOUTS), rng.choice(DATA), rng.randrange(4))
        for _ in range(count)
    )


def _drawn(problem: Problem, rng: random.Random, layout: Layout, data: Data, nth: int) -> Check:
    queries = rng.randint(2 if problem.causal else 1, DECODE_QUERIES_MAX)
    keys = rng.randint(1, 900)
    counts = (*(rng.randint(0, keys) for _ in range(rng.randint(0, 3))), keys)
    shape = small_shape(problem, len(counts), queries, keys, nth)
    splits = rng.choice(SPLITS)
    name = (
        f"hidden: Hq={shape.heads} Hkv={shape.kv_heads} Sq={queries} keys {counts}, "
        f"splits {splits or 'by rule'}, {layout}, {data}"
    )
    seed = rng.getrandbits(31)
    return Check(name, shape, data, layout, seed, None, counts, problem.page, splits)


def neighbour_checks(problem: Problem, shapes: Sequence[Shape]) -> tuple[Check, ...]:
    """A problem one key past each tuned pair of lengths: two sequences, few heads.

    What is newest is heavy: among so many keys a lost one would not show.
    """
    pairs = dict.fromkeys((s.seqlen_q, s.seqlen_k) for s in shapes)
    return tuple(
        Check(
            f"one past a tuned shape: Sq={q} keys {k + 1}",
            small_shape(problem, 2, q, k + 1), Data.NEWEST,
            NEIGHBOUR_LAYOUTS[n % len(NEIGHBOUR_LAYOUTS)], q + k, counts=(k + 1, k + 1),
            page=problem.page,
        )
        for n, (q, k) in enumerate(pairs)
    )  # fmt: skip


def checks_of_function(problem: Problem) -> tuple[Check, ...]:
    """What a kernel of a user's function is asked besides: keys past a usual window, in splits."""
    counts = (2311, 1301)
    return tuple(
        Check(
            f"long keys, {splits} splits", small_shape(problem, len(counts), queries, max(counts)),
            data, Layout.MIXED, splits, counts=counts, page=problem.page, splits=splits,
        )
        for queries, splits, data in ((8, 1, Data.MEAN_ONE), (5, 6, Data.NORMAL))
    )  # fmt: skip


def verify_checks(
    problem: Problem, shapes: Sequence[Shape], seed: int, hidden: int
) -> tuple[Check, ...]:
    """The problems of `tune verify`: those of a trial, and more drawn from `seed`.

    Every layout, kind of data and pair of head counts occurs.
    """
    rng = random.Random(f"verify {problem.key} {seed}")
    rounds = max(len(VERIFY_LAYOUTS), len(VERIFY_DATA), len(HEADS[problem.variant]))
    drawn = (
        _drawn(
            problem, rng, VERIFY_LAYOUTS[n % len(VERIFY_LAYOUTS)],
            VERIFY_DATA[n % len(VERIFY_DATA)], n,
        )
        for n in range(rounds)
    )  # fmt: skip
    return (
        *trial_checks(problem),
        *neighbour_checks(problem, shapes),
        *hidden_checks(problem, seed, hidden),
        *drawn,
    )
