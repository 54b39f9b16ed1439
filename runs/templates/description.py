"""How the kernels of one program are started: entries, grids, arguments, splits of the keys.

An exported folder carries a copy of this file, so it imports nothing else of the project. What
starts kernels takes any objects with these fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Arg(NamedTuple):
    """One kernel argument: how it is packed and what it is.

    The kinds are pointer, stride, int, float, tensor_map (a TMA descriptor, whose copies move a
    `box` of columns and rows, of `pack` query heads of one KV head), tickets (a pointer to an int32
    that is 0 between launches), key_counts (a pointer to each sequence's keys, or null), pages (a
    pointer to a block table) and page_stride (from one sequence's row of that table to the next).
    """

    kind: str
    name: str
    box: tuple[int, int] = (0, 0)
    pack: int = 1


class Axis(NamedTuple):
    """One factor of the 1-D grid: ceil(length / tile)."""

    length: str
    tile: int


class Launch(NamedTuple):
    """How to start one `__global__` function.

    `persistent` is the number of blocks for each SM at most, 0 for no limit. With `if_split` it is
    started only when the keys are in more than one split. A `dependent` one may be scheduled while
    the kernel before it still runs, and waits for that kernel's results itself. `cluster` is the
    number of blocks that start together for each element of the grid.
    """

    entry: str
    threads: int
    smem_bytes: int
    grid: tuple[Axis, ...]
    args: tuple[Arg, ...]
    persistent: int = 0
    if_split: bool = False
    dependent: bool = False
    cluster: int = 1


class SplitRule(NamedTuple):
    """How many splits the keys get; `lengths.split_count` reads it."""

    rows: int  #: rows of a block, query heads packed
    keys: int  #: keys of a tile
    blocks_per_sm: int
    min_tiles: int


#: the largest number of each field of a split rule; the least is 1
SPLIT_RULE_MAX = {"rows": 1024, "keys": 1024, "blocks_per_sm": 64, "min_tiles": 1024}


class AxisLike(Protocol):
    """What is read of a grid axis."""

    @property
    def length(self) -> str: ...
    @property
    def tile(self) -> int: ...


class ArgLike(Protocol):
    """What is read of an argument."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def box(self) -> tuple[int, int]: ...
    @property
    def pack(self) -> int: ...


class LaunchLike(Protocol):
    """What is read of a launch."""

    @property
    def entry(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def smem_bytes(self) -> int: ...
    @property
    def grid(self) -> Sequence[AxisLike]: ...
    @property
    def args(self) -> Sequence[ArgLike]: ...
    @property
    def persistent(self) -> int: ...
    @property
    def if_split(self) -> bool: ...
    @property
    def dependent(self) -> bool: ...
    @property
    def cluster(self) -> int: ...


class SplitRuleLike(Protocol):
    """What is read of a split rule."""

    @property
    def rows(self) -> int: ...
    @property
    def keys(self) -> int: ...
    @property
    def blocks_per_sm(self) -> int: ...
    @property
    def min_tiles(self) -> int: ...
