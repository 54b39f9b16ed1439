"""Decode 'kernels' in torch, right and wrong, with the signature of `LoadedKernel.prepare`.

Each sequence and KV head is worked out by splits that are then combined, as a real kernel does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tuner.evaluate.launch import Launcher, Prepare

T = torch.Tensor
TILE = 16


@dataclass(frozen=True)
class Decoder:
    """A decode kernel; each field is a way to be wrong."""

    causal: bool = False
    ignores_counts: bool = False
    reads_tail: bool = False  #: V's rows behind the last key are multiplied by a weight of 0
    causal_by_capacity: bool = False  #: the mask is aligned with the cache, not the sequence
    pages_in_order: bool = False  #: the table is not read
    heads_interleaved: bool = False  #: query head h reads KV head h % Hkv
    keeps_first_split: bool = False
    sums_partials_plainly: bool = False  #: splits are averaged, not weighed
    empty_split_is_nan: bool = False
    turns_table: bool = False  #: the table is written to

    def prepare(
        self, q: T, k: T, v: T, out: T, scale: float, key_counts: T | None = None,
        pages: T | None = None, splits: int | None = None,
    ) -> Launcher:  # fmt: skip
        """See `LoadedKernel.prepare`."""

        def launch() -> None:
            for b in range(q.shape[0]):
                keys, values = self._rows(k, b, pages), self._rows(v, b, pages)
                count = keys.shape[0]
                if key_counts is not None and not self.ignores_counts:
                    count = int(key_counts[b])
                out[b] = self._one(q[b], keys, values, count, scale, splits or 3)
            if self.turns_table and pages is not None:
                pages.copy_(pages.flip(1))

        return launch

    def _rows(self, cache: T, b: int, pages: T | None) -> T:
        if pages is None:
            return cache[b]
        table = pages[b].clamp(min=0).long()
        if self.pages_in_order:
            table = torch.arange(len(table))
        return cache[table].flatten(0, 1)

    def _one(self, q: T, keys: T, values: T, count: int, scale: float, splits: int) -> T:
        out = torch.empty(*q.shape[:2], values.shape[2], dtype=q.dtype)
        group = q.shape[1] // keys.shape[1]
        for head in range(q.shape[1]):
            kv_head = head % keys.shape[1] if self.heads_interleaved else head // group
            out[:, head] = self._head(
                q[:, head].float(), keys[:, kv_head].float(), values[:, kv_head].float(),
                count, scale, splits, q.dtype,
            )  # fmt: skip
        return out

    def _head(
        self, q: T, keys: T, values: T, count: int, scale: float, splits: int, kind: torch.dtype
    ) -> T:
        tiles = math.ceil(count / TILE)
        per = math.ceil(tiles / splits) * TILE
        last = (keys.shape[0] if self.causal_by_capacity else count) - q.shape[0]
        parts, sums = [], []
        for s in range(splits):
            lo, hi = min(s * per, count), min((s + 1) * per, count)
            end = min(hi + TILE, keys.shape[0]) if self.reads_tail and hi > lo else hi
            scores = q @ keys[lo:end].T * scale
            index = torch.arange(lo, end)
            hidden = (index >= hi).expand_as(scores)
            if self.causal:
                hidden = hidden | (index > last + torch.arange(q.shape[0])[:, None])
            scores = scores.masked_fill(hidden, -math.inf)
            lse = torch.logsumexp(scores, -1, keepdim=True)
            # divided by the sum itself: the rounding of a large lse only moves the weights
            p = scores.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
            if not self.reads_tail:
                p = p[:, : hi - lo]
            part = p.to(kind).float() @ values[lo:end]
            if hi <= lo and self.empty_split_is_nan:
                part = part * math.nan
            parts.append(part)
            sums.append(lse)
        return self._combined(torch.stack(parts), torch.stack(sums)).to(kind)

    def _combined(self, parts: T, sums: T) -> T:
        if self.keeps_first_split:
            return parts[0]
        if self.sums_partials_plainly:
            return parts.mean(0)
        top = sums.amax(0)
        weights = (sums - top.masked_fill(top == -math.inf, 0.0)).exp()
        total = weights.sum(0)
        return (parts * weights).sum(0) / total.masked_fill(total == 0, 1.0)


def spoiled(kernel: Decoder, then: Callable[[T, T, T, T], None]) -> Prepare:
    """A kernel after which `then(q, k, v, out)` is done."""

    def prepare(q: T, k: T, v: T, out: T, scale: float, **more: object) -> Launcher:
        launch = kernel.prepare(q, k, v, out, scale, **more)  # type: ignore[arg-type]

        def both() -> None:
            launch()
            then(q, k, v, out)

        return both

    return prepare
