"""The translator: a bound TL program becomes a plan, and the plan becomes CuTe source."""

from __future__ import annotations

from codegen.cute.decode_program import translate_decode
from codegen.cute.emit import emit
from codegen.cute.names import safe
from codegen.cute.plan import KernelPlan, plan_kernel
from codegen.cute.sm75 import Sm75
from codegen.cute.sm80 import Sm80
from codegen.cute.sm90 import emit_sm90
from codegen.cute.sm90_plan import plan_sm90
from codegen.cute.target import Target
from codegen.errors import PlanError
from codegen.kernel import KernelSource, Launch, Workspace
from codegen.tl.ast import Program
from space.gpu import GpuSpec
from space.variant import Phase, Problem


def target_of(gpu: GpuSpec) -> Target:
    """Return the lowering of a GPU's generation."""
    return Sm75() if gpu.sm < 80 else Sm80(gpu.arch)


def translate(program: Program, problem: Problem, gpu: GpuSpec) -> KernelSource:
    """Lower a bound program to source. Deterministic to the byte.

    Raises PlanError, naming the limit, when the program cannot run on `gpu` at its parameters.
    """
    if problem.dtype not in gpu.dtypes:
        raise PlanError(f"{gpu.name} (sm_{gpu.sm}) has no {problem.dtype} tensor cores; use fp16")
    if problem.phase is Phase.DECODE:
        return translate_decode(program, problem, gpu, target_of(gpu))
    program = safe(program)
    if program.param("consumer_warpgroups", 0):
        return _translate_hopper(program, problem, gpu)
    plans = tuple(plan_kernel(program, k, problem, gpu) for k in program.kernels)
    target = target_of(gpu)
    launches = tuple(Launch(p.entry, p.threads, p.smem_bytes, p.grid, p.args) for p in plans)
    return KernelSource(
        emit(plans, target), target.arch, launches, _tensors(plans), _workspaces(plans)
    )


def _translate_hopper(program: Program, problem: Problem, gpu: GpuSpec) -> KernelSource:
    if gpu.sm != 90:
        raise PlanError(f"{gpu.name} (sm_{gpu.sm}) has no wgmma; use consumer_warpgroups = 0")
    if len(program.kernels) != 1:
        raise PlanError("the Hopper back end lowers programs of one kernel")
    plan = plan_sm90(program, program.kernels[0], problem, gpu)
    base = plan.base
    launch = Launch(
        base.entry, plan.threads, plan.smem_bytes, base.grid, base.args,
        persistent=0 if plan.scheduler == 0 else 1, cluster=plan.cluster,
    )  # fmt: skip
    return KernelSource(emit_sm90(plan), gpu.arch, (launch,), _tensors((base,)))


def _tensors(plans: tuple[KernelPlan, ...]) -> tuple[tuple[str, str], ...]:
    found = {
        t.name: "out" if t.output else "in"
        for p in plans
        for t in p.kernel.tensors
        if not t.workspace
    }
    return tuple(found.items())


def _workspaces(plans: tuple[KernelPlan, ...]) -> tuple[Workspace, ...]:
    found = {}
    for plan in plans:
        for t in plan.kernel.tensors:
            if t.workspace:
                axes = tuple(_count(plan.program, axis) for axis in t.axes)
                found[t.name] = Workspace(t.name, (*axes, "batch", "heads", "M", str(t.columns)))
    return tuple(found.values())


def _count(program: Program, axis: str) -> str:
    """Length of a workspace's axis. Raises PlanError when the program does not say it."""
    name = f"num_{axis}"
    if not (count := program.param(name, 0)):
        raise PlanError(
            f"{name} is chosen at each launch of a decode kernel alone; in prefill write "
            f"`Param {name} in {{2}}`"
        )
    return str(count)
