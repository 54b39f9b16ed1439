"""The cache of a decode problem: how many keys each sequence has, and the pages they lie in.

A cache in one piece is [batch, capacity, KV heads, columns]; a paged one is [pages, page size, KV
heads, columns], and a table names the pages of each sequence. What no sequence owns is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

NO_PAGE = -1  #: in a table, where a sequence has no more keys


@dataclass(frozen=True, slots=True)
class Cache:
    """What a decode kernel is told beside Q, K and V."""

    key_counts: torch.Tensor | None = None  #: int32 [batch]; None: each sequence fills the cache
    pages: torch.Tensor | None = None  #: int32 [batch, pages a sequence]; None: in one piece
    splits: int | None = None  #: of the keys; None: as many as the kernel's rule says

    @property
    def tables(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """The tensors that a kernel reads, by name."""
        named = (("key_counts", self.key_counts), ("pages", self.pages))
        return tuple((name, t) for name, t in named if t is not None)

    def lengths(self, k: torch.Tensor) -> list[int]:
        """Return the number of keys of each sequence of the cache K."""
        if self.key_counts is not None:
            return [int(n) for n in self.key_counts.tolist()]
        batch = k.shape[0] if self.pages is None else self.pages.shape[0]
        return [self.capacity(k)] * batch

    def capacity(self, k: torch.Tensor) -> int:
        """Return the keys that the cache K holds of a sequence at most."""
        rows, pages = k.shape[1], 1 if self.pages is None else self.pages.shape[1]
        return int(rows * pages)

    def sequence(self, cache: torch.Tensor, b: int, length: int) -> torch.Tensor:
        """Return the rows of sequence `b` in K or V, as [1, length, KV heads, columns]."""
        if self.pages is None:
            return cache[b : b + 1, :length]
        used = self.pages[b, : -(-length // cache.shape[1])].long()
        return cache[used].flatten(0, 1)[:length].unsqueeze(0)


def counts_of(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the keys of each sequence as kernels read them."""
    return torch.tensor(lengths, dtype=torch.int32, device=device)


def hide_past(cache: torch.Tensor, lengths: Sequence[int]) -> None:
    """Put NaN behind each sequence's keys in a cache in one piece."""
    for b, length in enumerate(lengths):
        cache[b, length:] = math.nan


def page_table(
    lengths: Sequence[int], page: int, capacity: int, seed: int, pool: int = 0
) -> torch.Tensor:
    """Return a table on the CPU: pages in random order, `NO_PAGE` where a sequence has no keys.

    Page numbers leave some pages of the cache unused; `page_count` says how many there are. Of a
    larger `pool` they are the last.
    """
    width = -(-capacity // page)
    own = page_count(lengths, page)
    order = torch.randperm(own, generator=torch.Generator().manual_seed(seed)).tolist()
    first = page_count(lengths, page, pool) - own
    rows = []
    for length in lengths:
        used = -(-length // page)
        rows.append([first + order.pop() for _ in range(used)] + [NO_PAGE] * (width - used))
    return torch.tensor(rows, dtype=torch.int32).view(len(rows), width)


def page_count(lengths: Sequence[int], page: int, pool: int = 0) -> int:
    """Return the pages of a cache that holds these sequences, and two that nothing owns.

    They are at least `pool`.
    """
    return max(sum(-(-length // page) for length in lengths) + 2, pool)


def in_pages(
    cache: torch.Tensor, lengths: Sequence[int], table: torch.Tensor, page: int, pool: int = 0
) -> torch.Tensor:
    """Return a cache in one piece as pages, NaN where no sequence has a key."""
    pages = cache.new_full((page_count(lengths, page, pool), page, *cache.shape[2:]), math.nan)
    for b, length in enumerate(lengths):
        for n in range(-(-length // page)):
            rows = cache[b, n * page : min(length, (n + 1) * page)]
            pages[int(table[b, n]), : rows.shape[0]] = rows
    return pages
