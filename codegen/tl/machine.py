"""Global memory and the sizes of one interpreted run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from codegen.tl.ast import (
    Copy,
    Elem,
    Expr,
    For,
    Kernel,
    Memory,
    Program,
    Rows,
    Tensor,
    walk,
)
from codegen.tl.evaluate import Number
from codegen.tl.flow import Block, names_in
from codegen.tl.numerics import Array, round_to
from codegen.tl.roles import running_maxima
from codegen.tl.vocabulary import BLOCK_COLUMN, BLOCK_ROW, SPLIT, SPLIT_BOUNDS, SPLIT_COUNT
from space.variant import DType


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an axis of a tile begins in the problem: which rows, and the index of the first."""

    rows: Rows
    first: int


@dataclass(frozen=True, slots=True)
class Value:
    """A tile's contents, [batch, heads, rows, columns], and what of it contributes nothing."""

    data: Array
    row: Origin | None = None
    column: Origin | None = None
    hidden: np.ndarray[Any, Any] | None = None

    def showing(self, otherwise: float) -> Array:
        """Return the data with `otherwise` where an element is masked."""
        if self.hidden is None:
            return self.data
        return np.where(self.hidden, otherwise, self.data).astype(self.data.dtype)


class Machine:
    """Global memory and the sizes of one run."""

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Any],
        scalars: Mapping[str, float],
        dtype: DType,
        exact: bool,
        splits: int,
    ) -> None:
        self.dtype = dtype
        self.exact = exact
        self.float = np.dtype(np.float64 if exact else np.float32)
        self.splits = program.param(SPLIT_COUNT, splits)
        self.scalars = dict(scalars)
        if missing := [s for s in program.scalars if s not in scalars]:
            raise ValueError(f"the program needs a number for {', '.join(missing)}")
        self.globals: dict[str, Array] = {}
        lengths: dict[Rows, int] = {}
        heads: dict[Rows, int] = {}
        for tensor in _inputs(program):
            array = self._input(tensor, tensors)
            self.batch = array.shape[0]
            for known, size in ((lengths, array.shape[1]), (heads, array.shape[2])):
                if known.setdefault(tensor.rows, size) != size:
                    raise ValueError(
                        f"{tensor.name} has shape {array.shape}, which does not go with the other "
                        f"tensors of {tensor.rows} rows"
                    )
            self.globals[tensor.name] = array
        self.m = lengths.get(Rows.QUERY, lengths.get(Rows.KEY, 0))
        self.n = lengths.get(Rows.KEY, self.m)
        self.heads = heads.get(Rows.QUERY, heads.get(Rows.KEY, 1))
        kv_heads = heads.get(Rows.KEY, self.heads)
        if kv_heads == 0 or self.heads % kv_heads:
            raise ValueError(f"{self.heads} query heads are not a multiple of {kv_heads} KV heads")
        self.group = self.heads // kv_heads

    def _input(self, tensor: Tensor, tensors: Mapping[str, Any]) -> Array:
        if tensor.name not in tensors:
            raise ValueError(f"the program needs a tensor {tensor.name}")
        given = tensors[tensor.name]
        if hasattr(given, "detach"):  # a torch tensor; NumPy has no bfloat16
            given = given.detach().cpu().double().numpy()
        array = np.asarray(given, dtype=self.float)
        if array.ndim != 4:
            raise ValueError(f"{tensor.name} must be [batch, rows, heads, columns]")
        if isinstance(tensor.columns, int) and array.shape[3] != tensor.columns:
            raise ValueError(
                f"{tensor.name} has {array.shape[3]} columns, the program has {tensor.columns}"
            )
        return array if tensor.elem is Elem.F32 else self.round(array)

    def round(self, values: Array) -> Array:
        """Round to the problem's 16-bit type, unless the run is exact."""
        return values if self.exact else round_to(values, self.dtype)

    def blocks(self, kernel: Kernel) -> Iterator[dict[str, Number]]:
        """Make room for one kernel's results and yield the indices of each of its blocks."""
        for tensor in kernel.tensors:
            if tensor.name not in self.globals:
                self.globals[tensor.name] = self._blank(tensor, kernel)
        used = _index_names(kernel.body)
        bm = next((t.rows for t in kernel.tiles if self._is_query(kernel, t.name)), 1)
        bn = _column_tile(kernel)
        row_blocks = -(-self.m // bm) if BLOCK_ROW in used else 1
        column_blocks = -(-self.n // bn) if BLOCK_COLUMN in used else 1
        splits = self.splits if used & {SPLIT, *SPLIT_BOUNDS} else 1
        key_tiles = -(-self.n // bn)
        per_split = -(-key_tiles // splits)
        for row in range(row_blocks):
            for column in range(column_blocks):
                for split in range(splits):
                    start = min(split * per_split, key_tiles)
                    yield {
                        "M": self.m,
                        "N": self.n,
                        BLOCK_ROW: row,
                        BLOCK_COLUMN: column,
                        SPLIT: split,
                        SPLIT_COUNT: self.splits,
                        SPLIT_BOUNDS[0]: start,
                        SPLIT_BOUNDS[1]: min(start + per_split, key_tiles),
                    }

    def _is_query(self, kernel: Kernel, name: str) -> bool:
        tensor = kernel.tensor(name)
        return tensor is not None and tensor.rows is Rows.QUERY

    def _blank(self, tensor: Tensor, kernel: Kernel) -> Array:
        """Return an output or workspace: NaN, or its neutral element where the kernel reads it."""
        columns = self.n if isinstance(tensor.columns, str) else tensor.columns
        rows = self.m if tensor.rows is Rows.QUERY else self.n
        heads = self.heads if tensor.rows is Rows.QUERY else self.heads // self.group
        shape = (*(self.splits for _ in tensor.axes), self.batch, rows, heads, columns)
        loaded = any(
            isinstance(s, Copy) and s.name == tensor.name and s.src is Memory.GLOBAL
            for s in walk(kernel.body)
        )
        value = np.nan
        if loaded:
            value = -np.inf if tensor.name in running_maxima(kernel.body) else 0.0
        return np.full(shape, value, dtype=self.float)


def _inputs(program: Program) -> Iterator[Tensor]:
    seen: set[str] = set()
    for kernel in program.kernels:
        for tensor in kernel.tensors:
            if not (tensor.output or tensor.workspace or tensor.name in seen):
                seen.add(tensor.name)
                yield tensor


def _column_tile(kernel: Kernel) -> int:
    """Return the rows of a tile of key rows, by which splits and column blocks step."""
    for tile in kernel.tiles:
        tensor = kernel.tensor(tile.name)
        if tensor is not None and tensor.rows is Rows.KEY:
            return tile.rows
    return 1


def _index_names(block: Block) -> set[str]:
    found: set[str] = set()
    for stmt in walk(block):
        exprs: tuple[Expr, ...] = ()
        if isinstance(stmt, Copy):
            exprs = tuple(c.index for c in stmt.coords)
        elif isinstance(stmt, For):
            exprs = (stmt.lo, stmt.hi)
        for expr in exprs:
            found |= set(names_in(expr))
    return found
