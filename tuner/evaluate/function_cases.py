"""What a user's function gives on the gate's small problems."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from space.variant import Phase, Problem
from tuner.evaluate.function import NO_KERNEL, Function, FunctionRefused
from tuner.evaluate.gate import NEGATIVE, Case, Trial, draw, rounded
from tuner.evaluate.inputs import TORCH_DTYPE

#: (name, problem, factor of Q and K): off every tile, past usual windows, and with logits that a
#: cap or another bend of the scores changes
PROBLEMS = (
    ("N(0,1)", Trial(293, 555, negative=False), 1.0),
    ("large logits", Trial(293, 555, negative=False), 3.0),
    (NEGATIVE, Trial(293, 555, negative=True), 1.0),
    ("long keys", Trial(70, 2311, negative=False), 1.0),
)
#: the same of decode: few rows, keys in splits, of which one may have none
DECODE_PROBLEMS = (
    ("N(0,1)", Trial(2, 555, negative=False), 1.0),
    ("large logits", Trial(5, 555, negative=False, splits=3, rising=True), 3.0),
    (NEGATIVE, Trial(8, 555, negative=True, splits=2), 1.0),
    ("long keys", Trial(3, 2311, negative=False, splits=5), 1.0),
)
EQUAL = 1301  #: both lengths of the long problem of a function that takes equal ones only
LONGEST = 1 << 17  #: keys of a problem at most
PAST = 131  #: keys past a number of the function's that may be a length, such as a window


def cases_of(function: Function, problem: Problem, keys: int = 0) -> tuple[Case, ...]:
    """Return the gate's problems with the function's answers.

    `keys` is how many the shapes that are searched have at most; one problem has as many.
    Raises FunctionRefused.
    """
    rng = np.random.default_rng(7)
    found = []
    usual = DECODE_PROBLEMS if problem.phase is Phase.DECODE else PROBLEMS
    for name, trial, factor in (*usual, *_longer(function, problem, keys)):
        if not function.unequal:
            length = min(trial.keys, EQUAL)
            trial = replace(trial, rows=length, keys=length)
        scale = problem.default_scale
        if trial.negative and "scale" in function.accepts:
            scale *= 0.7  # no program may know it
        q0, k0, v0 = draw(problem, trial, rng)
        q1, k1 = (rounded(factor * x, problem.dtype) for x in (q0, k0))
        arrays = q1, k1, k1[..., : problem.head_dim_v] if problem.latent else v0
        q, k, v = (torch.from_numpy(x) for x in arrays)
        try:
            exact = _given(function, (q, k, v), function.exact_dtype, scale, problem)
            own = _given(function, (q, k, v), TORCH_DTYPE[problem.dtype], scale, problem)
        except FunctionRefused:
            raise
        except Exception as error:  # the user's code raises what it likes
            raise FunctionRefused(
                f"{function.name} failed on lengths {trial.rows} and {trial.keys}: "
                f"{type(error).__name__}: {error}"
            ) from error
        most = _most(own, exact)
        if not math.isfinite(most):  # an overflow on the way: see the judge's own yardstick
            wide = _given(function, (q, k, v), torch.float32, scale, problem)
            most = _most(wide.to(TORCH_DTYPE[problem.dtype]).double(), exact)
        found.append(
            Case(
                name, *arrays, scale, exact.nan_to_num(nan=0.0).numpy(),
                most if math.isfinite(most) else 0.0, trial.splits,
            )
        )  # fmt: skip
    return tuple(found)


def _longer(
    function: Function, problem: Problem, keys: int
) -> tuple[tuple[str, Trial, float], ...]:
    """A problem with more keys than the usual ones, where shapes or the function's numbers do.

    A window of 4096 keys hides nothing of fewer. Lengths past a number are asked for where the
    function takes them.
    """
    if not function.unequal:
        return ()
    *_, (name, trial, factor) = DECODE_PROBLEMS if problem.phase is Phase.DECODE else PROBLEMS
    past = [int(x) + PAST for _, x in function.scalars if x.is_integer() and x < LONGEST]
    lengths = [min(keys, LONGEST), *(n for n in past if _takes(function, problem, trial.rows, n))]
    longest = max(lengths)
    longer = replace(trial, keys=longest)
    return ((f"{name}: {longest}", longer, factor),) if longest > trial.keys else ()


def _takes(function: Function, problem: Problem, rows: int, keys: int) -> bool:
    """Whether the function gives a result on these lengths."""
    if keys < rows:
        return False
    q, k, v = draw(problem, Trial(rows, keys, negative=False), np.random.default_rng(7))
    try:
        tensors = tuple(torch.from_numpy(x) for x in (q, k, v))
        _given(function, tensors, function.exact_dtype, problem.default_scale, problem)
    except Exception:  # the user's code raises what it likes
        return False
    return True


def _most(own: torch.Tensor, exact: torch.Tensor) -> float:
    error = (own - exact).abs()[exact.isfinite()]
    return float(error.max()) if error.numel() else 0.0


def _given(
    function: Function, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype, scale: float,
    problem: Problem,
) -> torch.Tensor:  # fmt: skip
    """What the function gives computed in `dtype`, as float64."""
    q, k, v = (t.to(dtype, copy=True) for t in tensors)
    try:
        return function(q, k, v, scale, problem.causal).double()
    except RuntimeError as error:
        if NO_KERNEL not in str(error):
            raise
    q, k, v = (t.float() for t in (q, k, v))  # this CPU lacks a 16-bit operator
    return function(q, k, v, scale, problem.causal).to(dtype).double()
