"""Decode problems to judge kernels by: ragged lengths, pages, strides, NaN wherever no key is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from space.variant import Problem
from tuner.evaluate.inputs import TORCH_DTYPE

LATENT = (576, 512)


@dataclass(frozen=True)
class DecodeCase:
    """Tensors of one problem; `pages` is None for a cache in one piece."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    counts: torch.Tensor
    pages: torch.Tensor | None
    causal: bool
    scale: float

    def keys_of(self, b: int, cache: torch.Tensor) -> torch.Tensor:
        """The rows of K or V that are sequence b's, [keys, heads, columns]."""
        count = int(self.counts[b])
        if self.pages is None:
            return cache[b, :count]
        page = cache.shape[1]
        return cache[self.pages[b, : -(-count // page)].long()].flatten(0, 1)[:count]

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """Plain attention computed in `dtype`; a query that sees no key is 0."""
        batch, queries, heads, _ = self.q.shape
        group = heads // self.k.shape[2]
        out = self.q.new_zeros((batch, queries, heads, self.v.shape[3]), dtype=dtype)
        for b in range(batch):
            k = self.keys_of(b, self.k).to(dtype).repeat_interleave(group, 1)
            v = self.keys_of(b, self.v).to(dtype).repeat_interleave(group, 1)
            if not len(k):
                continue
            scores = torch.einsum("qhd,khd->hqk", self.q[b].to(dtype), k) * self.scale
            if self.causal:
                hidden = torch.ones_like(scores[0], dtype=torch.bool)
                scores = scores.masked_fill(hidden.triu(len(k) - queries + 1), -torch.inf)
            p = scores.softmax(-1).nan_to_num(0.0)
            out[b] = torch.einsum("hqk,khd->qhd", p, v)
        return out

    def output(self) -> torch.Tensor:
        """A place for the output, full of NaN."""
        shape = (*self.q.shape[:3], self.v.shape[3])
        return torch.full(shape, torch.nan, dtype=self.q.dtype, device=self.q.device)

    def assert_right(self, got: torch.Tensor) -> None:
        """At most twice the error of plain attention at the same dtype and a last bit; no NaN."""
        self.assert_close(got, self.plain(torch.float64))

    def assert_close(self, got: torch.Tensor, other: torch.Tensor) -> None:
        """Apart by at most twice the error of plain attention at this dtype, and a last bit.

        P is rounded against another reference in every split, so that two right answers differ by
        what each of them may err.
        """
        exact = self.plain(torch.float64)
        own = (self.plain(got.dtype).double() - exact).abs().max().item()
        allowed = 2 * own + torch.finfo(got.dtype).eps * exact.abs()
        error = (got.double() - other.double()).abs()
        assert bool((error <= allowed).all()), (error.max().item(), own)


def decode_case(
    problem: Problem,
    heads: int,
    kv_heads: int,
    queries: int,
    counts: tuple[int, ...],
    device: str = "cpu",
) -> DecodeCase:
    """Draw a case; `counts` are the keys of each sequence."""
    torch.manual_seed(3)
    kind, page, batch = TORCH_DTYPE[problem.dtype], problem.page, len(counts)
    rows = page or max(counts) + 5
    pages = None
    planes = batch
    if page:
        per = -(-(max(counts) + 5) // page)
        planes = batch * per + 3
        pages = torch.randperm(planes)[: batch * per].reshape(batch, per).int()

    def cache(columns: int) -> torch.Tensor:
        # a row and 8 columns more than the tensor has: strides that nobody may take for granted
        whole = torch.full((planes, rows + 1, kv_heads, columns + 8), torch.nan, dtype=kind)
        found = whole[:, :rows, :, :columns]
        for b, count in enumerate(counts):
            for j in range(0, count, rows):
                at = b if pages is None else int(pages[b, j // rows])
                part = found[at, : min(rows, count - j)]
                part.copy_(torch.randn(part.shape))
        return whole.to(device)[:, :rows, :, :columns]

    k = cache(problem.head_dim)
    v = k[..., : problem.head_dim_v] if problem.latent else cache(problem.head_dim_v)
    q = torch.randn(batch, queries, heads, problem.head_dim).to(kind)
    return DecodeCase(
        q.to(device), k, v, torch.tensor(counts, dtype=torch.int32, device=device),
        None if pages is None else pages.to(device), problem.causal, problem.default_scale,
    )  # fmt: skip
