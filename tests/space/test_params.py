"""Points and spaces."""

from __future__ import annotations

import pytest

from space.params import Param, Point, Space
from space.variant import SpaceError

SPACE = Space((Param("BM", (64, 128), "rows"), Param("BN", (32, 64, 128), "keys")))


def test_a_point_has_every_parameter_in_order() -> None:
    point = SPACE.point({"BN": 32, "BM": 128})
    assert point.items == (("BM", 128), ("BN", 32))
    assert (point["BM"], point.get("BN", 0), point.get("stages", 7)) == (128, 32, 7)
    assert point.key == "BM=128 BN=32" == Point.of({"BN": 32, "BM": 128}).key
    with pytest.raises(KeyError):
        point["stages"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"BM": 64}, "no value for parameter BN"),
        ({"BM": 65, "BN": 32}, "BM=65 is not one of 64, 128"),
        ({"BM": 64, "BN": 32, "bk": 1}, "unknown parameter 'bk'; known: BM, BN"),
    ],
)
def test_a_point_outside_the_space_is_named(values: dict[str, int], message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        SPACE.point(values)


def test_replacing_an_unknown_parameter_is_an_error() -> None:
    point = SPACE.point({"BM": 64, "BN": 32})
    assert point.replace(BM=128)["BM"] == 128
    assert point["BM"] == 64
    with pytest.raises(SpaceError, match="unknown parameter 'stages'; known: BM, BN"):
        point.replace(stages=2)


def test_every_point_comes_once() -> None:
    points = list(SPACE.points())
    assert len(points) == len(set(points)) == SPACE.size() == 6
    assert all(SPACE.point(p.as_dict()) == p for p in points)
    assert points == list(SPACE.points())


def test_a_restricted_space_keeps_the_other_parameters() -> None:
    small = SPACE.restrict({"BM": (128,)})
    assert (small.size(), small.param("BN").choices) == (3, (32, 64, 128))
    assert SPACE.size() == 6
    with pytest.raises(SpaceError, match="unknown parameter 'x'; known: BM, BN"):
        SPACE.param("x")
