"""Attention in which each query sees itself and the `window_left` keys before it."""

import torch
from torch import Tensor


def window_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window_left: int = 1023):
    """q [B, M, Hq, D], k [B, N, Hkv, D], v [B, N, Hkv, Dv]; returns [B, M, Hq, Dv]."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * scale
    m, n = scores.shape[-2:]
    row = torch.arange(m, device=q.device)[:, None] + n - m
    key = torch.arange(n, device=q.device)[None, :]
    hidden = (key > row) | (key < row - window_left)
    p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhmn,bnhd->bmhd", p, v)
