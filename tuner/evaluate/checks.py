"""Which small problems a kernel must get right: fixed ones for a trial, drawn ones that are hidden.

They are small on purpose: a trial is judged in a few milliseconds, and their answers are worked
out once in a worker. Lengths lie off every tile; most KV groups are no power of two.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from space.variant import DType, Phase, Problem, Shape
from tuner.evaluate import decode_checks
from tuner.evaluate.inputs import Check, Data, Layout

#: (query heads, KV heads) of the small problems, by variant
HEADS = {"mha": (3, 3), "gqa": (6, 2), "mqa": (5, 1), "mla": (3, 3)}
HIDDEN_LAYOUTS = (
    Layout.PACKED, Layout.HEADS_FIRST, Layout.INTERLEAVED, Layout.EMBEDDED, Layout.OFFSET,
    Layout.PITCH,
)  # fmt: skip
HIDDEN_DATA = (Data.NORMAL, Data.MEAN_ONE, Data.NORMAL_3, Data.NEGATIVE, Data.SINK, Data.RISING)
#: how one row and one key past a tuned shape lie, in turn
NEIGHBOUR_LAYOUTS = (Layout.OFFSET, Layout.MIXED, Layout.INTERLEAVED, Layout.EMBEDDED)
#: more keys than a sum of short rows, or a maximum of the first tiles, can pass for
LONG_ROWS, LONG_KEYS = 70, 2213
MORE_KEYS = 8201  #: so many alike have 2^-13 of the weight each: half precision tells them from 0
#: (query heads, KV heads) of a problem with many
MANY_HEADS = {"mha": (32, 32), "gqa": (64, 32), "mqa": (40, 1), "mla": (32, 32)}
#: tiles of 64 rows and more: a grid of one block for each SM goes round some twenty times
MOST_PLANES, PLANE_ROWS = 2700, 60
MANY_BATCHES = 40
#: (query heads, KV heads) that a kernel of any variant serves: sharing is a run-time number
RATIOS = (
    (3, 3), (6, 2), (5, 1), (7, 7), (12, 3), (16, 1), (14, 2), (16, 2), (12, 1), (24, 2), (8, 1),
)  # fmt: skip
#: the same, of the hidden problems by variant, in turn: groups of 8 and 12 are common
HIDDEN_HEADS = {
    "mha": (HEADS["mha"],),
    "gqa": ((16, 2), (24, 2), HEADS["gqa"]),
    "mqa": ((8, 1), (12, 1), HEADS["mqa"]),
    "mla": (HEADS["mla"],),
}
WIDE = 8  #: more query heads than this come with half the lengths
VERIFY_LAYOUTS = (*HIDDEN_LAYOUTS, Layout.ROWS_FIRST, Layout.SECOND_ROW)
VERIFY_DATA = (*HIDDEN_DATA, Data.SENTINEL, Data.SCORES_OVERFLOW, Data.NAN_QUERIES)
VERIFY_HIDDEN, VERIFY_SCORES = 12, 1 << 29
#: planes (heads times batch) and lengths that give a card a few tiles for each of its SMs, all of
#: them short: what a tile leaves behind in shared memory is there when the next one comes
MANY_PLANES, MANY_ROWS, FEW_KEYS = 72, 512, 40


def small_shape(problem: Problem, batch: int, seqlen_q: int, seqlen_k: int) -> Shape:
    """A shape of `problem` with few heads, at the heads ratio of its variant."""
    if problem.phase is Phase.DECODE:
        return decode_checks.small_shape(problem, batch, seqlen_q, seqlen_k)
    heads, kv_heads = HEADS[problem.variant]
    return Shape(
        batch, heads, kv_heads, seqlen_q, seqlen_k,
        problem.head_dim, problem.head_dim_v, problem.causal,
    )  # fmt: skip


def trial_checks(problem: Problem) -> tuple[Check, ...]:
    """The special problems of every trial."""
    if problem.phase is Phase.DECODE:
        return decode_checks.trial_checks(problem)

    def check(
        name: str, q: int, k: int, data: Data, layout: Layout, batch: int = 1,
        scale: float | None = None,
    ) -> Check:  # fmt: skip
        return Check(name, small_shape(problem, batch, q, k), data, layout, len(name), scale)

    minus = -0.7 * small_shape(problem, 1, 1, 1).default_scale  # no kernel may know it

    checks = [
        check("ragged lengths", 197, 333, Data.NORMAL, Layout.HEADS_FIRST, batch=2),
        check("large logits", 256, 256, Data.NORMAL_3, Layout.PACKED),
        check("very negative logits", 130, 331, Data.NEGATIVE, Layout.EMBEDDED, batch=2),
        check("logits past a sentinel", 70, 203, Data.SENTINEL, Layout.INTERLEAVED),
        check("one query", 1, 130, Data.MEAN_ONE, Layout.PACKED, batch=2),
        check("few queries", 5, 203, Data.NORMAL, Layout.OFFSET, batch=2),
        check("many batches", 3, 20, Data.MEAN_ONE, Layout.PACKED, batch=MANY_BATCHES),
        check("negative scale", 100, 230, Data.NORMAL, Layout.MIXED, batch=2, scale=minus),
        check("raw scores past 65504", 65, 129, Data.SCORES_OVERFLOW, Layout.PACKED),
        check("queries that are NaN", 75, 150, Data.NAN_QUERIES, Layout.HEADS_FIRST),
        check("keys and values not finite", 75, 150, Data.SPECIAL_KEYS, Layout.PACKED, batch=3),
    ]
    checks.append(check("fewer keys than a tile", 70, 7, Data.NORMAL, Layout.PACKED))
    long = LONG_ROWS, LONG_KEYS
    checks += [
        check("many keys alike", *long, Data.FLAT, Layout.PITCH),
        check("scores that rise over many keys", *long, Data.RISING, Layout.PACKED),
        check("one key as heavy as many others", 20, MORE_KEYS, Data.SINK, Layout.PACKED),
        check("scale of 1", 65, 129, Data.NORMAL, Layout.OFFSET, batch=2, scale=1.0),
        check("scale of 0", 40, 100, Data.MEAN_ONE, Layout.PITCH, scale=0.0),
    ]
    if problem.dtype is DType.BF16:
        checks.append(check("values past 65504", 65, 129, Data.LARGE_VALUES, Layout.PACKED))
    if problem.variant in MANY_HEADS:
        heads, kv_heads = MANY_HEADS[problem.variant]
        shape = replace(small_shape(problem, 1, 33, 40), heads=heads, kv_heads=kv_heads)
        checks.append(Check("many heads", shape, Data.MEAN_ONE, seed=8))
    if problem.causal:
        # rows 0 to 127 see nothing: their first key block, and every other, is masked
        checks.append(check("rows that see nothing", 200, 72, Data.NEGATIVE, Layout.PACKED))
        checks.append(check("first key block masked", 88, 448, Data.NEGATIVE, Layout.PACKED))
    else:
        checks.append(check("more queries than keys", 260, 140, Data.NORMAL, Layout.PACKED))
    return tuple(checks)


def race_check(problem: Problem) -> Check:
    """Many short tiles: launched often, it shows what a few long ones hide.

    Each SM gets several in a row, of other heads and batches, and loads and stores of one tile
    meet those of the next.

    For devices only: it fills one, and on a CPU it would take longer than all others.
    """
    batch = -(-MANY_PLANES // HEADS[problem.variant][0])
    shape = small_shape(problem, batch, MANY_ROWS, FEW_KEYS)
    return Check("many short tiles", shape, Data.MEAN_ONE, seed=1)


def grid_checks(problem: Problem) -> tuple[Check, ...]:
    """So many tiles that blocks which stay take some twenty each; for devices only."""
    if problem.phase is Phase.DECODE:
        return ()
    batch = -(-MOST_PLANES // HEADS[problem.variant][0])
    shape = small_shape(problem, batch, PLANE_ROWS, FEW_KEYS)
    return (Check("more tiles than a grid", shape, Data.MEAN_ONE, seed=10),)


def hidden_checks(problem: Problem, seed: int, count: int) -> tuple[Check, ...]:
    """`count` problems drawn from `seed`: lengths, batch, data and layout that no tuning saw."""
    if problem.phase is Phase.DECODE:
        return decode_checks.hidden_checks(problem, seed, count)
    rng = random.Random(f"{problem.key} {seed}")
    return tuple(_hidden(problem, rng, n) for n in range(count))


def _hidden(problem: Problem, rng: random.Random, n: int) -> Check:
    q, k, batch = rng.randint(1, 400), rng.randint(1, 700), rng.randint(1, 3)
    ratios = HIDDEN_HEADS[problem.variant]
    heads, kv_heads = ratios[n % len(ratios)]
    if heads > WIDE:  # so that they cost what the others do
        q, k, batch = (q + 1) // 2, (k + 1) // 2, 1
    shape = replace(small_shape(problem, batch, q, k), heads=heads, kv_heads=kv_heads)
    layout, data = rng.choice(HIDDEN_LAYOUTS), rng.choice(HIDDEN_DATA)
    name = f"hidden {n}: Hq={heads} Hkv={kv_heads} Sq={q} Sk={k}"
    return Check(name, shape, data, layout, seed=rng.getrandbits(31))


def neighbour_checks(
    problem: Problem, shapes: Sequence[Shape], most_scores: int
) -> tuple[Check, ...]:
    """A problem one row and one key past each tuned pair of lengths, with few heads.

    Pairs with more than `most_scores` scores a head are left out; a single query stays one.
    """
    if problem.phase is Phase.DECODE:
        return decode_checks.neighbour_checks(problem, shapes)
    pairs = dict.fromkeys((s.seqlen_q, s.seqlen_k) for s in shapes)
    found: list[Check] = []
    for q, k in pairs:
        if q * k <= most_scores:
            rows = q + 1 if q > 1 else 1
            name = f"one past a tuned shape: Sq={rows} Sk={k + 1}"
            layout = NEIGHBOUR_LAYOUTS[len(found) % len(NEIGHBOUR_LAYOUTS)]
            shape = small_shape(problem, 1, rows, k + 1)
            found.append(Check(name, shape, layout=layout, seed=q + k))
    return tuple(found)


def verify_checks(problem: Problem, shapes: Sequence[Shape], seed: int) -> tuple[Check, ...]:
    """The problems of `tune verify`: those of a trial, and more drawn from `seed`.

    Every ratio of heads, layout and kind of data occurs; so do one row, more queries than keys
    and the neighbours of the tuned shapes.
    """
    if problem.phase is Phase.DECODE:
        return decode_checks.verify_checks(problem, shapes, seed, VERIFY_HIDDEN)
    rng = random.Random(f"verify {problem.key} {seed}")
    drawn = []
    for n in range(max(len(RATIOS), len(VERIFY_LAYOUTS), len(VERIFY_DATA))):
        heads, kv_heads = RATIOS[n % len(RATIOS)]
        q, k = ((1, rng.randint(1, 900)), (rng.randint(65, 400), rng.randint(1, 64)))[n % 2]
        if n >= 2:
            q, k = rng.randint(1, 400), rng.randint(1, 900)
        shape = Shape(
            rng.randint(1, 3), heads, kv_heads, q, k, problem.head_dim, problem.head_dim_v,
            problem.causal,
        )  # fmt: skip
        layout, data = VERIFY_LAYOUTS[n % len(VERIFY_LAYOUTS)], VERIFY_DATA[n % len(VERIFY_DATA)]
        name = f"hidden: Hq={heads} Hkv={kv_heads} Sq={q} Sk={k}, {layout}, {data}"
        drawn.append(Check(name, shape, data, layout, seed=rng.getrandbits(31)))
    return (
        *trial_checks(problem),
        *neighbour_checks(problem, shapes, VERIFY_SCORES),
        *hidden_checks(problem, seed, VERIFY_HIDDEN),
        *drawn,
    )


def checks_of_function(problem: Problem) -> tuple[Check, ...]:
    """What a kernel of a user's function is asked besides: lengths past a usual window, equal ones.

    The first stand in for a window or a chunk that no other small problem is longer than.
    """
    if problem.phase is Phase.DECODE:
        return decode_checks.checks_of_function(problem)
    mean = Data.MEAN_ONE
    return (
        Check("long keys", small_shape(problem, 1, 70, 2311), mean, seed=5),
        Check("long rows and keys", small_shape(problem, 1, 1301, 1301), Data.NORMAL, seed=6),
        Check("equal lengths", small_shape(problem, 2, 293, 293), mean, Layout.MIXED, seed=7),
    )


def canary_checks(problem: Problem) -> Iterator[Check]:
    """What a known-good kernel is asked after a fault: one small problem."""
    yield trial_checks(problem)[0]
