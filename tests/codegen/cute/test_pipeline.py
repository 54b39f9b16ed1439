"""The copy schedule, played: no tile is read before it lands or overwritten while read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.cute.pipeline import Pipeline, TileUse, schedule


def play(pipeline: Pipeline, iterations: int) -> None:
    """Run the schedule; fail on a read of a tile that is not there."""
    stages = {t.name: t.stages for t in pipeline.tiles}
    groups: list[list[tuple[str, int]]] = [[]]  # the row tile's group comes first
    holds: dict[tuple[str, int], int] = {}
    landed: set[tuple[str, int]] = set()
    last_reader: dict[str, int] = {}  # last iteration whose readers passed a barrier

    def issue(group: list[tuple[str, int]]) -> None:
        for name, index in group:
            slot = (name, index % stages[name])
            if slot in holds:
                assert last_reader.get(name, -1) >= holds[slot], f"{name} overwritten while read"
            holds[slot] = index
        groups.append(group)

    for group in pipeline.prologue:
        issue([g for g in group if g[1] < iterations])
    end = max(t.last_use for t in pipeline.tiles) + 2
    for i in range(iterations):
        read_here: list[str] = []
        for at in range(end):
            for point in pipeline.points:
                if point.at != at:
                    continue
                done = len(groups) - point.pending
                for group in groups[:done]:
                    landed.update(group)
                for name in point.ready:
                    assert (name, i) in landed, f"{name} {i} read before it landed"
                # a barrier: what was read before it is finished in every warp
                for t in pipeline.tiles:
                    last_reader[t.name] = i if t.last_use < at else i - 1
                issue(
                    [(x.name, i + x.distance) for x in point.issues if i + x.distance < iterations]
                )
            for t in pipeline.tiles:
                if t.copy_at < at <= t.last_use:
                    assert holds[(t.name, i % t.stages)] == i, f"{t.name} {i} is gone"
                    read_here.append(t.name)
        assert set(read_here) == {t.name for t in pipeline.tiles}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("v_at", [1, 5])
def test_attention_schedules_play(stages: int, v_at: int) -> None:
    tiles = (TileUse("K", 0, 2, stages), TileUse("V", v_at, 7, stages))
    for iterations in range(6):
        play(schedule(tiles), iterations)


def test_one_stage_overlaps_each_copy_with_the_other_product() -> None:
    pipeline = schedule((TileUse("K", 0, 1, 1), TileUse("V", 5, 7, 1)))
    assert len(pipeline.points) == 2
    assert [i.name for i in pipeline.points[0].issues] == ["V"]
    assert [i.name for i in pipeline.points[1].issues] == ["K"]


def test_an_early_copy_of_v_meets_one_barrier_less() -> None:
    late = schedule((TileUse("K", 0, 2, 2), TileUse("V", 5, 7, 2)))
    early = schedule((TileUse("K", 0, 2, 2), TileUse("V", 1, 7, 2)))
    assert (len(late.points), len(early.points)) == (2, 1)


@st.composite
def tile_sets(draw: st.DrawFn) -> tuple[TileUse, ...]:
    stages = draw(st.integers(1, 4))
    count = draw(st.integers(1, 3))
    ats = sorted(draw(st.lists(st.integers(0, 8), min_size=count, max_size=count, unique=True)))
    return tuple(
        TileUse(f"T{k}", at, draw(st.integers(max(at, ats[-1] if k else at) + 1, 12)), stages)
        for k, at in enumerate(ats)
    )


@given(tile_sets(), st.integers(0, 7))
def test_any_schedule_plays(tiles: tuple[TileUse, ...], iterations: int) -> None:
    play(schedule(tiles), iterations)
