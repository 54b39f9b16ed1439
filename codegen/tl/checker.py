"""Sketch × Problem → diagnostics, all at once, each with its line and a remedy."""

from __future__ import annotations

from codegen.tl.ast import Sketch, walk
from codegen.tl.binding import assemble
from codegen.tl.check_end import unwritten_tensors
from codegen.tl.check_flow import check_flow
from codegen.tl.check_sizes import check_claims, check_params, check_shapes, check_stated_shapes
from codegen.tl.printer import to_text
from codegen.tl.repair import is_role, mend, strip_schedule
from codegen.tl.report import Report
from codegen.tl.smem import buffers, smem_bytes
from codegen.tl.source import Diagnostic, Span
from codegen.tl.subject import Subject, subject_of
from space.gpu import GpuSpec
from space.params import Point
from space.variant import DType, Problem

_SCHEDULE_HINT = (
    "Pipelines and roles are the translator's: leave these lines out and say `Param stages = 2`, "
    "`Param consumer_warpgroups = 2` or `Param overlap = 1` instead"
)


def check(
    sketch: Sketch,
    problem: Problem | None = None,
    gpu: GpuSpec | None = None,
    point: Point | None = None,
) -> tuple[Diagnostic, ...]:
    """Return everything that is wrong with `sketch`, in order of its lines.

    With a problem, its head dims and mask are checked too; with a point, the sizes it gives; with
    a GPU, the shared memory wanted, once every size has a number.
    """
    report = Report()
    if _refuse_schedule(sketch, report):
        sketch = strip_schedule(sketch)
    subject = subject_of(sketch, problem, point)
    check_flow(subject, report)
    if subject.is_code:
        unwritten_tensors(subject, report)
    check_shapes(subject, report)
    check_stated_shapes(subject, report)
    check_params(subject, report)
    check_claims(subject, report)
    if gpu is not None and not report.sorted():
        _check_smem(subject, gpu, report)
    return report.sorted()


def repaired(sketch: Sketch) -> str | None:
    """Return the dataflow that remains of a refused program as TL text without faults, or None.

    None where nothing was refused, and where what remains has faults that only its author can mend.
    """
    if not _refuse_schedule(sketch, Report()):
        return None
    mended = mend(strip_schedule(sketch))
    return None if check(mended) else to_text(mended)


def _refuse_schedule(sketch: Sketch, report: Report) -> bool:
    """Report all barriers, TMA marks and roles in one message; return whether there are any."""
    roles = [s for s in walk(sketch.statements) if is_role(s)]
    spans = [r.span for r in sketch.refused] + [s.span for s in roles]
    if not spans:
        return False
    lines = sorted({s.line for s in spans})
    shown = ", ".join(map(str, lines[:8])) + (" and more" if len(lines) > 8 else "")
    renamed = {"Allocate": "barriers", "Copy": "buffer indices"}
    words = {r.text.split()[0].rstrip("();") for r in sketch.refused}
    words = {renamed.get(w, w) for w in words}
    words |= {"warp roles"} if roles else set()
    report.add(
        min(spans, key=lambda s: (s.line, s.column)),
        "schedule",
        f"{', '.join(sorted(words))} on lines {shown} schedule the kernel, which TL does not",
        _SCHEDULE_HINT,
    )
    return True


def _check_smem(subject: Subject, gpu: GpuSpec, report: Report) -> None:
    """Report more shared memory than `gpu` has: bytes wanted, bytes there, and which buffers."""
    sized = _sized(subject)
    if sized is None:
        return
    program = assemble(subject.sketch, *sized)
    for kernel in program.kernels:
        wanted = smem_bytes(program, kernel)
        if wanted <= gpu.smem_per_block_bytes:
            continue
        listed = ", ".join(map(str, buffers(program, kernel)))
        largest = max(buffers(program, kernel), key=lambda b: b.bytes)
        spans = [s.span for s in walk(kernel.body) if getattr(s, "name", None) == largest.name]
        report.add(
            spans[0] if spans else Span(1),
            "shared-memory",
            f"{wanted} bytes of shared memory wanted, {gpu.smem_per_block_bytes} there on "
            f"{gpu.name}: {listed} bytes",
            f"Use a smaller BM or BN or fewer stages; {largest.name} is the largest buffer",
        )


def _sized(subject: Subject) -> tuple[Problem, Point] | None:
    """Return the problem and point that give every size a number, or None."""
    tuned = dict(subject.params.tuned)
    for name in ("BM", "BN"):
        value = subject.params.numbers.get(name)
        if isinstance(value, int):
            tuned.setdefault(name, value)
    if "BM" not in tuned or "BN" not in tuned:
        return None
    if subject.problem is not None:
        return subject.problem, Point.of(tuned)
    dims = [
        subject.params.numbers.get(str(getattr(a.shape[-1], "id", "")))
        for name in ("Q", "V")
        for a in subject.allocations
        if a.name == name and len(a.shape) == 2
    ]
    known = [d for d in dims if isinstance(d, int)]
    if not known:
        return None
    return Problem("mha", DType.FP16, known[0], known[-1], False), Point.of(tuned)
