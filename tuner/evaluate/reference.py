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
SHORT_QUERIES = 8  #: with at most so many, the heads of a KV head are worked out together

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
    if inputs.cache is not None:
        alone = (slice(None), rows, heads)
        return torch.cat(
            [
                attention(x, dtype, alone, scores_dtype=scores_dtype)
                for x in inputs.sequences(batches)
            ]
        )
    q, k, v = inputs.tensors
    first = rows.indices(q.shape[1])[0] + k.shape[1] - q.shape[1]  # last key the first row sees
    group = max(q.shape[2] // max(k.shape[2], 1), 1)
    query_heads = range(q.shape[2])[heads]
    q, k, v = q[batches, rows], k[batches], v[batches]
    out = q.new_zeros((q.shape[0], q.shape[1], len(query_heads), v.shape[3]), dtype=dtype)
    if not out.numel() or not k.shape[1]:
        return out
    wide = scores_dtype or dtype
    done = 0
    for heads_here in _sharing(query_heads, group, q.shape[1] <= SHORT_QUERIES):
        width, kv_head = len(heads_here), heads_here[0] // group
        keys = k[:, :, kv_head].to(dtype).transpose(1, 2)
        values = v[:, :, kv_head].to(dtype)
        step = max(1, CHUNK_SCORES // (q.shape[0] * k.shape[1] * width))
        for lo in range(0, q.shape[1], step):
            part = q[:, lo : lo + step, heads_here[0] : heads_here[-1] + 1].to(dtype)
            packed = part.transpose(1, 2).flatten(1, 2)  # rows of one head after the other
            scores = (packed.to(wide) @ keys.to(wide)).mul(inputs.scale)
            p = _softmax(scores, first + lo if inputs.causal else None, width)
            result = (p.to(dtype) @ values).unflatten(1, (width, -1)).transpose(1, 2)
            out[:, lo : lo + step, done : done + width] = result
        done += width
    return out


def _sharing(heads: range, group: int, packed: bool) -> Iterator[range]:
    """Yield query heads that go together: those of a KV head where `packed`, else one by one."""
    lo = 0
    while lo < len(heads):
        last = (heads[lo] // group + 1) * group if packed else heads[lo] + 1
        hi = min(len(heads), lo + last - heads[lo])
        yield heads[lo:hi]
        lo = hi


def _softmax(scores: torch.Tensor, last_visible: int | None, heads: int) -> torch.Tensor:
    """Softmax over keys of the rows of `heads` heads, one head's after the other's.

    Row i of a head sees keys up to `last_visible` + i, all of them when it is None.
    """
    if last_visible is None:
        return scores.softmax(-1)
    rows, keys = scores.shape[-2] // heads, scores.shape[-1]
    hidden = torch.ones(rows, keys, dtype=torch.bool, device=scores.device).triu(last_visible + 1)
    hidden = hidden.repeat(heads, 1)
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

    Heads that share a KV head go together where queries are few: their keys are read once. A
    user's function whose rows do not stand alone gives a batch element at a time.
    """
    if (function := inputs.function) is not None:
        for index in function.chunks(inputs):
            exact = function.at(inputs, torch.float32, index).nan_to_num(nan=0.0)
            yield Part(index, exact.double(), own_error, function.name)
        return
    _, rows, heads, _ = inputs.q.shape
    step = heads // inputs.k.shape[2] if rows <= SHORT_QUERIES else 1
    for head in range(0, heads, step):
        index = (slice(None), slice(None), slice(head, head + step))
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
    if batch * heads * rows * inputs.keys <= WHOLE_SCORES:
        return [(everything, everything, everything)]
    assert inputs.function is not None
    starts = _row_starts(rows) if inputs.function.rows_alone else [max(rows - SAMPLE_ROWS, 0)]
    if not inputs.function.has_rows:
        return [(slice(b, b + 1), everything, everything) for b in sorted({0, batch - 1})]
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
    keys = inputs.keys
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
