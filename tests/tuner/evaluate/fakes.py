"""Attention 'kernels' in torch, right and wrong, with the signature of `LoadedKernel.prepare`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tuner.evaluate.launch import Launcher, Prepare

T = torch.Tensor
#: body(q, k, v, out, scale, causal) writes out
Body = Callable[[T, T, T, T, float, bool], None]


def kernel(body: Body, causal: bool) -> Prepare:
    """Make a kernel of a Python body."""

    def prepare(q: T, k: T, v: T, out: T, scale: float) -> Launcher:
        return lambda: body(q, k, v, out, scale, causal)

    return prepare


def scores(q: T, k: T, scale: float, causal: bool, shift: int | None = None) -> T:
    """Masked float32 scores [B, H, Sq, Sk]."""
    group = q.shape[2] // k.shape[2]
    keys = k.float().repeat_interleave(group, 2)
    s = torch.einsum("bqhd,bkhd->bhqk", q.float(), keys) * scale
    if causal:
        shift = k.shape[1] - q.shape[1] if shift is None else shift
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(shift + 1)
        s = s.masked_fill(hidden, -math.inf)
    return s


def weigh(s: T, v: T, group: int, dtype: torch.dtype) -> T:
    """Softmax and the second product as a fused kernel does them: P rounded, l in float32."""
    m = s.amax(-1, keepdim=True).clamp_min(-3e38)
    p = (s - m).exp()
    total = p.sum(-1, keepdim=True)
    values = v.float().repeat_interleave(group, 2)
    out = torch.einsum("bhqk,bkhd->bhqd", p.to(dtype).float(), values)
    return (out / total.clamp_min(1e-30)).transpose(1, 2).to(dtype)


def right(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """A right kernel."""
    out.copy_(weigh(scores(q, k, scale, causal), v, q.shape[2] // k.shape[2], q.dtype))


def writes_nothing(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Leaves the output alone."""


