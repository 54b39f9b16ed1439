"""Records and kernels that the tests of this folder share."""

from __future__ import annotations

import hashlib

from codegen.kernel import Arg, ArgKind, Cubin, GridAxis, KernelSource, Launch, Resources
from runs.record import (
    Basis,
    Broken,
    Finalist,
    Finished,
    Measured,
    Note,
    Outcome,
    Rejected,
    Resumed,
    RunSpec,
    Stage,
    Timing,
    TrialClass,
    TrialRecord,
)
from space.params import Point
from space.variant import DType, Problem, Shape

SHAPE = Shape(2, 8, 2, 512, 512, 128, 128, causal=True)
OTHER = Shape(1, 8, 2, 1024, 1024, 128, 128, causal=True)
PROBLEM = Problem("gqa", DType.BF16, 128, 128, causal=True)
POINT = Point.of({"BM": 128, "BN": 64, "warps": 4})
SPEC = RunSpec(
    "20261130T1200Z-gqa-h200", "gqa", "h200", DType.BF16, (SHAPE, OTHER), 200, 0,
    Basis.MEASURED, sketches=(("canonical", "Copy Q from global to shared\n"),),
)  # fmt: skip


def timing(shape: Shape = SHAPE, us: float = 100.0, basis: Basis = Basis.MEASURED) -> Timing:
    return Timing(shape, us, us - 1, us + 1, 25, basis)


def measured(*timings: Timing) -> Measured:
    return Measured(timings or (timing(),), 0.9)


def trial(index: int = 0, outcome: Outcome | None = None, key: str = "") -> TrialRecord:
    return TrialRecord(
        index, PROBLEM, "canonical", POINT, "sampler", outcome or measured(),
        source_digest="ab" * 32, cubin_key=key,
        resources=(Resources("forward", 168, 0, 0, 0, 1024),), smem_bytes=65536,
    )  # fmt: skip


def finalist(number: int | None, shape: Shape = SHAPE, us: float = 90.0, chosen: bool = False):
    name = "fa2" if number is None else f"trial {number}"
    return Finalist(shape, number, name, timing(shape, us), chosen)


EVENTS = (
    trial(0),
    trial(1, Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, "NaN at [0, 3]\nsecond line é\r")),
    trial(2, Broken(Stage.LAUNCH, "driver lost")),
    Note("versions", (("torch", "2.13.0"), ("clock_mhz", 1980), ("tf32", False), ("t", 0.5))),
    Resumed(3),
    finalist(0, chosen=True),
    finalist(None),
    Finished("budget spent", 3),
)


def kernel(name: str = "one", arch: str = "sm_90a") -> tuple[KernelSource, Cubin]:
    """A made-up kernel: its image is not machine code."""
    args = tuple(
        Arg(kind, arg)
        for tensor in "QKVO"
        for kind, arg in (
            (ArgKind.POINTER, tensor),
            (ArgKind.STRIDE, f"{tensor}.b"),
            (ArgKind.STRIDE, f"{tensor}.s"),
            (ArgKind.STRIDE, f"{tensor}.h"),
        )
    )
    numbers = tuple(Arg(ArgKind.INT, n) for n in ("M", "N", "heads", "group"))
    grid = (GridAxis("M", 128), GridAxis("heads", 1), GridAxis("batch", 1))
    launch = Launch("forward", 128, 65536, grid, (*args, *numbers, Arg(ArgKind.FLOAT, "scale")))
    tensors = (("Q", "in"), ("K", "in"), ("V", "in"), ("O", "out"))
    source = KernelSource(f"// kernel {name}\n", arch, (launch,), tensors)
    key = hashlib.sha256(f"{name} {arch}".encode()).hexdigest()
    resources = (Resources("forward", 168, 0, 0, 0, 1024),)
    image = b"\x7fELF" + name.encode()
    return source, Cubin(image, arch, source.digest, key, "log\n", resources, 2.5, "13.0")
