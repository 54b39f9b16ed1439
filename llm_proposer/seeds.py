"""Deterministic first points of a search: known to work, then known to be fast elsewhere.

Each seed starts from the tile sizes that hand-written kernels use for its head dim and is then
moved to the closest point that every constraint of the GPU admits. They are the offline default
and the first trials of every run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from space.constraints import violated
from space.gpu import GpuSpec
from space.params import Param, Point, Space
from space.variant import Problem

#: What a seed says about the parameters that its table row leaves out: the least risky choice.
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
}

#: Rows of (BM, BN, warps, stages, other parameters) by the largest head dim they are meant for.
#: The first row of each is the known-good first trial.
Row = tuple[int, int, int, int, Mapping[str, int]]
AMPERE: dict[int, tuple[Row, ...]] = {
    64: (
        (128, 64, 4, 1, {}),
        (128, 64, 4, 2, {"rescale_threshold": 8}),
        (128, 128, 4, 1, {"rescale_threshold": 8, "q_in_registers": 1}),
        (128, 64, 4, 2, {"rescale_threshold": 8, "q_in_registers": 1, "blocks_per_sm": 2}),
        (128, 128, 4, 2, {"rescale_threshold": 8, "blocks_per_sm": 2}),
        (64, 64, 4, 2, {"rescale_threshold": 8, "q_in_registers": 1, "blocks_per_sm": 3}),
        (256, 64, 8, 2, {"rescale_threshold": 8}),
        (192, 64, 4, 2, {"rescale_threshold": 8}),
    ),
    128: (
        (128, 64, 4, 1, {}),
        (128, 64, 4, 2, {"rescale_threshold": 8}),
        (128, 64, 4, 1, {"rescale_threshold": 8, "blocks_per_sm": 2}),
        (128, 32, 4, 1, {"rescale_threshold": 8, "blocks_per_sm": 2}),
        (64, 64, 4, 1, {"rescale_threshold": 8, "blocks_per_sm": 2, "q_in_registers": 1}),
        (128, 64, 8, 2, {"rescale_threshold": 8}),
        (128, 128, 8, 1, {"rescale_threshold": 8}),
        (256, 64, 8, 1, {"rescale_threshold": 8}),
    ),
    192: (
        (128, 64, 8, 1, {}),
        (128, 64, 4, 1, {"rescale_threshold": 8}),
        (128, 32, 4, 2, {"rescale_threshold": 8}),
        (128, 32, 4, 1, {"rescale_threshold": 8, "blocks_per_sm": 2}),
        (64, 64, 4, 1, {"rescale_threshold": 8, "blocks_per_sm": 2}),
        (128, 64, 8, 2, {"rescale_threshold": 8}),
        (256, 32, 8, 1, {"rescale_threshold": 8}),
    ),
    256: (
        (64, 32, 4, 1, {}),
        (64, 64, 4, 1, {"rescale_threshold": 8}),
        (64, 32, 4, 2, {"rescale_threshold": 8}),
        (128, 64, 8, 1, {"rescale_threshold": 8}),
        (128, 32, 8, 2, {"rescale_threshold": 8}),
        (128, 32, 8, 1, {"rescale_threshold": 8}),
    ),
}
#: 64 KiB of shared memory and no asynchronous copies: small tiles, two blocks where they fit.
TURING: dict[int, tuple[Row, ...]] = {
    64: (
        (64, 64, 4, 1, {}),
        (128, 64, 4, 1, {"rescale_threshold": 8}),
        (64, 64, 4, 1, {"rescale_threshold": 8, "blocks_per_sm": 2, "q_in_registers": 1}),
        (128, 64, 8, 1, {"rescale_threshold": 8}),
        (128, 32, 4, 1, {"rescale_threshold": 8, "blocks_per_sm": 2}),
    ),
    128: (
        (64, 64, 4, 1, {}),
        (128, 32, 4, 1, {"rescale_threshold": 8, "q_in_registers": 0}),
        (128, 64, 8, 1, {"rescale_threshold": 8}),
        (64, 32, 4, 1, {"rescale_threshold": 8, "blocks_per_sm": 2}),
    ),
    192: (
        (64, 32, 4, 1, {}),
        (64, 48, 4, 1, {"rescale_threshold": 8}),
        (128, 16, 8, 1, {"rescale_threshold": 8}),
    ),
    256: (
        (64, 32, 4, 1, {}),
        (64, 16, 4, 1, {"rescale_threshold": 8}),
        (32, 32, 2, 1, {"rescale_threshold": 8}),
    ),
}


def seeds(problem: Problem, gpu: GpuSpec, space: Space) -> tuple[Point, ...]:
    """Return the legal first points of `problem` on `gpu`, best guess order, without repeats.

    The first is conservative: the trial that should work when anything does. Empty only when
    no point of `space` is legal.
    """
    rows = _rows(problem, gpu)
    found: dict[str, Point] = {}
    for bm, bn, warps, stages, others in rows:
        wanted = {"BM": bm, "BN": bn, "warps": warps, "stages": stages, **CONSERVATIVE, **others}
        point = nearest_legal(problem, gpu, space, wanted)
        if point is not None:
            found.setdefault(point.key, point)
    return tuple(found.values())


def _rows(problem: Problem, gpu: GpuSpec) -> tuple[Row, ...]:
    table = AMPERE if gpu.has_cp_async else TURING
    widest = max(problem.head_dim, problem.head_dim_v)
    return table[next(limit for limit in table if widest <= limit)]


#: What is given up to make a seed legal, in this order: cheap speed first, the tile last.
_CONCESSIONS = (
    "blocks_per_sm",
    "epilogue_smem",
    "stages",
    "q_in_registers",
    "p_in_registers",
    "BN",
    "BM",
    "warps",
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
