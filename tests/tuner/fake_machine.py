"""A machine without a compiler or a GPU: answers at once, from a table of rules."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from codegen.kernel import Cubin, KernelSource, Launch, Resources
from runs.record import Basis, Finalist, Measured, Note, Outcome, Rejected, RunSpec, Timing
from runs.store import RunStore
from space.gpu import GpuSpec
from space.variant import Shape
from tuner.evaluate.model import Candidate as Modelled
from tuner.evaluate.model import block_warps, predict_us
from tuner.finish import Contender, PeerTimes
from tuner.job import Built
from tuner.lanes import Candidate
from tuner.session import Machine

CANONICAL = """\
Copy Q from global to shared
for i = 0:N
  Copy K from global to shared
  Compute GEMM Q, K.T and get S
  MASK
  Compute Softmax S
  Copy V from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
end
Copy O from register to global
"""
CAUSAL = CANONICAL.replace("MASK", "Compute Mask S, causal")
FULL = CANONICAL.replace("  MASK\n", "")
#: K where K.T is meant, and O never written
FAULTY = FULL.replace("K.T", "K").replace("Copy O from register to global\n", "")

A100 = ("NVIDIA A100-SXM4-80GB",)  #: the devices of such a machine

T = TypeVar("T")
Judge = Callable[[Candidate], "Outcome | None"]


def done(value: T) -> Future[T]:
    """A future that has its answer."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def build(candidate: Candidate) -> Built:
    """A made-up kernel whose text is its point."""
    problem, point = candidate.problem, candidate.point
    text = f"// {candidate.sketch} {problem.key} {point.key}"
    modelled = Modelled.uncompiled(problem, point)
    launch = Launch("kernel", 32 * block_warps(point), modelled.smem_bytes, (), ())
    source = KernelSource(text, "sm_89", (launch,), (("Q", "in"), ("O", "out")))
    resources = Resources("kernel", modelled.registers, 0, 0, 0, 0)
    key = hashlib.sha256(source.digest.encode()).hexdigest()
    cubin = Cubin(text.encode(), "sm_89", source.digest, key, "", (resources,), 0.1, "13.0")
    return Built(source, cubin)


class FakeWorkshop:
    """Builds and judges at once; `verdict` may say how a candidate ends."""

    def __init__(self, spec: RunSpec, gpu: GpuSpec, verdict: Judge, depth: int = 1) -> None:
        self.spec = spec
        self.gpu = gpu
        self.verdict = verdict
        self.depth = depth
        self.built: list[str] = []
        self.judged: list[str] = []
        self.closed = False

    def build(self, candidate: Candidate) -> Future[Built | Rejected]:
        self.built.append(candidate.point.key)
        return done(build(candidate))

    def judge(self, candidate: Candidate, built: Built) -> Future[Outcome]:
        self.judged.append(candidate.point.key)
        said = self.verdict(candidate)
        return done(self.measured(candidate) if said is None else said)

    def measured(self, candidate: Candidate) -> Measured:
        timings = tuple(
            self.timing(candidate, s) for s in self.spec.shapes if candidate.problem.serves(s)
        )
        return Measured(timings, 1.0 if self.spec.measure is Basis.MEASURED else None)

    def timing(self, candidate: Candidate, shape: Shape) -> Timing:
        us = predict_us(Modelled.uncompiled(candidate.problem, candidate.point), shape, self.gpu)
        return Timing(shape, us, us * 0.99, us * 1.01, 20, self.spec.measure)

    def facts(self) -> Sequence[Note]:
        return (Note("machine", (("fake", True),)),)

    def peers(self, spec: RunSpec) -> PeerTimes:
        return PeerTimes(
            tuple(
                Finalist(s, None, "fa2", Timing(s, 100.0, 99.0, 101.0, 20, Basis.MEASURED))
                for s in spec.shapes
            ),
            ("no fa3: not installed",),
        )

    def finals(
        self, spec: RunSpec, store: RunStore, entries: Sequence[Contender]
    ) -> Sequence[Finalist]:
        ours = [
            Finalist(t.shape, e.record.index, e.name, t)
            for e in entries
            if isinstance(e.record.outcome, Measured)
            for t in e.record.outcome.timings
            if t.shape in e.shapes
        ]
        return [*ours, *self.peers(spec).finalists]

    def again(self, spec: RunSpec) -> FakeWorkshop:
        return FakeWorkshop(spec, self.gpu, self.verdict, self.depth)

    def close(self) -> None:
        self.closed = True


class FakeMachine:
    """Hands out fake workshops and keeps them for the test to look at."""

    def __init__(
        self, devices: tuple[str, ...] = (), verdict: Judge = lambda c: None, depth: int = 1
    ) -> None:
        self.devices = devices
        self.verdict = verdict
        self.depth = depth
        self.shops: list[FakeWorkshop] = []
        self.exported: list[Path] = []

    def machine(self) -> Machine:
        return Machine(self.devices, self._open, self._export)

    def _open(
        self, spec: RunSpec, gpu: GpuSpec, device: int | None, workers: int | None
    ) -> FakeWorkshop:
        self.shops.append(FakeWorkshop(spec, gpu, self.verdict, self.depth))
        return self.shops[-1]

    def _export(self, store: RunStore, out: Path) -> Path:
        self.exported.append(out)
        return out


def a100(verdict: Judge = lambda c: None, depth: int = 1) -> FakeMachine:
    """A machine with one A100."""
    return FakeMachine(A100, verdict, depth)
