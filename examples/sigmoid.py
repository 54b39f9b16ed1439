"""Sigmoid attention: each weight is sigmoid(scaled score + bias), with no softmax and no mask."""

import torch
from torch import Tensor


def sigmoid_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, bias: float = -8.3):
    """q [B, M, Hq, D], k [B, N, Hkv, D], v [B, N, Hkv, Dv]; returns [B, M, Hq, Dv].

    `bias` is usually -log(N): -8.3 for 4096 keys.
    """
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * scale
    return torch.einsum("bhmn,bnhd->bmhd", torch.sigmoid(scores + bias), v)
