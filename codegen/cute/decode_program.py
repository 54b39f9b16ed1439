"""A bound decode program with warp-level MMA → KernelSource."""

from __future__ import annotations

from codegen.cute.decode import DECODE_SUFFIXES, DECODE_WORDS, emit_partial
from codegen.cute.decode_plan import plan_decode
from codegen.cute.names import safe
from codegen.cute.target import Target
from codegen.cute.writer import Writer
from codegen.errors import PlanError
from codegen.kernel import KernelSource, Launch, SplitRule, Workspace
from codegen.tl import ast
from space.gpu import GpuSpec
from space.variant import Problem


def translate_decode(
    program: ast.Program, problem: Problem, gpu: GpuSpec, target: Target
) -> KernelSource:
    """Lower a decode program of two kernels: one split's results, and their combination.

    Raises PlanError, naming the limit, when the program cannot run on `gpu` at its parameters.
    """
    if len(program.kernels) != 2:
        raise PlanError(
            "a decode program has two kernels, of a split of the keys and of their combination; "
            "start from `tune sketch --phase decode`"
        )
    program = safe(program, DECODE_WORDS, DECODE_SUFFIXES)
    plan = plan_decode(program, program.kernels[0], problem, gpu)
    out = Writer()
    out.line(f"// {problem.key} for {target.arch}")
    out.line("// " + " ".join(f"{k}={v}" for k, v in program.params))
    target.prelude(out, problem.dtype)
    out.line()
    emit_partial(plan, target, out)
    base = plan.base
    launches = (Launch(base.entry, plan.threads, base.smem_bytes, base.grid, base.args),)
    inputs = tuple((t.name, "in") for t in base.kernel.tensors if not t.workspace)
    rule = SplitRule(
        base.rows, plan.loop.columns, program.param("split_blocks", 2),
        program.param("min_split_tiles", 1),
    )  # fmt: skip
    return KernelSource(
        out.text(), target.arch, launches, (*inputs, ("O", "out")), _workspaces(base.kernel), rule
    )


def _workspaces(kernel: ast.Kernel) -> tuple[Workspace, ...]:
    """Partial results: [splits, batch, kv_heads, rows(, columns)]."""
    axes = ("splits", "batch", "kv_heads", "rows")
    return tuple(
        Workspace(t.name, axes if t.columns == 1 else (*axes, str(t.columns)))
        for t in kernel.tensors
        if t.workspace
    )
