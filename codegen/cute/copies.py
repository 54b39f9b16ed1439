"""How a block's threads share the 16-byte chunks of a tile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from codegen.cute.plan import Buffer
from codegen.cute.row_copies import Gathered, RowOrder, declare_row_lanes, row_loop
from codegen.cute.writer import Writer


def chunk_count(buffer: Buffer, threads: int) -> int:
    """Chunks that each thread moves."""
    if buffer.by_rows:
        return RowOrder.of(buffer, threads).count
    return -(-buffer.layout.rows * buffer.layout.chunks // threads)


def stage_offset(buffer: Buffer, index: str) -> str:
    """C++ for the byte offset, from stage 0, of the stage that holds tile `index`."""
    return "0" if buffer.stages == 1 else f"{index} % {buffer.stages} * {buffer.layout.bytes}"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tile comes from: C++ for its parts; `index` stands for the tile's number."""

    base: str  #: pointer to the head's first element
    first_row: str  #: tensor row of the tile's row 0
    stride: str  #: elements from one row to the next
    first_column: str  #: tensor column of the tile's column 0
    rows: str  #: rows of the tensor; rows past it are zero
    columns: str  #: columns of the tensor where a tile may reach past them, else empty


def is_steady(buffer: Buffer, threads: int) -> bool:
    """Whether a thread's chunks are a constant distance apart: the swizzle repeats every 8 rows."""
    chunks = buffer.layout.chunks
    return threads % chunks == 0 and threads // chunks % 8 == 0


def declare_lanes(out: Writer, buffer: Buffer, threads: int) -> None:
    """Declare the thread's first address in stage 0, where the others are at constant distances."""
    if buffer.by_rows:
        declare_row_lanes(out, buffer, threads)
        return
    if is_steady(buffer, threads):
        chunks = buffer.layout.chunks
        at = buffer.layout.offset_text(f"(tid / {chunks})", f"(tid % {chunks})")
        out.line(f"uint32_t const {buffer.name}_to = pin(smem_at + {buffer.offset} + {at});")


@contextmanager
def chunk_loop(
    out: Writer, buffer: Buffer, threads: int, source: Source | Gathered | None
) -> Iterator[None]:
    """Loop over the chunks of a thread, giving `at` (its address in stage 0) and `pass`.

    With a source, also `from` (its address) and `valid`. Where a row's chunks divide the threads a
    thread keeps its column, so that addresses advance by a constant.
    """
    if buffer.by_rows:
        assert not isinstance(source, Source)
        with row_loop(out, buffer, threads, source):
            yield
        return
    assert not isinstance(source, Gathered)
    layout = buffer.layout
    total, passes = layout.rows * layout.chunks, chunk_count(buffer, threads)
    rows_per_pass = threads // layout.chunks
    start = f"smem_at + {buffer.offset}"
    if threads % layout.chunks == 0:
        out.line(f"int const row0 = tid / {layout.chunks}, chunk = tid % {layout.chunks};")
        steady = is_steady(buffer, threads)
        if source is not None:
            out.line(f"int const left = {source.rows} - ({source.first_row}) - row0;")
            column = _column(source)
            out.line(
                f"auto from = {source.base} + int64_t({source.first_row} + row0) * "
                f"{source.stride} + {column};"
            )
        with out.unrolled("pass", passes):
            if steady:
                out.line(
                    f"uint32_t const at = {buffer.name}_to + pass * {rows_per_pass * layout.pitch};"
                )
            else:
                out.line(f"int const row = row0 + pass * {rows_per_pass};")
                out.line(f"uint32_t const at = {start} + {layout.offset_text('row', 'chunk')};")
            if source is not None:
                valid = f"pass * {rows_per_pass} < left"
                if source.columns:
                    valid += f" && {column} < {source.columns}"
                out.line(f"bool const valid = {valid};")
            ragged = layout.rows % rows_per_pass
            if ragged:
                with out.block(f"if (row0 + pass * {rows_per_pass} < {layout.rows})"):
                    yield
            else:
                yield
            if source is not None:
                out.line(f"from += {rows_per_pass} * {source.stride};")
        return
    with out.unrolled("pass", passes):
        out.line(
            f"int const c = tid + pass * {threads}, row = c / {layout.chunks}, "
            f"chunk = c % {layout.chunks};"
        )
        out.line(f"uint32_t const at = {start} + {layout.offset_text('row', 'chunk')};")
        if source is not None:
            valid = f"{source.first_row} + row < {source.rows}"
            if source.columns:
                valid += f" && {_column(source)} < {source.columns}"
            out.line(f"bool const valid = {valid};")
            out.line(
                f"auto const from = {source.base} + int64_t({source.first_row} + row) * "
                f"{source.stride} + {_column(source)};"
            )
        if total % threads:
            with out.block(f"if (c < {total})"):
                yield
        else:
            yield


def _column(source: Source) -> str:
    return f"{source.first_column} + chunk * 8" if source.first_column else "chunk * 8"
