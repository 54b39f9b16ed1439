"""A bound decode program → KernelSource: one split's results, and what combines the splits."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.cute.decode import DECODE_SUFFIXES, DECODE_WORDS, emit_partial
from codegen.cute.decode_plan import plan_decode as plan_mma_decode
from codegen.cute.names import safe
from codegen.cute.pointwise import emit_pointwise
from codegen.cute.pointwise_plan import is_pointwise, launch_pointwise, plan_pointwise
from codegen.cute.sm90_decode import emit_decode
from codegen.cute.sm90_decode_plan import plan_decode
from codegen.cute.structure import used_scalars
from codegen.cute.target import Target
from codegen.cute.writer import Writer
from codegen.errors import PlanError
from codegen.kernel import KernelSource, Launch, SplitRule, Workspace
from codegen.tl.ast import Program
from space.gpu import GpuSpec
from space.variant import Problem

#: choices that change nothing of the text; programs made before there was one have it too
UNSTATED = (("q_panels", 0), ("split_cluster", 1), ("column_blocks", 1))


@dataclass(frozen=True, slots=True)
class _Partial:
    """The kernel of one split: how it is started, rows and keys of its tiles."""

    launch: Launch
    rows: int
    keys: int
    sharing: int = 1  #: blocks that work on one split


def translate_decode(
    program: Program, problem: Problem, gpu: GpuSpec, target: Target
) -> KernelSource:
    """Lower a program of two kernels: over one split of the keys, and one that combines them.

    Raises PlanError, naming the limit, when the program cannot run on `gpu` at its parameters.
    """
    if len(program.kernels) != 2 or not is_pointwise(program.kernels[1]):
        raise PlanError(
            "a decode program has two kernels: over a split, and one that combines them"
        )
    outputs = [t.name for t in program.kernels[1].tensors if t.output]
    if len(outputs) != 1:
        raise PlanError(f"a decode program writes one output, not {len(outputs)}")
    out = Writer()
    out.line(f"// {problem.key} for {gpu.arch}")
    out.line("// " + " ".join(f"{k}={v}" for k, v in program.params if (k, v) not in UNSTATED))
    if program.param("consumer_warpgroups", 0):
        program = safe(program)
        first = _hopper(program, problem, gpu, outputs[0], out)
    else:
        program = safe(program, DECODE_WORDS, DECODE_SUFFIXES)
        first = _mma_sync(program, problem, gpu, outputs[0], target, out)
    last = program.kernels[1]
    combine = plan_pointwise(
        last, used_scalars(program, last), dependent=gpu.sm >= 90,
        groups=program.param("combine_groups", 1),
    )  # fmt: skip
    out.line()
    emit_pointwise(combine, out)
    found = {
        t.name: "out" if t.output else "in"
        for k in program.kernels for t in k.tensors if not t.workspace
    }  # fmt: skip
    spaces = {t.name: t for k in program.kernels for t in k.tensors if t.workspace}
    workspaces = tuple(
        Workspace(name, ("splits", "batch", "kv_heads", "rows", str(t.columns)))
        for name, t in spaces.items()
    )
    rule = SplitRule(
        first.rows, first.keys, program.param("split_blocks", 1),
        program.param("min_split_tiles", 1), first.sharing,
    )  # fmt: skip
    launches = (first.launch, launch_pointwise(combine, if_split=True))
    return KernelSource(out.text(), gpu.arch, launches, tuple(found.items()), workspaces, rule)


def _hopper(program: Program, problem: Problem, gpu: GpuSpec, output: str, out: Writer) -> _Partial:
    if gpu.sm != 90:
        raise PlanError(f"{gpu.name} (sm_{gpu.sm}) has no wgmma; use consumer_warpgroups = 0")
    plan = plan_decode(program, problem, gpu, output)
    emit_decode(plan, out)
    base = plan.base
    launch = Launch(
        base.entry, plan.threads, plan.smem_bytes, base.grid, base.args,
        cluster=plan.split_cluster,
    )  # fmt: skip
    return _Partial(launch, base.rows, plan.keys, plan.split_cluster * plan.column_blocks)


def _mma_sync(
    program: Program, problem: Problem, gpu: GpuSpec, output: str, target: Target, out: Writer
) -> _Partial:
    plan = plan_mma_decode(program, problem, gpu, output)
    target.prelude(out, problem.dtype)
    out.line()
    emit_partial(plan, target, out)
    base = plan.base
    launch = Launch(base.entry, plan.threads, base.smem_bytes, base.grid, base.args)
    return _Partial(launch, base.rows, plan.loop.columns)
