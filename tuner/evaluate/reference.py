"""Plain attention, materialised: the judge's truth (float64) and its yardstick (16-bit).

Everything is [batch, rows, heads, columns]. Causal is aligned bottom-right; a row that sees no key
is 0. Scores are made for some rows of one KV head at a time, so 16k lengths fit in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tuner.evaluate.inputs import Inputs

if TYPE_CHECKING:
    from tuner.evaluate.function import Function

CHUNK_SCORES = 1 << 25  #: most scores held at once
WHOLE_SCORES = 1 << 26  #: most scores of a problem that is checked in every element
WHOLE_HEADS = 1024  #: more are sampled: each is a step of its own
SAMPLE_ROWS = 96

Index = tuple[slice, slice, slice]  #: batch, rows, heads


def attention(
    inputs: Inputs,
    dtype: torch.dtype,
    index: Index = (slice(None), slice(None), slice(None)),
    *,
    scores_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return plain attention computed in `dtype` for the part of the output at `index`.

    `scores_dtype` keeps scores and softmax in a wider type than the operands.
    """
    batches, rows, heads = index
    q, k, v = inputs.tensors
    first = rows.indices(q.shape[1])[0] + k.shape[1] - q.shape[1]  # last key the first row sees
    group = max(q.shape[2] // max(k.shape[2], 1), 1)
    query_heads = range(q.shape[2])[heads]
    q, k, v = q[batches, rows], k[batches], v[batches]
    out = q.new_zeros((q.shape[0], q.shape[1], len(query_heads), v.shape[3]), dtype=dtype)
    if not out.numel() or not k.shape[1]:
        return out
    step = max(1, CHUNK_SCORES // (q.shape[0] * k.shape[1]))
    wide = scores_dtype or dtype
    for i, head in enumerate(query_heads):
        keys = k[:, :, head // group].to(dtype).transpose(1, 2)
        values = v[:, :, head // group].to(dtype)
        for lo in range(0, q.shape[1], step):
            part = q[:, lo : lo + step, head].to(dtype)
            scores = (part.to(wide) @ keys.to(wide)).mul(inputs.scale)
            p = _softmax(scores, first + lo if inputs.causal else None)
            out[:, lo : lo + step, i] = p.to(dtype) @ values
    return out


def _softmax(scores: torch.Tensor, last_visible: int | None) -> torch.Tensor:
    """Softmax over keys; row i sees keys up to `last_visible` + i, all of them when it is None."""
    if last_visible is None:
        return scores.softmax(-1)
    rows, keys = scores.shape[-2:]
    hidden = torch.ones(rows, keys, dtype=torch.bool, device=scores.device).triu(last_visible + 1)
    p = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return p.masked_fill(hidden.all(-1, keepdim=True), 0.0)


@dataclass(frozen=True, slots=True)
class Part:
    """The exact answer at `index`, and the most that plain 16-bit attention errs there."""

    index: Index
    exact: torch.Tensor
    own_error: float
    yardstick: str = "plain attention"


Expected = tuple[Part, ...]


def expect(inputs: Inputs) -> Expected:
    """Return what a right kernel gives: all of a small problem, a sample of a large one."""
    if inputs.function is not None:
        return tuple(
            _part_of_function(inputs, inputs.function, i) for i in _indices_of_function(inputs)
        )
    return tuple(_part(inputs, index) for index in _indices(inputs))


def whole(inputs: Inputs, own_error: float) -> Iterator[Part]:
    """Yield every element of the answer, in float32, one head at a time.

    Of a user's function whose rows do not stand alone, nothing.
    """
    if (function := inputs.function) is not None:
        for index in function.chunks(inputs):
            exact = function.at(inputs, torch.float32, index).nan_to_num(nan=0.0)
            yield Part(index, exact.double(), own_error, function.name)
        return
    for head in range(inputs.q.shape[2]):
        index = (slice(None), slice(None), slice(head, head + 1))
        yield Part(index, attention(inputs, torch.float32, index).double(), own_error)


def _part(inputs: Inputs, index: Index) -> Part:
    exact = attention(inputs, torch.float64, index)
    dtype = inputs.q.dtype
    own = _max_error(attention(inputs, dtype, index), exact)
    if not math.isfinite(own):  # 16-bit scores overflowed: the yardstick keeps them in float32
        own = _max_error(attention(inputs, dtype, index, scores_dtype=torch.float32), exact)
    return Part(index, exact, own if math.isfinite(own) else 0.0)


def _part_of_function(inputs: Inputs, function: Function, index: Index) -> Part:
    """The user's function at its widest type, and its error at the operands' type.

    Where it gives NaN it divides by nothing: rows that see no key, which are 0 in this product.
    """
    exact = function.at(inputs, function.exact_dtype, index).double()
    dtype = inputs.q.dtype
    own = _max_error(function.at(inputs, dtype, index), exact)
    if not math.isfinite(own):  # an overflow on the way: only operands and result are 16-bit then
        own = _max_error(function.at(inputs, torch.float32, index).to(dtype), exact)
    return Part(
        index, exact.nan_to_num(nan=0.0), own if math.isfinite(own) else 0.0, function.name
    )  # fmt: skip


def _indices_of_function(inputs: Inputs) -> list[Index]:
    """All of a small problem; of a large one the rows that the function can give alone."""
    batch, rows, heads, _ = inputs.q.shape
    everything = slice(None)
    if batch * heads * rows * inputs.k.shape[1] <= WHOLE_SCORES:
        return [(everything, everything, everything)]
    assert inputs.function is not None
    starts = _row_starts(rows) if inputs.function.rows_alone else [max(rows - SAMPLE_ROWS, 0)]
    if not inputs.function.has_rows:
        return [(slice(batch - 1, batch), everything, everything)]
    return [
        (slice(b, b + 1), slice(lo, min(lo + SAMPLE_ROWS, rows)), everything)
        for b in sorted({0, batch - 1})
        for lo in starts
    ]


def _max_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference where the exact value is finite; inf or nan when `got` is not there."""
    error = (got.double() - exact).abs()[exact.isfinite()]
    return float(error.max()) if error.numel() else 0.0


def _indices(inputs: Inputs) -> list[Index]:
    batch, rows, heads, _ = inputs.q.shape
    keys = inputs.k.shape[1]
    if batch * heads * rows * keys <= WHOLE_SCORES and heads <= WHOLE_HEADS:
        return [(slice(None), slice(None), slice(None))]
    picked = []
    for n, head in enumerate(sorted({0, heads // 2, heads - 1})):
        b = (head * 7 + n) % batch
        for lo in _row_starts(rows):
            where = slice(lo, min(lo + SAMPLE_ROWS, rows))
            picked.append((slice(b, b + 1), where, slice(head, head + 1)))
    return picked


def _row_starts(rows: int) -> list[int]:
    """The first rows, rows across a tile boundary in the middle, and the last rows."""
    middle = rows // 2 // 128 * 128 - SAMPLE_ROWS // 2
    return sorted({0, max(middle, 0), max(rows - SAMPLE_ROWS, 0)})
