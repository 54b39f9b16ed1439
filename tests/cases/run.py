"""Runs the real cases and prints one line for each.

    python -m tests.cases.run --runner gpu|interpreter|export [DIR] [--json OUT] [--only ID,ID]
                              [--full] [--sizes small,medium,large]

Without a folder, the export runner builds one that serves every case. Exits 1 when a case fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

from codegen.errors import CodegenError
from runs.record import Rejected, TrialClass
from space.variant import Problem, SpaceError, check_shape
from tests.cases import planner
from tests.cases.case import PLANNED, REFUSABLE, Case, load, out_of_scope, work
from tests.cases.exporting import export_cases
from tests.cases.runners import (
    ExportRunner,
    InterpreterRunner,
    KernelRunner,
    NotInFolder,
    Runner,
)
from tests.cases.verdict import FAIL, NOT_IN_SCOPE, PASS, Verdict
from tuner.evaluate.inputs import Check, make
from tuner.evaluate.launch import LaunchError
from tuner.evaluate.reference import attention
from tuner.evaluate.verify import Exam, set_exam, synchronize, verify


def judge(case: Case, runner: Runner) -> Verdict:
    """Run every shape, mask and data of a case."""
    if (why := out_of_scope(case)) is not None:
        return Verdict(NOT_IN_SCOPE, why)
    if case.kind in PLANNED:
        return planner.judge(case)
    if case.kind == "guard":
        return _over_limit(case, runner)
    if isinstance(case.raw["heads_kv"], dict):
        return _heads_that_differ(case, runner)
    runs = case.runs()
    if max(work(check) for _, check in runs) > runner.most_work:
        return Verdict(NOT_IN_SCOPE, "too large for this runner")
    worst = 0.0
    for problem, check in runs:
        verdict = _one(case, problem, check, runner)
        if verdict.state != PASS or verdict.why.startswith("refused"):
            return verdict
        worst = max(worst, float(verdict.why))
    return Verdict(PASS, f"error {worst:.2f} of plain attention's")


def _one(case: Case, problem: Problem, check: Check, runner: Runner) -> Verdict:
    try:
        check_shape(check.shape)
        prepare = runner.prepare(problem, case.window)
    except NotInFolder as missing:
        return Verdict(NOT_IN_SCOPE, str(missing))
    except (SpaceError, CodegenError, NotImplementedError) as refused:
        if case.kind in REFUSABLE or case.window is not None:
            return Verdict(PASS if case.kind in REFUSABLE else NOT_IN_SCOPE, f"refused: {refused}")
        return Verdict(FAIL, str(refused))
    inputs = make(check, problem.dtype, runner.device)
    if not inputs.q.numel():
        return _empty(prepare, inputs.q, inputs.k, inputs.v, check)
    exam = set_exam(check.name, inputs)
    if case.window is not None:
        return _windowed(case, exam, prepare)
    verdict = verify(prepare, exam, case.repeats)
    if isinstance(verdict, Rejected):
        if verdict.trial_class is TrialClass.LAUNCH_FAILED and case.kind in REFUSABLE:
            return Verdict(PASS, f"refused: {verdict.reason}")
        return Verdict(FAIL, f"{check.shape.key}, {check.data}: {verdict.reason}")
    if case.exact:
        right = attention(inputs, torch.float64).to(inputs.q.dtype)
        if not torch.equal(exam.output.tensor, right):
            off = int((exam.output.tensor != right).sum())
            return Verdict(FAIL, f"{check.shape.key}: {off} elements are not exactly the answer")
    return Verdict(PASS, str(verdict))


def _windowed(case: Case, exam: Exam, prepare: object) -> Verdict:
    """A window that covers all is plain causal; one of 3 tokens has a closed form at q = 0."""
    assert case.window is not None and callable(prepare)
    inputs, out = exam.inputs, exam.output.tensor
    if case.window[0] + 1 >= inputs.k.shape[1]:
        verdict = verify(prepare, exam, case.repeats)
        if isinstance(verdict, Rejected):
            return Verdict(FAIL, verdict.reason)
        return Verdict(PASS, str(verdict))
    exam.output.poison()
    prepare(*inputs.tensors, out, inputs.scale)()
    synchronize(out.device)
    left = case.window[0]
    for row in range(inputs.q.shape[1]):
        seen = range(max(0, row - left), row + 1)
        right = sum(j + 1 for j in seen) / len(seen)
        if not bool((out[:, row] == right).all()):
            return Verdict(FAIL, f"row {row} is {float(out[0, row, 0, 0])}, {right} is right")
    return Verdict(PASS, "0.0")


def _empty(
    prepare: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, check: Check
) -> Verdict:
    """No query at all: the call returns, and the output is empty."""
    assert callable(prepare)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    prepare(q, k, v, out, check.softmax_scale)()
    synchronize(out.device)
    return Verdict(PASS, "0.0")


def _heads_that_differ(case: Case, runner: Runner) -> Verdict:
    """K and V with different head counts: the launch refuses them."""
    counts = case.raw["heads_kv"]
    if isinstance(runner, InterpreterRunner):
        return Verdict(NOT_IN_SCOPE, "needs a launch")
    raw = {**case.raw, "heads_kv": counts["k"]}
    (check,) = Case(case.id, case.kind, case.gpus, case.exact, raw).checks()
    problem = case.problem(check.shape)
    inputs = make(check, problem.dtype, runner.device)
    out = inputs.q.new_empty((*inputs.q.shape[:3], inputs.v.shape[3]))
    try:
        prepare = runner.prepare(problem, None)
        prepare(inputs.q, inputs.k, inputs.v[:, :, : counts["v"]], out, inputs.scale)()
    except NotInFolder as missing:
        return Verdict(NOT_IN_SCOPE, str(missing))
    except LaunchError as refused:
        return Verdict(PASS, f"refused: {refused}")
    return Verdict(FAIL, "different head counts of K and V were launched")


def _over_limit(case: Case, runner: Runner) -> Verdict:
    """A launch that asks for more shared memory than there is, over a right old output."""
    if not isinstance(runner, KernelRunner):
        return Verdict(NOT_IN_SCOPE, "needs a launch of a kernel that was not exported")
    from codegen.nvrtc import compile_source
    from tests.adversarial.naive import naive
    from tuner.evaluate.launch import LoadedKernel

    (check,) = case.checks()
    problem = case.problem(check.shape)
    source = naive(problem, smem_bytes=runner.gpu.smem_per_block_bytes + 256)
    kernel = LoadedKernel(source, compile_source(source, runner.gpu.arch).image, runner.device)
    exam = set_exam(check.name, make(check, problem.dtype, runner.device))
    first = verify(runner.prepare(problem, None), exam, 0)
    if isinstance(first, Rejected):
        return Verdict(FAIL, first.reason)
    verdict = verify(kernel.prepare, exam, 0)
    if isinstance(verdict, Rejected) and verdict.trial_class is TrialClass.LAUNCH_FAILED:
        return Verdict(PASS, verdict.reason)
    return Verdict(FAIL, f"ended as {verdict}")


def main(argv: list[str] | None = None) -> int:
    """Run the cases that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runner", choices=("gpu", "interpreter", "export"), required=True)
    parser.add_argument("folder", nargs="?", type=Path, help="the exported folder")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument(
        "--full", action="store_true", help="the sizes of the report, not quick ones"
    )
    parser.add_argument("--sizes", default="small,medium")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        return _run(args, _runner(args, Path(scratch)))


def _runner(args: argparse.Namespace, scratch: Path) -> Runner:
    match args.runner:
        case "gpu":
            return KernelRunner()
        case "export":
            folder = args.folder
            if folder is None:
                folder = export_cases(load(), KernelRunner().gpu, scratch)
            return ExportRunner(folder)
    return InterpreterRunner()


def _run(args: argparse.Namespace, runner: Runner) -> int:
    only = set(filter(None, args.only.split(",")))
    rows = []
    for case in load():
        if (only and case.id not in only) or case.raw["size"] not in args.sizes.split(","):
            continue
        verdict = judge(case if args.full else case.quick(), runner)
        rows.append({"id": case.id, "state": verdict.state, "why": verdict.why})
        print(f"{case.id}: {verdict}", flush=True)
        if runner.device.type == "cuda":
            torch.cuda.empty_cache()
    counts = {s: sum(r["state"] == s for r in rows) for s in (PASS, FAIL, NOT_IN_SCOPE)}
    print(", ".join(f"{n} {state}" for state, n in counts.items()))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if counts[FAIL] or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
