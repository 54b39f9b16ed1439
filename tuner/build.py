"""One candidate from TL text to cubin: parse, bind, check, plan, emit, compile.

Runs in a compile process that sees no GPU; what a text shares with other points is kept there.
"""

from __future__ import annotations

import functools
from pathlib import Path

from codegen import cute, nvrtc
from codegen.errors import CompileError, PlanError, TLError, ToolchainMissing
from codegen.kernel import Cubin, KernelSource
from codegen.ptxas import local_memory
from codegen.tl import parser
from codegen.tl.ast import Program, Sketch
from codegen.tl.bind import bind
from runs.record import Broken, Rejected, Stage, TrialClass
from space.constraints import is_hopper
from space.gpu import GpuSpec, gpu_named
from space.variant import Problem
from tuner.evaluate import gate
from tuner.job import Built, CompileJob

LOG_LINES = 12  #: of a compiler's log that a record keeps


def build(job: CompileJob) -> Built | Rejected | Broken:
    """Build a candidate, or say at which stage and why it cannot be built."""
    try:
        sketch = _parse(job.sketch_text)
    except TLError as error:
        return Rejected(TrialClass.INVALID_PROPOSAL, Stage.PARSE, str(error))
    try:
        program = bind(sketch, job.problem, job.point)
    except TLError as error:
        return Rejected(TrialClass.INVALID_PROPOSAL, Stage.BIND, str(error))
    if (wrong := _gate(job, program)) is not None:
        return Rejected(TrialClass.WRONG_OUTPUT, Stage.CHECK, wrong)
    gpu = gpu_named(job.gpu_name)
    try:
        source = cute.translate(program, job.problem, gpu)
    except PlanError as error:
        return Rejected(TrialClass.TOO_LARGE, Stage.PLAN, str(error))
    try:
        cubin = nvrtc.compile_source(source, job.arch, job.cache)
    except CompileError as error:
        return Rejected(TrialClass.COMPILE_ERROR, Stage.COMPILE, _head(error.log))
    except ToolchainMissing as error:
        return Broken(Stage.COMPILE, str(error))
    why = too_large(source, cubin, gpu)
    if why is None and is_hopper(job.point):
        # the roles' registers are fixed: what does not fit would be read from memory in the loop
        why = local_memory(cubin.resources)
    if why is not None:
        return Rejected(TrialClass.TOO_LARGE, Stage.COMPILE, why)
    return Built(source, cubin)


def too_large(source: KernelSource, cubin: Cubin, gpu: GpuSpec) -> str | None:
    """Return which limit of `gpu` the compiled kernel breaks, or None."""
    resources = {r.entry: r for r in cubin.resources}
    for launch in source.launches:
        found = resources.get(launch.entry)
        static = found.static_smem_bytes if found is not None else 0
        if (wanted := launch.smem_bytes + static) > gpu.smem_per_block_bytes:
            return (
                f"{launch.entry}: {wanted} bytes of shared memory wanted, "
                f"{gpu.smem_per_block_bytes} there"
            )
        if found is not None and (wanted := found.registers * launch.threads) > (
            gpu.registers_per_sm
        ):
            return (
                f"{launch.entry}: {found.registers} registers x {launch.threads} threads = "
                f"{wanted}, {gpu.registers_per_sm} there"
            )
    return None


@functools.lru_cache(maxsize=64)
def _parse(text: str) -> Sketch:
    return parser.parse(text)


_gated: dict[tuple[str, Problem, int, int, Path | None], str | None] = {}


def _gate(job: CompileJob, program: Program) -> str | None:
    """The interpreter's verdict; schedule parameters do not change it, so it is kept by tile."""
    point = job.point
    key = job.sketch_text, job.problem, point.get("BM", 0), point.get("BN", 0), job.answers
    if key not in _gated:
        _gated[key] = gate.fault(program, job.problem, job.answers)
    return _gated[key]


def _head(log: str) -> str:
    """The lines of a compiler's log that say what is wrong."""
    lines = log.strip().splitlines()
    errors = [line for line in lines if "error" in line.lower()]
    return "\n".join((errors or lines)[:LOG_LINES]) or "NVRTC failed without a word"
