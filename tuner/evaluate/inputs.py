"""Seeded Q, K and V for a shape: data that finds bugs, in layouts that find bugs.

Tensors are [batch, rows, heads, columns]. `make` is the entry; a `Check` names what it makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

import torch

from space.variant import DType, Shape
from tuner.evaluate.cache import Cache, counts_of, hide_past, in_pages, page_table

if TYPE_CHECKING:
    from tuner.evaluate.function import Function

TORCH_DTYPE = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16}

#: keys at the end that Data.NEWEST makes heavy, and their logits: 64*e^12 is 20 times the sum of
#: 2^18 others of N(0,1)
NEWEST_KEYS, NEWEST_LOGIT = 64, 12.0

Draw = Callable[..., torch.Tensor]  #: draw(*sizes) gives N(0,1) in float32
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
R = TypeVar("R")


class Data(StrEnum):
    """What the numbers are."""

    NORMAL = "N(0,1)"
    NORMAL_3 = "3*N(0,1)"
    MEAN_ONE = "N(0,1), V = 1 + 0.1*N(0,1)"
    NEGATIVE = "every visible logit near -120, V = 1 + 0.1*N(0,1)"
    SENTINEL = "every logit equal and past -1e5, V = 1 + 0.1*N(0,1)"
    SCORES_OVERFLOW = "raw scores 90000, V = 1 + 0.1*N(0,1)"
    COUNTING = "q = 0, v[j] = j + 1"
    HEAD_CONSTANT = "V of kv head g is g + 1"
    ALL_133120 = "all elements 133120"
    NAN_QUERIES = "every seventh query NaN, V = 1 + 0.1*N(0,1)"
    FLAT = "q = k = 0, V = 1 + 0.1*N(0,1)"
    RISING = "N(0,1), K from 0.2 to 60 times along the keys"
    SINK = "key 0 as heavy as all others together, V = 1 + 0.1*N(0,1), 3 times that of key 0"
    NEWEST = "N(0,1), the last 64 keys as heavy as 20 times all others"
    LARGE_VALUES = "N(0,1), V = 1e5*(1 + 0.1*N(0,1))"
    SPECIAL_KEYS = "Inf in K, NaN in K, Inf and NaN in V, each in a batch of its own"


class Layout(StrEnum):
    """Where the numbers are."""

    PACKED = "contiguous"
    HEADS_FIRST = "made as [B,H,S,D], passed by transpose"
    ROWS_FIRST = "made as [S,B,H,D], passed by transpose"
    MIXED = "Q contiguous, K made as [B,H,S,D], V as [S,B,H,D]"
    INTERLEAVED = "q, k, v split from one buffer [S,B,columns]"
    SECOND_ROW = "K is every second row of a buffer, skipped rows NaN"
    EMBEDDED = "views into larger buffers, NaN before and past the end"
    SHARED_HEADS = "K and V expanded over heads with stride 0"
    OFFSET = "rows of 16 columns more, views from the 8th on: 16 bytes is all they are aligned to"
    PITCH = "rows of 8 columns more, which are NaN"
    ODD_POINTER = "views that start one element into their buffers"
    SECOND_COLUMN = "last dimension has stride 2"


@dataclass(frozen=True, slots=True)
class Check:
    """One small problem to judge a kernel on; `scale` None stands for the shape's default.

    A problem with `counts`, the keys of each sequence, is decode: its cache is in pages of `page`
    keys, 0 for one piece, and the keys are in `splits`, 0 for as many as the kernel's rule says.
    """

    name: str
    shape: Shape
    data: Data = Data.NORMAL
    layout: Layout = Layout.PACKED
    seed: int = 0
    scale: float | None = None
    counts: tuple[int, ...] = ()
    page: int = 0
    splits: int = 0
    pool: int = 0  #: pages that there are at least; those of the sequences are the last

    @property
    def softmax_scale(self) -> float:
        """The scale the kernel is called with."""
        return self.shape.default_scale if self.scale is None else self.scale


@dataclass(frozen=True, slots=True)
class Inputs:
    """Q, K and V of one problem with its scale and mask, and what decode has besides.

    `function` is the user's, which computes the answer; plain attention for None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    causal: bool
    cache: Cache | None = None
    function: Function | None = None

    @property
    def tensors(self) -> Triple:
        """Q, K and V."""
        return self.q, self.k, self.v

    @property
    def keys(self) -> int:
        """Keys of a sequence at most."""
        return self.k.shape[1] if self.cache is None else self.cache.capacity(self.k)

    @property
    def latent(self) -> bool:
        """Whether V is the first columns of K, the same memory."""
        shared = self.v.data_ptr() == self.k.data_ptr()
        return bool(shared and self.v.shape[3] < self.k.shape[3])

    @property
    def turned(self) -> tuple[tuple[torch.Tensor, str], ...]:
        """What is negated to turn the answer's sign, with the names: V, or Q and K if `latent`."""
        return ((self.q, "Q"), (self.k, "K")) if self.latent else ((self.v, "V"),)

    @property
    def tables(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """What a kernel reads beside Q, K and V, by name."""
        return () if self.cache is None else self.cache.tables

    def sequences(self, batches: slice = slice(None)) -> Iterator[Inputs]:
        """Yield each sequence of a decode problem as a problem of its own, without a cache."""
        assert self.cache is not None
        lengths = self.cache.lengths(self.k)
        for b in range(self.q.shape[0])[batches]:
            k, v = (self.cache.sequence(t, b, lengths[b]) for t in (self.k, self.v))
            yield replace(self, q=self.q[b : b + 1], k=k, v=v, cache=None)

    def given_to(self, prepare: Callable[..., R], out: torch.Tensor) -> R:
        """Hand the problem to a kernel's `prepare`, with its cache where it has one."""
        if self.cache is None:
            return prepare(*self.tensors, out, self.scale)
        return prepare(
            *self.tensors, out, self.scale, key_counts=self.cache.key_counts,
            pages=self.cache.pages, splits=self.cache.splits,
        )  # fmt: skip


def make(
    check: Check, dtype: DType, device: torch.device, function: Function | None = None
) -> Inputs:
    """Make the inputs of `check`; the same check, dtype and device give the same bits."""
    generator = torch.Generator(device).manual_seed(check.seed)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, generator=generator)

    kind = TORCH_DTYPE[dtype]
    q, k, v = RECIPES[check.data](check.shape, check.softmax_scale, draw)
    if check.shape.latent:
        k[..., : v.shape[3]] = v
    q, k, v = q.to(kind), k.to(kind), v.to(kind)
    cache = None
    if check.counts:
        counts, page = counts_of(check.counts, device), check.page
        table = None
        if page:
            table = page_table(check.counts, page, check.shape.seqlen_k, check.seed, check.pool)
            k, v = (in_pages(t, check.counts, table, page, check.pool) for t in (k, v))
            table = table.to(device)
        else:
            hide_past(k, check.counts)
            hide_past(v, check.counts)
        cache = Cache(counts, table, check.splits or None)
    q, k, v = lay_out((q, k, v), check.layout)
    if check.shape.latent:
        v = k[..., : v.shape[3]]
    return Inputs(q, k, v, check.softmax_scale, check.shape.causal, cache, function)


