"""Runs a bound program block by block with NumPy, at the element types of the real kernel.

Operands of a GEMM are rounded to the 16-bit type, sums are in float32, the scores are rounded where
the kernel makes them an operand. Batch and heads are vectorised, row blocks are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from codegen.tl.ast import (
    Arith,
    Call,
    Copy,
    Custom,
    Elem,
    Expr,
    For,
    Gemm,
    If,
    Kernel,
    Memory,
    Name,
    Operand,
    Program,
    Reshape,
    Rows,
    Stmt,
)
from codegen.tl.evaluate import Number, evaluate
from codegen.tl.flow import Block, names_in
from codegen.tl.machine import Machine, Origin, Value
from codegen.tl.numerics import UNARY, Array, alibi_slopes, divide, subtract
from codegen.tl.roles import accumulators_of, softmax_tiles
from space.variant import DType

#: splits of a program that leaves them open: with short keys the last ones are empty
DEFAULT_SPLITS = 3


@dataclass(slots=True)
class _State:
    """What one block holds: tiles by (name, memory), softmax states, indices."""

    tiles: dict[tuple[str, Memory], Value] = field(default_factory=dict)
    softmax: dict[str, tuple[Array, Array]] = field(default_factory=dict)
    names: dict[str, Number] = field(default_factory=dict)


def run(
    program: Program,
    tensors: Mapping[str, Any],
    scalars: Mapping[str, float],
    dtype: DType,
    *,
    exact: bool = False,
    splits: int = DEFAULT_SPLITS,
) -> dict[str, Array]:
    """Run `program` and return its outputs, [batch, rows, heads, columns].

    `tensors` are arrays or CPU tensors [batch, rows, heads, columns] by name. `exact` computes in
    float64 and rounds nowhere; `splits` is the number of splits of a program whose keys are split
    and which no Param gives one. Raises ValueError naming what is missing or does not fit.
    """
    machine = Machine(program, tensors, scalars, dtype, exact, splits)
    with np.errstate(invalid="ignore", over="ignore"):
        for kernel in program.kernels:
            for names in machine.blocks(kernel):
                _Block(machine, kernel, _State(names=names)).run(kernel.body)
    return {t.name: machine.globals[t.name] for k in program.kernels for t in k.tensors if t.output}


class _Block:
    """One thread block's run through a kernel's statements."""

    def __init__(self, machine: Machine, kernel: Kernel, state: _State) -> None:
        self.machine = machine
        self.kernel = kernel
        self.state = state

    def run(self, block: Block) -> None:
        """Execute statements in order."""
        for stmt in block:
            self._step(stmt)

    def _step(self, stmt: Stmt) -> None:
        match stmt:
            case Copy():
                self._copy(stmt)
            case Gemm():
                self._gemm(stmt)
            case Arith():
                self._arith(stmt)
            case Custom():
                self._custom(stmt)
            case Reshape():
                value = self._get(stmt.name)
                self._put(stmt.name, replace(value, data=self.machine.round(value.data)))
            case For():
                self._loop(stmt)
            case If():
                branch = stmt.body if self._number(stmt.condition) else stmt.orelse
                self.run(branch)
            case _:
                raise ValueError(f"a bound program has no {type(stmt).__name__}")

    def _loop(self, stmt: For) -> None:
        lo, hi = int(self._number(stmt.lo)), int(self._number(stmt.hi))
        for index in range(lo, hi):
            self.state.names[stmt.var] = index
            self.run(stmt.body)

    def _number(self, expr: Expr) -> Number:
        value = evaluate(expr, {**self.machine.scalars, **self.state.names})
        if value is None:
            unknown = [n for n in names_in(expr) if n not in self.state.names]
            raise ValueError(f"no number for {', '.join(unknown)}")
        return value

    # ---- tiles -----------------------------------------------------------------------------------

    def _get(self, name: str) -> Value:
        """Return a tile from the nearest level that holds it."""
        for memory in (Memory.REGISTER, Memory.SHARED):
            if (name, memory) in self.state.tiles:
                return self.state.tiles[name, memory]
        raise ValueError(f"{name} is read before anything writes it")

    def _put(self, name: str, value: Value) -> None:
        held = (name, Memory.REGISTER) in self.state.tiles
        shared = (name, Memory.SHARED) in self.state.tiles
        memory = Memory.SHARED if shared and not held else Memory.REGISTER
        if memory is Memory.SHARED:
            value = replace(value, data=self.machine.round(value.data))
        self.state.tiles[name, memory] = value

    def _copy(self, stmt: Copy) -> None:
        if stmt.src is Memory.GLOBAL and stmt.dst is not None:
            self.state.tiles[stmt.name, stmt.dst] = self._load(stmt)
        elif stmt.dst is Memory.GLOBAL and stmt.src is not None:
            self._store(stmt)
        elif stmt.src is not None and stmt.dst is not None:
            value = self.state.tiles[stmt.name, stmt.src]
            if stmt.dst is Memory.SHARED:
                value = replace(value, data=self.machine.round(value.data))
            self.state.tiles[stmt.name, stmt.dst] = value
        elif stmt.target is not None:
            self._put(stmt.target, self._get(stmt.name))

    def _place(self, stmt: Copy) -> tuple[Array, int, int]:
        """Return a view [batch, rows, heads, columns] and the first row and column of the tile."""
        array = self.machine.globals[stmt.name]
        tensor = self.kernel.tensor(stmt.name)
        assert tensor is not None
        rows, columns = (int(self._number(e)) for e in stmt.shape)
        first_row = first_column = 0
        for coord in stmt.coords:
            index = int(self._number(coord.index))
            if coord.axis == "L":
                first_row = index * rows
            elif coord.axis == "D":
                first_column = index * columns
            else:
                array = array[index]
        return array, first_row, first_column

    def _load(self, stmt: Copy) -> Value:
        array, row, column = self._place(stmt)
        rows, columns = (int(self._number(e)) for e in stmt.shape)
        tensor = self.kernel.tensor(stmt.name)
        assert tensor is not None
        part = array[:, row : row + rows, :, column : column + columns].transpose(0, 2, 1, 3)
        data = np.zeros((*part.shape[:2], rows, columns), dtype=self.machine.float)
        data[:, :, : part.shape[2], : part.shape[3]] = part
        if tensor.rows is Rows.KEY:
            data = np.repeat(data, self.machine.group, axis=1)
        along = None
        if isinstance(tensor.columns, str):  # columns run along the keys
            along = Origin(Rows.KEY, column)
        return Value(data, Origin(tensor.rows, row), along)

    def _store(self, stmt: Copy) -> None:
        assert stmt.src is not None
        value = self.state.tiles.get((stmt.name, stmt.src)) or self._get(stmt.name)
        tensor = self.kernel.tensor(stmt.name)
        assert tensor is not None
        array, row, column = self._place(stmt)
        data = value.showing(0.0).transpose(0, 2, 1, 3)
        if tensor.elem is Elem.OPERAND:
            data = self.machine.round(data)
        rows = min(data.shape[1], array.shape[1] - row)
        columns = min(data.shape[3], array.shape[3] - column)
        array[:, row : row + rows, :, column : column + columns] = data[:, :rows, :, :columns]

    # ---- compute ---------------------------------------------------------------------------------

    def _operand(self, operand: Operand) -> Value:
        """Return a GEMM operand: sliced, transposed and rounded to the operand type."""
        value = self._get(operand.name)
        data = self.machine.round(value.showing(0.0))
        row, column = value.row, value.column
        for axis, cut in enumerate(operand.slices):
            lo = 0 if cut.lo is None else int(self._number(cut.lo))
            size = data.shape[2 + axis]
            hi = size if cut.hi is None else int(self._number(cut.hi))
            data = data[:, :, lo:hi] if axis == 0 else data[:, :, :, lo:hi]
        if operand.transposed:
            return Value(data.swapaxes(2, 3), column, row)
        return Value(data, row, column)

    def _gemm(self, stmt: Gemm) -> None:
        a, b = self._operand(stmt.a), self._operand(stmt.b)
        data = np.matmul(a.data, b.data)
        hidden = self._tail(a.row, b.column, (data.shape[2], data.shape[3]))
        if stmt.accumulate:
            before = self._get(stmt.out)
            data = before.data + data
            hidden = before.hidden if hidden is None else hidden
        self._put(stmt.out, Value(data, a.row, b.column, hidden))

    def _tail(
        self, row: Origin | None, column: Origin | None, shape: tuple[int, int]
    ) -> np.ndarray[Any, Any] | None:
        """Return what of a scores tile lies past the last key, or None when nothing does."""
        if row is None or column is None or column.rows is not Rows.KEY:
            return None
        if column.first + shape[1] <= self.machine.n:
            return None
        past = column.first + np.arange(shape[1]) >= self.machine.n
        return np.broadcast_to(past, shape)

    def _second(self, b: str | float) -> Value | float:
        if not isinstance(b, str):
            return b
        if any((b, m) in self.state.tiles for m in Memory):
            return self._get(b)
        if b in self.machine.scalars:
            return float(self.machine.scalars[b])
        raise ValueError(f"{b} is read before anything writes it")

    def _arith(self, stmt: Arith) -> None:
        a, second = self._get(stmt.a), self._second(stmt.b)
        hidden = a.hidden
        b: Array | float
        if isinstance(second, Value):
            b = second.data
            if second.hidden is not None:
                hidden = second.hidden if hidden is None else hidden | second.hidden
        else:
            b = second
        match stmt.op:
            case "Add":
                data = a.data + b
            case "Subtract":
                data = subtract(a.data, b)
            case "Multiply":
                data = a.data * b
            case _:
                data = divide(a.data, b)
        self._put(stmt.out, replace(a, data=data.astype(self.machine.float), hidden=hidden))

    def _custom(self, stmt: Custom) -> None:
        out = stmt.out or stmt.name
        match stmt.op:
            case "Fill":
                self._fill(stmt)
            case "Softmax":
                self._softmax(stmt)
            case "Normalize":
                self._normalize(stmt)
            case "Mask":
                value = self._mask(self._get(stmt.name), stmt.args[0])
                self._put(out, value)
            case "RowMax" | "RowSum":
                value = self._get(stmt.name)
                low = stmt.op == "RowMax"
                data = value.showing(-np.inf if low else 0.0)
                reduced = data.max(-1, keepdims=True) if low else data.sum(-1, keepdims=True)
                self._put(out, Value(reduced, value.row))
            case "LogSumExp":
                self._put(out, self._log_sum_exp(stmt.name))
            case "Max" | "Min":
                value, second = self._get(stmt.name), self._argument(stmt.args[0])
                pick = np.maximum if stmt.op == "Max" else np.minimum
                self._put(out, replace(value, data=pick(value.data, second)))
            case "Scale" | "Rescale":
                value = self._get(stmt.name)
                data = value.data * self._argument(stmt.args[0])
                self._put(out, replace(value, data=data.astype(self.machine.float)))
            case "Softcap":
                value = self._get(stmt.name)
                cap = self._number(stmt.args[0])
                if not cap:
                    raise ValueError("Softcap by 0: a cap is a number other than 0")
                data = (cap * np.tanh(value.data / cap)).astype(self.machine.float)
                self._put(out, replace(value, data=data))
            case _:
                value = self._get(stmt.name)
                exponential = stmt.op in ("Exp", "Exp2")
                data = UNARY[stmt.op](value.showing(-np.inf) if exponential else value.data)
                self._put(out, replace(value, data=data.astype(self.machine.float)))

    def _argument(self, expr: Expr) -> Array | float:
        if isinstance(expr, Name):
            second = self._second(expr.id)
            return second.data if isinstance(second, Value) else second
        return float(self._number(expr))

    def _fill(self, stmt: Custom) -> None:
        tile = self.kernel.tile(stmt.name, Memory.REGISTER)
        tile = tile or self.kernel.tile(stmt.name, Memory.SHARED)
        assert tile is not None
        shape = (self.machine.batch, self.machine.heads, tile.rows, tile.columns)
        value = float(self._number(stmt.args[0]))
        data = np.full(shape, value, dtype=self.machine.float)
        self.state.tiles[stmt.name, tile.memory] = Value(data)

    def _softmax(self, stmt: Custom) -> None:
        """One online step: S becomes exp(S - m), and every accumulator behind it is rescaled."""
        value = self._get(stmt.name)
        scores = value.showing(-np.inf)
        shape = (*scores.shape[:3], 1)
        maximum, total = self.state.softmax.get(
            stmt.name,
            (
                np.full(shape, -np.inf, dtype=self.machine.float),
                np.zeros(shape, dtype=self.machine.float),
            ),
        )
        new = np.maximum(maximum, scores.max(-1, keepdims=True))
        alpha = np.exp(subtract(maximum, new))
        weights = np.exp(subtract(scores, new))
        total = total * alpha + weights.sum(-1, keepdims=True)
        self.state.softmax[stmt.name] = (new, total)
        for name in accumulators_of(self.kernel.body, stmt.name):
            if (name, Memory.REGISTER) not in self.state.tiles:
                continue  # nothing was accumulated yet
            accumulated = self._get(name)
            self._put(name, replace(accumulated, data=accumulated.data * alpha))
        self._put(stmt.out or stmt.name, replace(value, data=weights))

    def _log_sum_exp(self, name: str) -> Value:
        """Return ln(sum of e^score) of each row so far: minus infinity where nothing was seen."""
        if name not in self.state.softmax:  # the loop had no step
            tile = self.kernel.tile(name, Memory.REGISTER)
            assert tile is not None
            shape = (self.machine.batch, self.machine.heads, tile.rows, 1)
            return Value(np.full(shape, -np.inf, dtype=self.machine.float))
        maximum, total = self.state.softmax[name]
        with np.errstate(divide="ignore"):
            logs = np.log(total)
        seen = np.where(total > 0, maximum + logs, -np.inf)
        return Value(seen.astype(self.machine.float))

    def _normalize(self, stmt: Custom) -> None:
        value = self._get(stmt.name)
        by = stmt.args[0]
        if isinstance(by, Name) and by.id in self.state.softmax:
            divisor: Array | float = self.state.softmax[by.id][1]
        elif isinstance(by, Name) and by.id in softmax_tiles(self.kernel.body):
            divisor = 0.0  # the loop had no step: nothing was seen
        else:
            divisor = self._argument(by)
        self._put(stmt.name, replace(value, data=divide(value.data, divisor)))

    def _mask(self, value: Value, kind: Expr) -> Value:
        rows, columns = value.data.shape[2:]
        if value.row is None or value.column is None:
            raise ValueError("a Mask needs scores: a tile of query rows by key rows")
        shift = self.machine.n - self.machine.m  # causal is aligned bottom-right
        query = value.row.first + np.arange(rows)[:, None] + shift
        key = value.column.first + np.arange(columns)[None, :]
        match kind:
            case Name("causal"):
                hidden = key > query
            case Call("window", (left, right, *sinks)):
                low, high = self._number(left), self._number(right)
                kept = self._number(sinks[0]) if sinks else 0
                hidden = ((key < query - low) & (key >= kept)) | (key > query + high)
            case Call("alibi", (exponent,)):
                slopes = alibi_slopes(self.machine.heads, float(self._number(exponent)))
                data = value.data - slopes * np.abs(query - key)
                return replace(value, data=data.astype(self.machine.float))
            case Call("bias", (Name(bias),)):
                added = self._get(bias).data
                data = (value.data + added).astype(self.machine.float)
                value = replace(value, data=data)
                hidden = np.isneginf(added)
            case Name("padding"):
                hidden = np.broadcast_to(key >= self.machine.n, (rows, columns))
            case _:
                raise ValueError(f"unknown mask {kind}")
        return replace(value, hidden=hidden if value.hidden is None else value.hidden | hidden)
