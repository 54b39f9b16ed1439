"""Attention variants that nobody ships a kernel for: in words, as PyTorch, and as a TL sketch.

They are what the published requests ask for, and examples of what a user may give as a reference.
"""

from __future__ import annotations

from dataclasses import dataclass

_SKETCH = """\
Copy Q from global to shared
for i = 0:N
  Copy K from global to shared
  Compute GEMM Q, K.T and get S
  Compute Scale S, scale
{middle}  Copy V from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
end
Copy O from register to global
"""
_BIAS = """\
  Copy B in coordinate [L = block_idx, D = i] from global to shared
  Compute Mask S, bias(B)
"""


@dataclass(frozen=True, slots=True)
class Custom:
    """One variant. `causal` is whether the mask is exactly the causal one."""

    name: str
    words: str
    reference: str  #: a PyTorch function of q, k, v, each [batch, length, heads, head dim]
    causal: bool
    sketch: str


SOFTCAP = Custom(
    "softcap",
    "causal attention whose scaled scores are capped before the mask: 30 tanh(s / 30)",
    """\
def softcap_attention(q, k, v):
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) / q.shape[-1] ** 0.5
    scores = 30.0 * torch.tanh(scores / 30.0)
    m, n = scores.shape[-2:]
    visible = torch.ones(m, n, dtype=torch.bool).tril(n - m)
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("bhmn,bnhd->bmhd", scores.softmax(-1), v)
""",
    True,
    _SKETCH.format(
        middle="  Compute Softcap S, 30\n  Compute Mask S, causal\n  Compute Softmax S\n"
    ),
)
WINDOW = Custom(
    "sliding-window",
    "attention in which each query sees itself and the 1023 keys before it",
    """\
def sliding_window_attention(q, k, v):
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) / q.shape[-1] ** 0.5
    m, n = scores.shape[-2:]
    row = torch.arange(m)[:, None] + n - m
    column = torch.arange(n)[None, :]
    visible = (column <= row) & (column >= row - 1023)
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("bhmn,bnhd->bmhd", scores.softmax(-1), v)
""",
    False,
    _SKETCH.format(middle="  Compute Mask S, window(1023, 0)\n  Compute Softmax S\n"),
)
ALIBI = Custom(
    "alibi",
    "causal attention with ALiBi: head h adds -2^(-8 (h + 1) / H) times the distance from query "
    "to key to the scaled scores; the kernel gets that as a bias tensor B",
    """\
def alibi_attention(q, k, v):
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) / q.shape[-1] ** 0.5
    h, m, n = scores.shape[-3:]
    distance = torch.arange(m)[:, None] + n - m - torch.arange(n)[None, :]
    slope = 2.0 ** (-8.0 * torch.arange(1, h + 1) / h)
    scores = scores - slope[:, None, None] * distance
    scores = scores.masked_fill(distance < 0, float("-inf"))
    return torch.einsum("bhmn,bnhd->bmhd", scores.softmax(-1), v)
""",
    True,
    _SKETCH.format(middle=f"{_BIAS}  Compute Mask S, causal\n  Compute Softmax S\n"),
)
SIGMOID = Custom(
    "sigmoid",
    "sigmoid attention: each weight is sigmoid(scaled score - log(number of keys)), no softmax, "
    "no mask; the kernel gets the scalar b = -log(number of keys)",
    """\
def sigmoid_attention(q, k, v):
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) / q.shape[-1] ** 0.5
    weights = torch.sigmoid(scores - math.log(k.shape[1]))
    return torch.einsum("bhmn,bnhd->bmhd", weights, v)
""",
    False,
    _SKETCH.format(middle="  Compute Add S, b and get new S\n  Compute Sigmoid S\n"),
)
SINK = Custom(
    "sink-tokens",
    "attention in which each query sees the first 4 keys (the sinks), itself and the 1023 keys "
    "before it; the kernel gets the mask as a bias tensor B of 0 and minus infinity",
    """\
def sink_attention(q, k, v):
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) / q.shape[-1] ** 0.5
    m, n = scores.shape[-2:]
    row = torch.arange(m)[:, None] + n - m
    column = torch.arange(n)[None, :]
    visible = (column <= row) & ((column >= row - 1023) | (column < 4))
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("bhmn,bnhd->bmhd", scores.softmax(-1), v)
""",
    False,
    _SKETCH.format(middle=f"{_BIAS}  Compute Softmax S\n"),
)
CUSTOMS = {c.name: c for c in (SOFTCAP, WINDOW, ALIBI, SIGMOID, SINK)}