# ---- data --------------------------------------------------------------------------------------


def _normal(s: Shape, draw: Draw, factor: float = 1.0) -> Triple:
    q = draw(s.batch, s.seqlen_q, s.heads, s.head_dim)
    k = draw(s.batch, s.seqlen_k, s.kv_heads, s.head_dim)
    v = draw(s.batch, s.seqlen_k, s.kv_heads, s.head_dim_v)
    return q * factor, k * factor, v * factor


def _mean_one(s: Shape, draw: Draw, factor: float = 1.0) -> Triple:
    q, k, v = _normal(s, draw)
    return q * factor, k * factor, 1 + 0.1 * v


def _constant_logit(s: Shape, draw: Draw, noise: float, q0: float, k0: float) -> Triple:
    """Q and K whose product is q0*k0 in every place, and little noise besides."""
    q, k, v = _mean_one(s, draw, noise)
    column = -1 if s.latent else 0  # one that is not V's
    q[..., column], k[..., column] = q0, k0
    return q, k, v


def _negative(s: Shape, scale: float, draw: Draw) -> Triple:
    return _constant_logit(s, draw, 0.1, 1.0, -120.0 / scale)


def _sentinel(s: Shape, scale: float, draw: Draw) -> Triple:
    # powers of two in both 16-bit types, so that every logit has the same bits
    q0 = 2.0 ** math.ceil(math.log2(1e5 / scale) / 2)
    return _constant_logit(s, draw, 0.0, q0, -q0)


