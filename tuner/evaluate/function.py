"""The user's PyTorch function as the judge calls it: loaded, examined, asked for some rows.

It is the only code that is executed and not this project's own; it runs in a worker process that
can be killed. `Function.load` examines it on a CPU and says in one line what is wrong with it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType

import torch

from runs.files import read_regular
from runs.record import Reference
from space.variant import Phase, Problem
from tuner.evaluate.gate import heads_of
from tuner.evaluate.inputs import TORCH_DTYPE, Check, Inputs, Triple
from tuner.evaluate.reference import Index

Call = Callable[..., object]

TENSORS = ("q", "k", "v")
KEYWORDS = ("scale", "causal")
SMALL, LONG = 64, 2400  #: lengths of what the function is examined on
CHUNK_SCORES = 1 << 26  #: most scores of one chunk when every row is looked at
MOST_SCORES = 1 << 31  #: of one batch element, where a function gives no row alone
NO_KERNEL = "not implemented for"  #: what torch says where a CPU has no 16-bit form of an operator


class FunctionRefused(Exception):
    """The user's function cannot be what kernels are checked against; says what and why."""


class Rows(StrEnum):
    """Which rows of the output can be had without all the others."""

    ANY = "any"  # a slice of queries with all keys
    PREFIX = "prefix"  # a slice of queries with the keys up to its last one's own
    LAST = "last"  # the last queries with all keys
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Function:
    """A function of q, k, v, each [B, S, H, D], that kernels must agree with."""

    name: str
    call: Call
    accepts: frozenset[str]  #: which of `scale` and `causal` it takes by keyword
    scalars: tuple[tuple[str, float], ...]
    exact_dtype: torch.dtype = torch.float64  #: the widest it computes in
    rows: Rows = Rows.NONE
    unequal: bool = True  #: takes fewer queries than keys
    more_queries: bool = True  #: takes more queries than keys

    @staticmethod
    def load(reference: Reference, problem: Problem) -> Function:
        """Load and examine the function. Raises FunctionRefused."""
        call = _named(_module(reference), reference)
        accepts = _accepts(call, reference)
        return _Examiner(Function(reference.name, call, accepts, reference.scalars), problem).run()

    @property
    def has_rows(self) -> bool:
        """Whether some rows can be had alone."""
        return self.rows is not Rows.NONE

    @property
    def rows_alone(self) -> bool:
        """Whether any rows can be had alone."""
        return self.rows in (Rows.ANY, Rows.PREFIX)

    def takes(self, check: Check) -> bool:
        """Whether a small problem of the judge has an answer by this function.

        Scales of their own need the keyword; NaN queries are out, since an operator may drop them.
        """
        s = check.shape
        fits = all(
            (s.seqlen_q <= keys or self.more_queries) and (s.seqlen_q == keys or self.unequal)
            for keys in check.counts or (s.seqlen_k,)
            if keys or not check.counts  # a sequence without keys is not asked for
        )
        return fits and (check.scale is None or "scale" in self.accepts) and "NaN" not in check.data

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
    ) -> torch.Tensor:
        """Return [B, Sq, Hq, Dv] on the tensors' device; whole numbers go in as int."""
        named = {"scale": scale, "causal": causal}
        keywords = {n: named[n] for n in self.accepts}
        keywords |= {n: int(x) if float(x).is_integer() else x for n, x in self.scalars}
        with torch.no_grad(), torch.device(q.device):
            out = self.call(q, k, v, **keywords)
        if not isinstance(out, torch.Tensor):
            raise FunctionRefused(f"{self.name} returned {type(out).__name__}; a tensor is wanted")
        return out

    def at(self, inputs: Inputs, dtype: torch.dtype, index: Index) -> torch.Tensor:
        """Return the part of the output at `index`, computed in `dtype`."""
        batches, rows, heads = index
        if inputs.cache is not None:
            alone = (slice(None), rows, heads)
            return torch.cat([self.at(one, dtype, alone) for one in inputs.sequences(batches)])
        lo, hi, _ = rows.indices(inputs.q.shape[1])
        k, v = inputs.k[batches], inputs.v[batches]
        if (lo, hi) != (0, inputs.q.shape[1]) and self.rows is Rows.PREFIX:
            end = max(hi + k.shape[1] - inputs.q.shape[1], 0)
            k, v = k[:, :end], v[:, :end]
        q = inputs.q[batches, lo:hi]
        if not k.shape[1] or not q.numel():
            return q.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
        copies = (t.to(dtype, copy=True) for t in (q, k, v))
        return self(*copies, inputs.scale, inputs.causal)  # type: ignore[call-arg]

    def chunks(self, inputs: Inputs) -> Iterator[Index]:
        """Yield parts that make up the whole output; nothing where one would be too large.

        Where rows cannot be had alone a part is all of a batch element.
        """
        batch, rows, heads, _ = inputs.q.shape
        step = max(1, CHUNK_SCORES // (heads * max(inputs.keys, 1)))
        if not self.rows_alone:
            if heads * rows * inputs.keys > MOST_SCORES:
                return
            step = max(rows, 1)
        for b in range(batch):
            for lo in range(0, rows, step):
                yield slice(b, b + 1), slice(lo, min(lo + step, rows)), slice(None)


# ---- loading -----------------------------------------------------------------------------------


def _module(reference: Reference) -> ModuleType:
    path = Path(reference.path)
    try:
        digest = hashlib.sha256(read_regular(path)).hexdigest()
    except OSError as error:
        raise FunctionRefused(f"cannot read {path}: {error.strerror}") from None
    if digest != reference.digest:
        raise FunctionRefused(f"{path} was changed since the run began")
    spec = importlib.util.spec_from_file_location(f"reference_{digest[:12]}", path)
    if spec is None or spec.loader is None:
        raise FunctionRefused(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # it may import what lies beside it
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code raises what it likes
        raise FunctionRefused(f"{path} cannot be imported: {_said(error)}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _named(module: ModuleType, reference: Reference) -> Call:
    call = getattr(module, reference.function, None)
    if not callable(call):
        raise FunctionRefused(f"{reference.name}: no such function in {reference.path}")
    found: Call = call
    return found


def _accepts(call: Call, reference: Reference) -> frozenset[str]:
    """Which keywords of ours it takes. Raises FunctionRefused when it wants what nobody gives."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError) as error:
        raise FunctionRefused(f"{reference.name} has no signature: {error}") from None
    given = dict.fromkeys((*KEYWORDS, *(n for n, _ in reference.scalars)))
    accepted = frozenset(n for n in KEYWORDS if n in signature.parameters)
    try:
        signature.bind(*TENSORS, **{n: 0 for n in given if n not in KEYWORDS or n in accepted})
    except TypeError as error:
        raise FunctionRefused(
            f"{reference.name}{signature} cannot be called with q, k, v: {error}; it gets three "
            f"tensors, scale and causal where it takes them, and each --scalar NAME=NUMBER"
        ) from None
    return accepted


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


# ---- examining ---------------------------------------------------------------------------------


class _Examiner:
    """Calls a function on small random tensors on the CPU."""

    def __init__(self, function: Function, problem: Problem) -> None:
        self.function, self.problem = function, problem
        self.heads, self.kv_heads = heads_of(problem)
        self.scale = problem.default_scale

    def run(self) -> Function:
        """Return the function with what was found out. Raises FunctionRefused."""
        wide = self._widest()
        self._at_operand_type()
        self._check_behaviour(wide)
        lengths = {"unequal": (SMALL, 150), "more_queries": (150, SMALL)}
        taken = {name: self._takes_lengths(wide, *sizes) for name, sizes in lengths.items()}
        if self.problem.phase is Phase.DECODE and not taken["unequal"]:
            raise FunctionRefused(
                f"{self.function.name} takes no fewer queries than keys, which decode has; let row "
                f"i stand at key i + k.shape[1] - q.shape[1], or use --phase prefill"
            )
        f = self.function
        return Function(
            f.name, f.call, f.accepts, f.scalars, wide, self._rows(wide),
            taken["unequal"], taken["unequal"] and taken["more_queries"],
        )  # fmt: skip

    def _widest(self) -> torch.dtype:
        """Float64 where the function allows it, else float32."""
        try:
            self._checked(self._draw(2, SMALL, SMALL, torch.float64))
            return torch.float64
        except FunctionRefused as refused:
            try:
                self._checked(self._draw(2, SMALL, SMALL, torch.float32))
            except FunctionRefused:
                raise refused from None
            return torch.float32

    def _at_operand_type(self) -> None:
        try:
            self._checked(self._draw(2, SMALL, SMALL, TORCH_DTYPE[self.problem.dtype]))
        except FunctionRefused as refused:
            if NO_KERNEL not in str(refused):  # the device has what this CPU lacks
                raise

    def _check_behaviour(self, dtype: torch.dtype) -> None:
        """Same inputs give the same, inputs stay, batches are apart, -v gives the negative."""
        name = self.function.name
        q, k, v = self._draw(2, SMALL, SMALL, dtype)
        before = tuple(t.clone() for t in (q, k, v))
        out = self._call((q, k, v))
        for word, now, was in zip(TENSORS, (q, k, v), before, strict=True):
            if not torch.equal(now, was):
                raise FunctionRefused(f"{name} changes {word} in place; it must not")
        if not torch.equal(self._call((q, k, v)), out):
            raise FunctionRefused(f"{name} gives something else on the same tensors; it must not")
        if not self._near(self._call((q[1:], k[1:], v[1:])), out[1:]):
            raise FunctionRefused(f"{name} mixes the elements of a batch; kernels never do")
        turned, said = ((q, k, -v), "q, k, -v")
        if self.problem.latent:  # V is part of K: both turn, and Q, so that scores stay
            turned, said = ((-q, -k, -v), "-q, -k, -v")
        if not self._near(self._call(turned), -out):
            raise FunctionRefused(f"{name}({said}) is not -{name}(q, k, v); the judge relies on it")

    def _takes_lengths(self, dtype: torch.dtype, rows: int, keys: int) -> bool:
        try:
            out = self._call(self._draw(1, rows, keys, dtype))
        except FunctionRefused:
            return False
        return tuple(out.shape) == (1, rows, self.heads, self.problem.head_dim_v)

    def _rows(self, dtype: torch.dtype) -> Rows:
        """How rows can be had alone, tried at a length past usual windows."""
        q, k, v = self._draw(1, LONG, LONG, dtype)
        out = self._call((q, k, v))
        lo, hi = LONG // 2, LONG // 2 + 50
        tries = {
            Rows.ANY: ((q[:, lo:hi], k, v), slice(lo, hi)),
            Rows.PREFIX: ((q[:, lo:hi], k[:, :hi], v[:, :hi]), slice(lo, hi)),
            Rows.LAST: ((q[:, -50:], k, v), slice(LONG - 50, LONG)),
        }
        for kind, (tensors, where) in tries.items():
            try:
                if self._near(self._call(tensors), out[:, where]):
                    return kind
            except FunctionRefused:
                continue
        return Rows.NONE

    def _draw(self, batch: int, rows: int, keys: int, dtype: torch.dtype) -> Triple:
        generator = torch.Generator().manual_seed(11)
        p = self.problem
        sizes = (
            (batch, rows, self.heads, p.head_dim),
            (batch, keys, self.kv_heads, p.head_dim),
            (batch, keys, self.kv_heads, p.head_dim_v),
        )
        q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        return q, k, k[..., : p.head_dim_v] if p.latent else v

    def _call(self, tensors: Triple) -> torch.Tensor:
        try:
            return self.function(*tensors, self.scale, self.problem.causal)
        except FunctionRefused:
            raise
        except Exception as error:  # the user's code raises what it likes
            raise FunctionRefused(
                f"{self.function.name} failed on {_shown(tensors)}: {_said(error)}"
            ) from error

    def _checked(self, tensors: Triple) -> torch.Tensor:
        """Call and look at shape, type and values. Raises FunctionRefused."""
        out, given = self._call(tensors), _shown(tensors)
        name, q = self.function.name, tensors[0]
        wanted = (*q.shape[:3], self.problem.head_dim_v)
        if tuple(out.shape) != wanted:
            raise FunctionRefused(
                f"{name} returned shape {list(out.shape)} for {given}; {list(wanted)} is wanted"
            )
        if out.dtype != q.dtype:
            raise FunctionRefused(
                f"{name} returned {_dtype(out)} for {given}; {_dtype(q)} is wanted: end it with "
                f".to(q.dtype)"
            )
        if not out.isfinite().all():
            count = int((~out.isfinite()).sum())
            raise FunctionRefused(
                f"{name} returned {count} NaN or Inf of {out.numel()} numbers for {given}; finite "
                f"ones are wanted"
            )
        return out

    @staticmethod
    def _near(a: torch.Tensor, b: torch.Tensor) -> bool:
        if a.shape != b.shape:
            return False
        tolerance = 1e-9 if a.dtype is torch.float64 else 1e-4
        return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True))


def _shown(tensors: Triple) -> str:
    sizes = ", ".join(f"{n} {list(t.shape)}" for n, t in zip(TENSORS, tensors, strict=True))
    return f"{sizes} {_dtype(tensors[0])}"


def _dtype(t: torch.Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")
