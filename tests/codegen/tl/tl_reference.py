"""Plain attention in float64, the other side of every comparison here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def random_inputs(
    shape: tuple[int, int, int, int, int, int, int], seed: int = 0
) -> dict[str, Array]:
    """Q, K, V of B, Hq, Hkv, Sq, Sk, D, Dv."""
    batch, heads, kv_heads, m, n, dim, dim_v = shape
    generator = np.random.default_rng(seed)
    return {
        "Q": generator.normal(size=(batch, m, heads, dim)),
        "K": generator.normal(size=(batch, n, kv_heads, dim)),
        "V": generator.normal(size=(batch, n, kv_heads, dim_v)),
    }


def scores_of(q: Array, k: Array, scale: float) -> Array:
    """Scores [batch, heads, m, n] with KV heads shared by groups of query heads."""
    shared = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    return np.einsum("bmhd,bnhd->bhmn", q, shared) * scale


def hidden_by(
    m: int, n: int, causal: bool = False, window: tuple[int, int] | None = None
) -> npt.NDArray[np.bool_]:
    """What a mask hides; both kinds are aligned bottom-right."""
    row, column = np.arange(m)[:, None] + n - m, np.arange(n)[None, :]
    hidden = np.zeros((m, n), dtype=bool)
    if causal:
        hidden |= column > row
    if window is not None:
        hidden |= (column < row - window[0]) | (column > row + window[1])
    return hidden


def softmax(scores: Array, hidden: npt.NDArray[np.bool_]) -> Array:
    """Softmax over what is visible; rows that see nothing are 0."""
    masked = np.where(hidden, -np.inf, scores)
    top = masked.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(masked - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1.0, total)


def attention(
    tensors: dict[str, Array],
    scale: float,
    hidden: npt.NDArray[np.bool_],
    weigh: Callable[[Array], Array] | None = None,
    cap: float | None = None,
) -> Array:
    """Attention with a softmax, or with an elementwise `weigh` of the scores, [b, m, h, dv]."""
    q, k, v = tensors["Q"], tensors["K"], tensors["V"]
    scores = scores_of(q, k, scale)
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    weights = softmax(scores, hidden) if weigh is None else np.where(hidden, 0, weigh(scores))
    shared = np.repeat(v, q.shape[2] // v.shape[2], axis=2)
    return np.einsum("bhmn,bnhd->bmhd", weights, shared)