def _counting(s: Shape, scale: float, draw: Draw) -> Triple:
    q, k, v = _normal(s, draw)
    rows = torch.arange(1, s.seqlen_k + 1, device=v.device, dtype=v.dtype)
    return torch.zeros_like(q), k, rows.view(1, -1, 1, 1).expand_as(v).clone()


def _head_constant(s: Shape, scale: float, draw: Draw) -> Triple:
    q, k, v = _normal(s, draw)
    heads = torch.arange(1, s.kv_heads + 1, device=v.device, dtype=v.dtype)
    return q, k, heads.view(1, 1, -1, 1).expand_as(v).clone()


def _all_133120(s: Shape, scale: float, draw: Draw) -> Triple:
    q, k, v = _normal(s, draw)
    return q.fill_(133120.0), k.fill_(133120.0), v.fill_(133120.0)


def _nan_queries(s: Shape, scale: float, draw: Draw) -> Triple:
    q, k, v = _mean_one(s, draw)
    q[:, 3::7] = math.nan
    return q, k, v


def _rising(s: Shape, scale: float, draw: Draw) -> Triple:
    """A row's maximum moves until its last keys: by more than an exponential bears."""
    q, k, v = _normal(s, draw)
    return q, k * torch.linspace(0.2, 60.0, s.seqlen_k, device=k.device).view(1, -1, 1, 1), v


def _sink(s: Shape, scale: float, draw: Draw) -> Triple:
    """Half of a row's weight lies on key 0, the rest is spread evenly: no key of it is heavy."""
    q, k, v = _constant_logit(s, draw, 0.0, 1.0, 0.0)
    column = -1 if s.latent else 0
    k[:, 0, :, column] = math.log(max(s.seqlen_k, 2)) / scale
    v[:, 0] *= 3
    return q, k, v


def _newest(s: Shape, scale: float, draw: Draw) -> Triple:
    """Queries that share a KV head are alike, and the last keys are what they look for."""
    q, k, v = _normal(s, draw)
    own = slice(s.head_dim_v, None) if s.latent else slice(None)  # columns of K that are not V's
    wanted = k[:, -1:, :, own].sign()
    q *= 0.1
    q[..., own] += wanted.repeat_interleave(s.group, 2)
    k[:, -NEWEST_KEYS:, :, own] = wanted * NEWEST_LOGIT / (scale * wanted.shape[3])
    return q, k, v


def _large_values(s: Shape, scale: float, draw: Draw) -> Triple:
    q, k, v = _mean_one(s, draw)
    return q, k, v * 1e5


def _special_keys(s: Shape, scale: float, draw: Draw) -> Triple:
    """Inf and NaN in key 0, which every row must see, beside others.

    Key 0, since no emitted exponential of it is a polynomial: that of `exp2_fma` loses NaN.

    One element of K is Inf: rows whose query is positive there are NaN, the others leave the key
    out. One is NaN: all rows are. One of V is Inf and one NaN: so are these columns, and no other.
    """
    q, k, v = _normal(s, draw)
    k[0, 0, 0, 0] = math.inf
    k[1 % s.batch, 0, -1, -1] = math.nan
    v[2 % s.batch, 0, 0, 0] = math.inf
    v[2 % s.batch, 0, -1, -1] = math.nan
    return q, k, v


RECIPES: dict[Data, Callable[[Shape, float, Draw], Triple]] = {
    Data.NORMAL: lambda s, scale, draw: _normal(s, draw),
    Data.NORMAL_3: lambda s, scale, draw: _normal(s, draw, 3.0),
    Data.MEAN_ONE: lambda s, scale, draw: _mean_one(s, draw),
    Data.NEGATIVE: _negative,
    Data.SENTINEL: _sentinel,
    Data.SCORES_OVERFLOW: lambda s, scale, draw: _constant_logit(s, draw, 0.0, 300.0, 300.0),
    Data.COUNTING: _counting,
    Data.HEAD_CONSTANT: _head_constant,
    Data.ALL_133120: _all_133120,
    Data.NAN_QUERIES: _nan_queries,
    Data.FLAT: lambda s, scale, draw: _constant_logit(s, draw, 0.0, 0.0, 0.0),
    Data.RISING: _rising,
    Data.SINK: _sink,
    Data.NEWEST: _newest,
    Data.LARGE_VALUES: _large_values,
    Data.SPECIAL_KEYS: _special_keys,
}

