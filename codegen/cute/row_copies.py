"""Tiles whose rows are found one by one: heads packed into rows, or rows behind a block table.

Neighbouring threads move neighbouring chunks of a row, 128 bytes together where the row has them,
and a thread stays with its rows: it finds each once, and its chunks are at constant distances.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from codegen.cute.plan import Buffer
from codegen.cute.writer import Writer
from space.tiles import CHUNK_BYTES

LINE_CHUNKS = 8  #: chunks of 128 bytes
CHUNK_ELEMENTS = 8


@dataclass(frozen=True, slots=True)
class Gathered:
    """Where a tile's rows are.

    C++ lines: `before` stands in front of the loop over rows, and `locate` in it, where it turns
    `row` and `chunk` into `start` and `valid`; rows that are not valid are zero.
    """

    before: tuple[str, ...]
    locate: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Which chunks of a tile a thread moves.

    Thread t has chunk t % `width` of a group of `width` chunks, in row t / `width` % `rows` and
    every `rows` rows after it. Threads left over share a row's groups: `parts` of them, each with
    every `parts`-th group.
    """

    width: int
    rows: int
    parts: int
    steps: int  #: rows of a thread
    groups: int  #: of a row

    @classmethod
    def of(cls, buffer: Buffer, threads: int) -> RowOrder:
        """The order of a tile whose number of rows, like that of threads, is a power of 2."""
        layout = buffer.layout
        width = min(layout.chunks & -layout.chunks, LINE_CHUNKS)
        rows = min(layout.rows, threads // width)
        return cls(
            width, rows, threads // width // rows, layout.rows // rows, layout.chunks // width
        )

    @property
    def passes(self) -> int:
        """Groups of a row that one thread moves, at most."""
        return -(-self.groups // self.parts)

    @property
    def count(self) -> int:
        """Chunks that one thread moves, at most."""
        return self.steps * self.passes

    @property
    def row(self) -> str:
        """C++ for the thread's first row."""
        return f"tid / {self.width}" + (f" % {self.rows}" if self.parts > 1 else "")


def declare_row_lanes(out: Writer, buffer: Buffer, threads: int) -> None:
    """Declare the thread's first address in stage 0: the swizzle repeats within its steps."""
    order, layout = RowOrder.of(buffer, threads), buffer.layout
    at = layout.offset_text(f"({order.row})", f"(tid % {order.width})")
    part = ""
    if order.parts > 1:
        part = f" + tid / {order.width * order.rows} * {order.width * CHUNK_BYTES}"
    out.line(f"uint32_t const {buffer.name}_to = pin(smem_at + {buffer.offset} + {at}{part});")


@contextmanager
def row_loop(out: Writer, buffer: Buffer, threads: int, source: Gathered | None) -> Iterator[None]:
    """Loop over the chunks of a thread, giving `at` (its address in stage 0) and `pass`.

    With a source, also `from` (its address) and `valid`.
    """
    order, layout = RowOrder.of(buffer, threads), buffer.layout
    for line in source.before if source is not None else ():
        out.line(line)
    if source is not None:
        chunk = f"tid % {order.width}"
        if order.parts > 1:
            chunk += f" + tid / {order.width * order.rows} * {order.width}"
        out.line(f"int const chunk = {chunk};")
    with out.unrolled("step", order.steps):
        if source is not None:
            out.line(f"int const row = {order.row} + step * {order.rows};")
            for line in source.locate:
                out.line(line)
        with out.unrolled("segment", order.passes):
            ahead = order.width * order.parts
            if order.count > 1:
                out.line(f"int const pass = step * {order.passes} + segment;")
            else:
                out.line("int const pass = 0;")
            down = f"step * {order.rows * layout.pitch}"
            out.line(
                f"uint32_t const at = {buffer.name}_to + {down} + segment * {ahead * CHUNK_BYTES};"
            )
            if source is not None:
                out.line(f"auto const from = start + segment * {ahead * CHUNK_ELEMENTS};")
            if order.groups % order.parts:
                guard = (
                    f"segment * {order.parts} + tid / {order.width * order.rows} < {order.groups}"
                )
                with out.block(f"if ({guard})"):
                    yield
            else:
                yield
