"""The first gate: a bound program is run in the TL interpreter before anything is compiled.

NumPy only, so that a compile process need not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from codegen.tl.ast import Program
from codegen.tl.interpreter import run as interpret
from space.variant import DType, Phase, Problem

Array = npt.NDArray[np.float64]

ERROR_FACTOR = 2.0
ERROR_FLOOR = 1e-5
HEADS = {"mha": (2, 2), "gqa": (3, 1), "mqa": (2, 1), "mla": (2, 2)}


@dataclass(frozen=True, slots=True)
class _Trial:
    """One small problem: its lengths, whether logits are very negative, the splits of its keys."""

    rows: int
    keys: int
    negative: bool
    splits: int = 1
    rising: bool = False  #: later keys have the larger logits, so that maxima move

    def __str__(self) -> str:
        data = "very negative logits" if self.negative else "N(0,1)"
        split = f" splits={self.splits}" if self.splits > 1 else ""
        return f"{data}, Sq={self.rows} Sk={self.keys}{split}"


def _trials(program: Program, problem: Problem) -> tuple[_Trial, ...]:
    """Lengths off the tile that cover more than one; in decode, a split without keys too."""
    keys = program.param("BN", 64)
    if problem.phase is Phase.DECODE:
        return (
            _Trial(1 if not problem.causal else 2, 2 * keys + 7, False),
            _Trial(5, keys + keys // 2 + 3, False, splits=3, rising=True),
            _Trial(8, 2 * keys + 7, True, splits=2),
        )
    rows = program.param("BM", 64) + 5
    return _Trial(rows, 2 * keys + 7, False), _Trial(rows, 2 * keys + 7, True)


def fault(program: Program, problem: Problem) -> str | None:
    """Return what is wrong with the program's output on small lengths, or None when it is right."""
    rng = np.random.default_rng(7)
    for trial in _trials(program, problem):
        q, k, v = _inputs(problem, trial, rng)
        scale = problem.default_scale
        given = {"Q": q.astype(np.float32), "K": k.astype(np.float32), "V": v.astype(np.float32)}
        try:
            outputs = interpret(
                program, given, {"scale": scale}, problem.dtype, splits=trial.splits
            )
            found = outputs["O"]
        except (KeyError, ValueError) as error:
            return f"interpreter: not attention of Q, K and V into O: {error}"
        got = np.asarray(found, dtype=np.float64)
        said = _compare(got, problem, q, k, v, scale)
        if said is not None:
            return f"interpreter, {trial}: {said}"
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
    problem: Problem, trial: _Trial, rng: np.random.Generator
) -> tuple[Array, Array, Array]:
    rows, keys = trial.rows, trial.keys
    heads, kv_heads = (2, 1) if problem.latent else HEADS[problem.variant]
    q = rng.standard_normal((1, rows, heads, problem.head_dim))
    k = rng.standard_normal((1, keys, kv_heads, problem.head_dim))
    v = 1 + 0.5 * rng.standard_normal((1, keys, kv_heads, problem.head_dim_v))
    if trial.rising:
        k *= np.linspace(0.2, 2.0, keys)[None, :, None, None]
    if trial.negative:
        q, k = 0.1 * q, 0.1 * k
    if problem.latent:
        k[..., : problem.head_dim_v] = v
    if trial.negative:
        column = -1 if problem.latent else 0  # one that is not V's
        q[..., column], k[..., column] = 1.0, -120.0 / problem.default_scale
    q, k = rounded(q, problem.dtype), rounded(k, problem.dtype)
    v = k[..., : problem.head_dim_v] if problem.latent else rounded(v, problem.dtype)
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