# ---- layouts -----------------------------------------------------------------------------------


def lay_out(values: Triple, layout: Layout) -> Triple:
    """Return tensors equal to packed `values`, stored as `layout` says."""
    q, k, v = values
    match layout:
        case Layout.HEADS_FIRST:
            return _stored(q, 0, 2, 1, 3), _stored(k, 0, 2, 1, 3), _stored(v, 0, 2, 1, 3)
        case Layout.ROWS_FIRST:
            return _stored(q, 1, 0, 2, 3), _stored(k, 1, 0, 2, 3), _stored(v, 1, 0, 2, 3)
        case Layout.MIXED:
            return q, _stored(k, 0, 2, 1, 3), _stored(v, 1, 0, 2, 3)
        case Layout.INTERLEAVED:
            return _interleaved(q, k, v)
        case Layout.SECOND_ROW:
            return q, _second_row(k), v
        case Layout.EMBEDDED:
            return _embedded(q), _embedded(k), _embedded(v)
        case Layout.SHARED_HEADS:
            heads = q.shape[2]
            return q, k[:, :, :1].expand(-1, -1, heads, -1), v[:, :, :1].expand(-1, -1, heads, -1)
        case Layout.OFFSET:
            return _pitched(q, 8, 16), _pitched(k, 8, 16), _pitched(v, 8, 16)
        case Layout.PITCH:
            return _pitched(q, 0, 8), _pitched(k, 0, 8), _pitched(v, 0, 8)
        case Layout.ODD_POINTER:
            return _shifted(q), _shifted(k), _shifted(v)
        case Layout.SECOND_COLUMN:
            return _second_column(q), _second_column(k), _second_column(v)
    return values


def _stored(t: torch.Tensor, *order: int) -> torch.Tensor:
    """Store `t` contiguous in another order of its axes; the orders used are their own inverse."""
    return t.permute(order).contiguous().permute(order)


def _interleaved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Triple:
    if q.shape[1] != k.shape[1]:  # different lengths share no row: only K and V are interleaved
        k, v = _split_views(k, v)
        return q, k, v
    q, k, v = _split_views(q, k, v)
    return q, k, v


def _split_views(*tensors: torch.Tensor) -> list[torch.Tensor]:
    columns = [t.transpose(0, 1).flatten(2) for t in tensors]  # [S, B, heads * columns] each
    buffer = torch.cat(columns, dim=2)
    parts = buffer.split([c.shape[2] for c in columns], dim=2)
    return [
        part.unflatten(2, (t.shape[2], t.shape[3])).transpose(0, 1)
        for part, t in zip(parts, tensors, strict=True)
    ]


def _second_row(t: torch.Tensor) -> torch.Tensor:
    b, s, h, d = t.shape
    buffer = t.new_full((b, 2 * s, h, d), math.nan)
    buffer[:, ::2] = t
    return buffer[:, ::2]


def _embedded(t: torch.Tensor) -> torch.Tensor:
    b, s, h, d = t.shape
    buffer = t.new_full((b + 1, s + 64, h, d), math.nan)
    view = buffer[:b, 16 : 16 + s]
    view.copy_(t)
    return view


def _pitched(t: torch.Tensor, first: int, more: int) -> torch.Tensor:
    columns = t.shape[3]
    buffer = t.new_full((*t.shape[:3], columns + more), math.nan)
    view = buffer[..., first : first + columns]
    view.copy_(t)
    return view


def _shifted(t: torch.Tensor) -> torch.Tensor:
    buffer = t.new_full((t.numel() + 8,), math.nan)
    view = buffer[1 : 1 + t.numel()].view(t.shape)
    view.copy_(t)
    return view


def _second_column(t: torch.Tensor) -> torch.Tensor:
    buffer = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), math.nan)
    buffer[..., ::2] = t
    return buffer[..., ::2]
