"""Causal attention whose scaled scores are capped: softcap * tanh(s / softcap), as in Gemma 2."""

import torch
from torch import Tensor


def softcap_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float = 30.0):
    """q [B, M, Hq, D], k [B, N, Hkv, D], v [B, N, Hkv, Dv]; returns [B, M, Hq, Dv]."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * scale
    scores = softcap * torch.tanh(scores / softcap)
    m, n = scores.shape[-2:]
    hidden = torch.ones(m, n, dtype=torch.bool, device=q.device).triu(n - m + 1)
    p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhmn,bnhd->bmhd", p, v)
