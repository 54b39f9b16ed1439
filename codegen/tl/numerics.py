"""Rounding to 16-bit types and the elementwise operators, on NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from space.variant import DType

Array = npt.NDArray[np.floating[Any]]


def round_to(values: Array, dtype: DType) -> Array:
    """Round to the nearest number of a 16-bit type, ties to even, keeping the array's own type."""
    if dtype is DType.FP16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(values.dtype)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # half of the last kept place, and one less where that place is even
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    kept = np.where(np.isnan(values), bits, rounded) & np.uint32(0xFFFF0000)
    return kept.astype(np.uint32).view(np.float32).astype(values.dtype)


def subtract(a: Array, b: Array | float) -> Array:
    """a - b, where -inf less -inf is -inf: a row that has seen nothing stays so."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isneginf(a) & np.isneginf(b), -np.inf, a - b).astype(a.dtype)


def divide(a: Array, b: Array | float) -> Array:
    """a / b, where anything over 0 is 0: a row that has seen nothing gives 0."""
    divisor = np.asarray(b)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(divisor == 0, 0.0, a / np.where(divisor == 0, 1.0, divisor)).astype(a.dtype)


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x))


def _gelu(x: Array) -> Array:
    erf: Array = _erf(x / math.sqrt(2.0))
    return 0.5 * x * (1.0 + erf)


def _log(x: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.log(x)


UNARY: dict[str, Callable[[Array], Array]] = {
    "Relu": lambda x: np.maximum(x, 0.0),
    "Sigmoid": _sigmoid,
    "Tanh": np.tanh,
    "Gelu": _gelu,
    "Exp": np.exp,
    "Exp2": np.exp2,
    "Log": _log,
    "Neg": np.negative,
}


def alibi_slopes(heads: int, exponent: float) -> Array:
    """Return each head's slope of the penalty for distance, [1, heads, 1, 1]."""
    slopes = 2.0 ** (-exponent * (np.arange(heads) + 1) / heads)
    return slopes.reshape(1, -1, 1, 1)
