"""The tensors that timed shapes share: two data sets, and the place the kernel reads.

Every shape of a run is a view of the same flat tensors, so a dozen shapes of 16k tokens cost the
memory of one. The kernel only ever sees the working copy; the judge refills it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from space.variant import DType, Shape, io_bytes
from tuner.evaluate.cache import Cache, counts_of
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

    def exam(self, data_set: int, slot: int) -> Exam:
        """Return the problem on `slot` while it holds data set n."""
        return replace(self.exams[data_set], inputs=self.slots[slot])

    def fill(self, data_set: int, slot: int = 0) -> None:
        """Put data set n on a slot."""
        exam = self.exam(data_set, slot)
        for tensor, fresh in zip(exam.inputs.tensors, exam.pristine, strict=True):
            tensor.copy_(fresh)


def numels(shape: Shape, page: int = 0) -> tuple[int, int, int]:
    """Return the elements of Q, K and V, whole pages counted; V has none where it is part of K."""
    keys = shape.batch * _capacity(shape, page) * shape.kv_heads
    queries = shape.batch * shape.seqlen_q * shape.heads
    values = 0 if shape.latent else keys * shape.head_dim_v
    return queries * shape.head_dim, keys * shape.head_dim, values


def _capacity(shape: Shape, page: int) -> int:
    return -(-shape.seqlen_k // page) * page if page else shape.seqlen_k


def slot_count(shape: Shape, dtype: DType) -> int:
    """Return over how many slots the inputs of `shape` rotate, so that L2 cannot hold them."""
    wanted = math.ceil(ROTATE_BYTES / max(io_bytes(shape, dtype), 1))
    return min(max(wanted, 1), SLOTS_MAX)


class Arena:
    """The shared tensors of one dtype and seed on one device."""

    def __init__(
        self, shapes: Sequence[Shape], dtype: DType, seed: int, device: torch.device,
        page: int = 0, function: Function | None = None,
    ) -> None:  # fmt: skip
        """`page` is the page size of the shapes' caches, 0 where they are in one piece."""
        self._function = function
        self.dtype = dtype
        self.seed = seed
        self.page = page
        self._sizes = _needed(shapes, dtype, page)
        self._caches: dict[Shape, Cache | None] = {}
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

    def holds(self, shapes: Sequence[Shape], dtype: DType, seed: int, page: int = 0) -> bool:
        """Whether all of `shapes` fit here."""
        if (dtype, seed, page) != (self.dtype, self.seed, self.page):
            return False
        fits = all(a <= b for a, b in zip(_needed(shapes, dtype, page), self._sizes, strict=True))
        room = self._output.tensor.numel()
        return fits and all(s.batch * s.seqlen_q * s.heads * s.head_dim_v <= room for s in shapes)

    def bay(self, shape: Shape) -> Bay:
        """Lay the shape out and fill every slot; its answers are worked out once."""
        count = slot_count(shape, self.dtype)
        sizes = numels(shape, self.page)
        for work, fresh, numel in zip(self._work, self._fresh[0], sizes, strict=True):
            work[: numel * count].copy_(fresh[: numel * count])
        slots = tuple(self._inputs(shape, self._work, i) for i in range(count))
        output = self._output.part((shape.batch, shape.seqlen_q, shape.heads, shape.head_dim_v))
        exams = tuple(
            Exam(f"timed shape {shape.key}", slots[0], self._inputs(shape, fresh, 0).tensors,
                 self._answer(shape, n), output, tuple(t.clone() for _, t in slots[0].tables))
            for n, fresh in enumerate(self._fresh)
        )  # fmt: skip
        return Bay(shape, slots, output, exams)

    def _answer(self, shape: Shape, data_set: int) -> Expected:
        key = shape, data_set
        if key not in self._expected:
            self._expected[key] = expect(self._inputs(shape, self._fresh[data_set], 0))
        return self._expected[key]

    def _inputs(self, shape: Shape, flat: tuple[torch.Tensor, ...], slot: int) -> Inputs:
        """The shape's problem on a slot of some flat tensors."""
        tensors = _views(flat, shape, slot, self.page)
        if shape not in self._caches:
            self._caches[shape] = self._cache(shape, flat[0].device)
        cache = self._caches[shape]
        return Inputs(*tensors, shape.default_scale, shape.causal, cache, self._function)

    def _cache(self, shape: Shape, device: torch.device) -> Cache | None:
        """The tables of a paged cache: pages in random order; none where it is in one piece."""
        if not self.page:
            return None
        whole = _capacity(shape, self.page)
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(shape.batch * whole // self.page, generator=generator)
        table = order.to(device, torch.int32).view(shape.batch, -1)
        full = whole == shape.seqlen_k
        counts = None if full else counts_of([shape.seqlen_k] * shape.batch, device)
        return Cache(counts, table)


def _needed(shapes: Sequence[Shape], dtype: DType, page: int) -> tuple[int, ...]:
    sizes = [tuple(n * slot_count(s, dtype) for n in numels(s, page)) for s in shapes]
    return tuple(max(column, default=0) for column in zip(*sizes, strict=True)) or (0, 0, 0)


def _views(flat: tuple[torch.Tensor, ...], s: Shape, slot: int, page: int) -> Triple:
    batch, rows = s.batch, s.seqlen_k
    if page:
        batch, rows = s.batch * _capacity(s, page) // page, page
    sizes = (
        (s.batch, s.seqlen_q, s.heads, s.head_dim),
        (batch, rows, s.kv_heads, s.head_dim),
        (batch, rows, s.kv_heads, s.head_dim_v),
    )
    q, k, v = (
        t[slot * n : (slot + 1) * n].view(size if n else 0)
        for t, n, size in zip(flat, numels(s, page), sizes, strict=True)
    )
    return q, k, k[..., : s.head_dim_v] if s.latent else v
