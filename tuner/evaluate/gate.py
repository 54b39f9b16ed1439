"""The first gate: a bound program is run in the TL interpreter before anything is compiled.

NumPy only, so that a compile process need not import torch.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from codegen.tl.ast import Program
from codegen.tl.interpreter import run as interpret
from space.variant import DType, Problem

Array = npt.NDArray[np.float64]

ERROR_FACTOR = 2.0
ERROR_FLOOR = 1e-5
HEADS = {"mha": (2, 2), "gqa": (3, 1), "mqa": (2, 1), "mla": (2, 2)}


def fault(program: Program, problem: Problem) -> str | None:
    """Return what is wrong with the program's output on small lengths, or None when it is right.

    Lengths are off the tile and cover more than one; the second problem has very negative logits.
    """
    rows, keys = program.param("BM", 64) + 5, 2 * program.param("BN", 64) + 7
    rng = np.random.default_rng(7)
    for name, negative in (("N(0,1)", False), ("very negative logits", True)):
        q, k, v = _inputs(problem, rows, keys, rng, negative)
        scale = 1.0 / math.sqrt(problem.head_dim)
        given = {"Q": q.astype(np.float32), "K": k.astype(np.float32), "V": v.astype(np.float32)}
        try:
            found = interpret(program, given, {"scale": scale}, problem.dtype)["O"]
        except (KeyError, ValueError) as error:
            return f"interpreter: not attention of Q, K and V into O: {error}"
        got = np.asarray(found, dtype=np.float64)
        said = _compare(got, problem, q, k, v, scale)
        if said is not None:
            return f"interpreter, {name}, Sq={rows} Sk={keys}: {said}"
    return None


def _compare(
    got: Array, problem: Problem, q: Array, k: Array, v: Array, scale: float
) -> str | None:
    exact = attention(q, k, v, scale, problem.causal, None)
    own = np.abs(attention(q, k, v, scale, problem.causal, problem.dtype) - exact).max()
    if got.shape != exact.shape:
        return f"O has shape {got.shape}, {exact.shape} is right"
    error = np.abs(got - exact)
    limit = ERROR_FACTOR * own + ERROR_FLOOR
    if np.isfinite(got).all() and error.max() <= limit:
        return None
    at = np.unravel_index(np.argmax(np.where(np.isfinite(got), error, np.inf)), got.shape)
    place = tuple(int(i) for i in at)
    return (
        f"{got[at]:.6g} at [b, s, h, d] {place} where {exact[at]:.6g} is right, limit {limit:.3g}"
    )


def _inputs(
    problem: Problem, rows: int, keys: int, rng: np.random.Generator, negative: bool
) -> tuple[Array, Array, Array]:
    heads, kv_heads = HEADS[problem.variant]
    q = rng.standard_normal((1, rows, heads, problem.head_dim))
    k = rng.standard_normal((1, keys, kv_heads, problem.head_dim))
    v = 1 + 0.5 * rng.standard_normal((1, keys, kv_heads, problem.head_dim_v))
    if negative:
        q, k = 0.1 * q, 0.1 * k
        q[..., 0], k[..., 0] = 1.0, -120.0 * math.sqrt(problem.head_dim)
    q, k, v = (rounded(t, problem.dtype) for t in (q, k, v))
    return q, k, v


def rounded(x: Array, dtype: DType) -> Array:
    """Round to the nearest value of a 16-bit type, ties to even."""
    if dtype is DType.FP16:
        return x.astype(np.float16).astype(np.float64)
    bits = x.astype(np.float32).view(np.uint32)
    even = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    kept = (bits + even) & np.uint32(0xFFFF0000)
    return kept.view(np.float32).astype(np.float64)


def attention(
    q: Array, k: Array, v: Array, scale: float, causal: bool, dtype: DType | None
) -> Array:
    """Plain attention on [B, S, H, D] in float64; with `dtype`, rounded where a kernel rounds."""
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k, optimize=True) * scale
    if causal:
        shift = k.shape[1] - q.shape[1]
        hidden = np.triu(np.ones(scores.shape[-2:], dtype=bool), shift + 1)
        scores = np.where(hidden, -np.inf, scores)
    if dtype is not None:
        scores = rounded(scores, dtype)
    highest = np.maximum(scores.max(axis=-1, keepdims=True), -1e300)  # rows that see nothing
    p = np.exp(scores - highest)
    p /= np.maximum(p.sum(axis=-1, keepdims=True), 1e-300)
    if dtype is not None:
        p = rounded(p, dtype)
    out: Array = np.einsum("bhqk,bkhd->bqhd", p, v, optimize=True)
    return out if dtype is None else rounded(out, dtype)