def half_written(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Writes the first half of the rows."""
    whole = torch.empty_like(out)
    right(q, k, v, whole, scale, causal)
    half = max(out.shape[1] // 2, 1)
    out[:, :half] = whole[:, :half]


def even_heads(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Writes every other head."""
    whole = torch.empty_like(out)
    right(q, k, v, whole, scale, causal)
    out[:, :, ::2] = whole[:, :, ::2]


def zeros(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Zeros everywhere."""
    out.zero_()


def mean_of_v(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """The mean of V, whatever Q and K say."""
    group = q.shape[2] // k.shape[2]
    out.copy_(v.float().mean(1, keepdim=True).repeat_interleave(group, 2).expand_as(out))


def wrong_heads(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Query head h reads KV head h % Hkv, or its neighbour's where both are the same."""
    order = torch.arange(q.shape[2]) % k.shape[2]
    if k.shape[2] == q.shape[2]:
        order = (order + 1) % k.shape[2]
    right(q, k[:, :, order], v[:, :, order], out, scale, causal)


def modifies_k(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Right, and K is scaled in place afterwards."""
    right(q, k, v, out, scale, causal)
    k.mul_(0.5)


def writes_past_the_end(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Right, and one element after the last is written."""
    right(q, k, v, out, scale, causal)
    wider = torch.as_strided(out, (out.numel() + 1,), (1,))
    wider[-1] = 1.0


def half_precision_sums(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Sums the second product in the 16-bit type, 16 keys at a time."""
    p = scores(q, k, scale, causal).softmax(-1).nan_to_num(0.0).to(q.dtype)
    values = v.repeat_interleave(q.shape[2] // k.shape[2], 2)
    total = torch.zeros(out.shape, dtype=q.dtype)
    for lo in range(0, k.shape[1], 16):
        keys = slice(lo, lo + 16)
        step = torch.einsum("bhqk,bkhd->bqhd", p[..., keys].float(), values[:, keys].float())
        total = total + step.to(q.dtype)
    out.copy_(total)


def half_precision_scores(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Sums Q K^T in the 16-bit type, 8 columns at a time."""
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = torch.zeros(q.shape[0], q.shape[2], q.shape[1], k.shape[1], dtype=q.dtype)
    for lo in range(0, q.shape[3], 8):
        d = slice(lo, lo + 8)
        step = torch.einsum("bqhd,bkhd->bhqk", q[..., d].float(), keys[..., d].float())
        s = s + step.to(q.dtype)
    s = s.float() * scale
    s = s.masked_fill(scores(q, k, scale, causal) == -math.inf, -math.inf)
    out.copy_(weigh(s, v, q.shape[2] // k.shape[2], q.dtype))


def sees_one_key_more(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """The causal mask is off by one."""
    shift = k.shape[1] - q.shape[1] + 1
    s = scores(q, k, scale, causal, shift)
    out.copy_(weigh(s, v, q.shape[2] // k.shape[2], q.dtype))


def misses_last_key(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """The last key is masked for every row."""
    s = scores(q, k, scale, causal)
    s[..., -1] = -math.inf
    out.copy_(weigh(s, v, q.shape[2] // k.shape[2], q.dtype))


def top_left_causal(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Causal aligned top-left."""
    s = scores(q, k, scale, causal, 0)
    out.copy_(weigh(s, v, q.shape[2] // k.shape[2], q.dtype))


def finite_sentinel(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Masks with -1e4, and pads keys to a multiple of 64 with zeros that score -1e4 too."""
    group = q.shape[2] // k.shape[2]
    pad = -k.shape[1] % 64
    s = scores(q, k, scale, causal).masked_fill_(torch.tensor(False), 0)
    s = s.masked_fill(s == -math.inf, -1e4)
    s = torch.nn.functional.pad(s, (0, pad), value=-1e4)
    out.copy_(weigh(s, torch.nn.functional.pad(v, (0, 0, 0, 0, 0, pad)), group, q.dtype))


def padded_keys_score_zero(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """The tail of the last key tile is not masked."""
    group = q.shape[2] // k.shape[2]
    pad = -k.shape[1] % 64
    s = torch.nn.functional.pad(scores(q, k, scale, causal), (0, pad))
    out.copy_(weigh(s, torch.nn.functional.pad(v, (0, 0, 0, 0, 0, pad)), group, q.dtype))


def nan_for_empty_rows(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Divides by l where a row sees nothing."""
    s = scores(q, k, scale, causal)
    values = v.float().repeat_interleave(q.shape[2] // k.shape[2], 2)
    out.copy_(torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), values).to(q.dtype))


def numbers_for_nan(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
    """Right, but every NaN is replaced by 0."""
    right(q, k, v, out, scale, causal)
    out.nan_to_num_(0.0)


class PreviousOutput:
    """Gives the output of the call before, and the right one the first time."""

    def __init__(self) -> None:
        self.kept: T | None = None

    def __call__(self, q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
        fresh = torch.empty_like(out)
        right(q, k, v, fresh, scale, causal)
        stale = self.kept if self.kept is not None and self.kept.shape == out.shape else fresh
        out.copy_(stale)
        self.kept = fresh


class CachedByPointer:
    """Computes once for each output address and replays it whatever the inputs hold by then."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, tuple[int, ...]], T] = {}

    def __call__(self, q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
        key = q.data_ptr(), tuple(out.shape)
        if key not in self.kept:
            self.kept[key] = torch.empty_like(out)
            right(q, k, v, self.kept[key], scale, causal)
        out.copy_(self.kept[key])


class WrongSometimes:
    """Right but for every `period`-th launch, in which one element is off."""

    def __init__(self, period: int) -> None:
        self.period = period
        self.calls = 0

    def __call__(self, q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
        self.calls += 1
        right(q, k, v, out, scale, causal)
        if self.calls % self.period == 0:
            out[0, 0, 0, 0] += 0.5
