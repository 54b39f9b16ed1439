"""The first gate: a bound program is run in the TL interpreter before anything is compiled.

NumPy only, so that a compile process need not import torch.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from codegen.tl.ast import Program
from codegen.tl.interpreter import run as interpret
from space.variant import DType, Phase, Problem

Array = npt.NDArray[np.float64]

ERROR_FACTOR = 2.0
ERROR_FLOOR = 1e-5
NEGATIVE = "very negative logits"
HEADS = {"mha": (2, 2), "gqa": (3, 1), "mqa": (2, 1), "mla": (2, 2)}


@dataclass(frozen=True, slots=True)
class Case:
    """One small problem: Q, K and V [B, S, H, D] of 16-bit values, and the answer."""

    name: str
    q: Array
    k: Array
    v: Array
    scale: float
    exact: Array
    own_error: float  #: the most that the function that gave the answer errs at 16 bits
    splits: int = 1  #: of the keys

    def __str__(self) -> str:
        split = f" splits={self.splits}" if self.splits > 1 else ""
        return f"{self.name}, Sq={self.q.shape[1]} Sk={self.k.shape[1]}{split}"

    @property
    def tensors(self) -> tuple[Array, Array, Array]:
        """Q, K and V."""
        return self.q, self.k, self.v


@dataclass(frozen=True, slots=True)
class Trial:
    """One small problem: its lengths, whether logits are very negative, the splits of its keys."""

    rows: int
    keys: int
    negative: bool
    splits: int = 1
    rising: bool = False  #: later keys have the larger logits, so that maxima move


def _trials(program: Program, problem: Problem) -> tuple[Trial, ...]:
    """Lengths off the tile that cover more than one; in decode, a split without keys too."""
    keys = program.param("BN", 64)
    if problem.phase is Phase.DECODE:
        return (
            Trial(1 if not problem.causal else 2, 2 * keys + 7, False),
            Trial(5, keys + keys // 2 + 3, False, splits=3, rising=True),
            Trial(8, 2 * keys + 7, True, splits=2),
        )
    rows = program.param("BM", 64) + 5
    return Trial(rows, 2 * keys + 7, False), Trial(rows, 2 * keys + 7, True)


def fault(program: Program, problem: Problem, answers: Path | None = None) -> str | None:
    """Return what is wrong with the program's output on small lengths, or None when it is right.

    Lengths are off the tile and cover more than one; one problem has very negative logits. Keys
    are split in decode. `answers` are those of a user's function, as `save` wrote them; plain
    attention for None.
    Raises OSError or ValueError when they cannot be read.
    """
    cases = _plain_cases(program, problem) if answers is None else load(answers)
    for case in cases:
        given = {n: x.astype(np.float32) for n, x in zip("QKV", case.tensors, strict=True)}
        try:
            outputs = interpret(
                program, given, {"scale": case.scale}, problem.dtype, splits=case.splits
            )
            found = outputs["O"]
        except (KeyError, ValueError) as error:
            return f"interpreter: not attention of Q, K and V into O: {error}"
        said = _compare(np.asarray(found, dtype=np.float64), case)
        if said is not None:
            return f"interpreter, {case}: {said}"
    return None


def _plain_cases(program: Program, problem: Problem) -> Iterator[Case]:
    """Plain attention on problems of a size that goes with the program's tiles."""
    rng = np.random.default_rng(7)
    scale = problem.default_scale
    for trial in _trials(program, problem):
        q, k, v = draw(problem, trial, rng)
        exact = attention(q, k, v, scale, problem.causal, None)
        own = np.abs(attention(q, k, v, scale, problem.causal, problem.dtype) - exact).max()
        name = NEGATIVE if trial.negative else "N(0,1)"
        yield Case(name, q, k, v, scale, exact, float(own), trial.splits)


def save(path: Path, cases: Sequence[Case]) -> None:
    """Write the answers of a user's function, for compile processes to read. Raises OSError."""
    arrays: dict[str, npt.ArrayLike] = {"count": len(cases)}
    for n, case in enumerate(cases):
        arrays |= {f"{n}.{f.name}": getattr(case, f.name) for f in fields(case)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    os.replace(file.name, path)


@functools.lru_cache(maxsize=8)
def load(path: Path) -> tuple[Case, ...]:
    """Read what `save` wrote. Raises OSError or ValueError."""
    with np.load(path, allow_pickle=False) as data:
        return tuple(
            Case(
                str(data[f"{n}.name"]),
                data[f"{n}.q"],
                data[f"{n}.k"],
                data[f"{n}.v"],
                float(data[f"{n}.scale"]),
                data[f"{n}.exact"],
                float(data[f"{n}.own_error"]),
                int(data[f"{n}.splits"]),
            )
            for n in range(int(data["count"]))
        )  # fmt: skip


def _compare(got: Array, case: Case) -> str | None:
    exact = case.exact
    if got.shape != exact.shape:
        return f"O has shape {got.shape}, {exact.shape} is right"
    error = np.abs(got - exact)
    limit = ERROR_FACTOR * case.own_error + ERROR_FLOOR
    if np.isfinite(got).all() and error.max() <= limit:
        return None
    at = np.unravel_index(np.argmax(np.where(np.isfinite(got), error, np.inf)), got.shape)
    place = tuple(int(i) for i in at)
    return (
        f"{got[at]:.6g} at [b, s, h, d] {place} where {exact[at]:.6g} is right, limit {limit:.3g}"
    )


def heads_of(problem: Problem) -> tuple[int, int]:
    """Return query heads and KV heads of the small problems: few, shared as the variant shares."""
    return (2, 1) if problem.latent else HEADS[problem.variant]


def draw(problem: Problem, trial: Trial, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Return Q, K and V with few heads, rounded to the problem's type; absorbed MLA's V is K's."""
    rows, keys = trial.rows, trial.keys
    heads, kv_heads = heads_of(problem)
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
