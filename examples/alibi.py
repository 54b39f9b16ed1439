"""Causal attention with ALiBi: head h of H adds -2^(-8 (h + 1) / H) times the distance."""

import torch
from torch import Tensor


def alibi_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float):
    """q [B, M, Hq, D], k [B, N, Hkv, D], v [B, N, Hkv, Dv]; returns [B, M, Hq, Dv]."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * scale
    h, m, n = scores.shape[1:]
    row = torch.arange(m, device=q.device)[:, None] + n - m
    distance = row - torch.arange(n, device=q.device)[None, :]
    heads = torch.arange(1, h + 1, device=q.device, dtype=torch.float64)
    slopes = 2.0 ** (-8.0 * heads / h)
    scores = scores - (slopes[:, None, None] * distance).to(q.dtype)
    p = scores.masked_fill(distance < 0, float("-inf")).softmax(-1)
    return torch.einsum("bhmn,bnhd->bmhd", p, v)
