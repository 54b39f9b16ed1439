"""The tensors that timed shapes share: two data sets, and the place the kernel reads.

Every shape of a run is a view of the same flat tensors, so a dozen shapes of 16k tokens cost the
memory of one. The kernel only ever sees the working copy; the judge refills it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from space.variant import DType, Shape, io_bytes
from tuner.evaluate.function import Function
from tuner.evaluate.inputs import TORCH_DTYPE, Inputs, Triple
from tuner.evaluate.output import Output, allocate
from tuner.evaluate.reference import Expected, expect
from tuner.evaluate.verify import Exam

DATA_SETS = 2
V_MEAN = 0.5  #: as the referee draws it: a kernel of zeros is then far off
ROTATE_BYTES = 128 << 20  #: inputs smaller than this rotate over several slots
SLOTS_MAX = 8
#: First elements that all data sets share: who keeps results by a hash of them is found out.
COMMON_HEAD = 64


@dataclass(frozen=True, slots=True)
class Bay:
    """One timed shape: where its inputs lie, where the output goes, and two data sets.

    `exams[n]` is the problem on slot 0 while it holds data set n; `slots` are the inputs to time.
    """

    shape: Shape
    slots: tuple[Inputs, ...]
    output: Output
    exams: tuple[Exam, ...]

    def fill(self, data_set: int) -> None:
        """Put data set n on slot 0."""
        exam = self.exams[data_set]
        for tensor, fresh in zip(exam.inputs.tensors, exam.pristine, strict=True):
            tensor.copy_(fresh)


def numels(shape: Shape) -> tuple[int, int, int]:
    """Return the elements of Q, K and V."""
    keys = shape.batch * shape.seqlen_k * shape.kv_heads
    queries = shape.batch * shape.seqlen_q * shape.heads
    return queries * shape.head_dim, keys * shape.head_dim, keys * shape.head_dim_v


def slot_count(shape: Shape, dtype: DType) -> int:
    """Return over how many slots the inputs of `shape` rotate, so that L2 cannot hold them."""
    wanted = math.ceil(ROTATE_BYTES / max(io_bytes(shape, dtype), 1))
    return min(max(wanted, 1), SLOTS_MAX)


class Arena:
    """The shared tensors of one dtype and seed on one device."""

    def __init__(
        self, shapes: Sequence[Shape], dtype: DType, seed: int, device: torch.device,
        function: Function | None = None,
    ) -> None:  # fmt: skip
        self._function = function
        self.dtype = dtype
        self.seed = seed
        self._sizes = _needed(shapes, dtype)
        self._expected: dict[tuple[Shape, int], Expected] = {}
        generator = torch.Generator(device).manual_seed(seed)
        kind = TORCH_DTYPE[dtype]

        def draw(numel: int, mean: float) -> torch.Tensor:
            t = torch.empty(numel, dtype=kind, device=device)
            return t.normal_(mean, 1.0, generator=generator)

        self._fresh = [
            tuple(draw(n, m) for n, m in zip(self._sizes, (0.0, 0.0, V_MEAN), strict=True))
            for _ in range(DATA_SETS)
        ]
        for others in self._fresh[1:]:
            for first, other in zip(self._fresh[0], others, strict=True):
                other[:COMMON_HEAD] = first[:COMMON_HEAD]
        self._work = tuple(t.clone() for t in self._fresh[0])
        outputs = max((s.batch * s.seqlen_q * s.heads * s.head_dim_v for s in shapes), default=0)
        self._output = allocate((1, 1, 1, outputs), kind, device)

    def holds(self, shapes: Sequence[Shape], dtype: DType, seed: int) -> bool:
        """Whether all of `shapes` fit here."""
        if (dtype, seed) != (self.dtype, self.seed):
            return False
        fits = all(a <= b for a, b in zip(_needed(shapes, dtype), self._sizes, strict=True))
        room = self._output.tensor.numel()
        return fits and all(s.batch * s.seqlen_q * s.heads * s.head_dim_v <= room for s in shapes)

    def bay(self, shape: Shape) -> Bay:
        """Lay the shape out and fill every slot; its answers are worked out once."""
        count = slot_count(shape, self.dtype)
        for work, fresh, numel in zip(self._work, self._fresh[0], numels(shape), strict=True):
            work[: numel * count].copy_(fresh[: numel * count])
        slots = tuple(
            _inputs(shape, _views(self._work, shape, i), self._function) for i in range(count)
        )
        output = self._output.part((shape.batch, shape.seqlen_q, shape.heads, shape.head_dim_v))
        exams = tuple(
            Exam(f"timed shape {shape.key}", slots[0], _views(fresh, shape, 0),
                 self._answer(shape, n), output)
            for n, fresh in enumerate(self._fresh)
        )  # fmt: skip
        return Bay(shape, slots, output, exams)

    def _answer(self, shape: Shape, data_set: int) -> Expected:
        key = shape, data_set
        if key not in self._expected:
            fresh = _inputs(shape, _views(self._fresh[data_set], shape, 0), self._function)
            self._expected[key] = expect(fresh)
        return self._expected[key]


def _needed(shapes: Sequence[Shape], dtype: DType) -> tuple[int, ...]:
    sizes = [tuple(n * slot_count(s, dtype) for n in numels(s)) for s in shapes]
    return tuple(max(column, default=0) for column in zip(*sizes, strict=True)) or (0, 0, 0)


def _views(flat: tuple[torch.Tensor, ...], s: Shape, slot: int) -> Triple:
    sizes = (
        (s.batch, s.seqlen_q, s.heads, s.head_dim),
        (s.batch, s.seqlen_k, s.kv_heads, s.head_dim),
        (s.batch, s.seqlen_k, s.kv_heads, s.head_dim_v),
    )
    q, k, v = (
        t[slot * n : (slot + 1) * n].view(size)
        for t, n, size in zip(flat, numels(s), sizes, strict=True)
    )
    return q, k, v


def _inputs(shape: Shape, tensors: Triple, function: Function | None) -> Inputs:
    return Inputs(*tensors, shape.default_scale, shape.causal, function)
