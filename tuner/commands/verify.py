"""`tune verify`: one line, or one JSON object, for each kernel."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from runs.record import Rejected
from tuner.sanitizer import INSTALL, State
from tuner.subjects import strange_files
from tuner.verify import MakeWorker, Plan, Verdict, plan, verdicts
from tuner.worker import Worker

Print = Callable[[str], object]


def run_verify(
    target: Path, seed: int | None, sanitizer: str, as_json: bool, out: Print,
    devices: tuple[str, ...] | None = None, make_worker: MakeWorker = Worker,
    reference: str | None = None,
) -> bool:  # fmt: skip
    """Judge every kernel of `target` and print its verdict; return whether all hold.

    Raises UsageError, NothingFound and MachineError.
    """
    todo = plan(target, seed, sanitizer, devices, reference)
    strange = strange_files(target)
    if not as_json:
        for line in preamble(todo, sanitizer, strange):
            out(line)
    found = []
    for verdict in verdicts(todo, make_worker):
        out(json.dumps(as_dict(verdict, todo.seed)) if as_json else line_of(verdict))
        found.append(verdict)
    good = sum(v.holds for v in found)
    if as_json:
        summary = {"verified": good, "kernels": len(found), "seed": todo.seed}
        program = todo.sanitizer or ("off" if sanitizer == "no" else "not installed")
        out(json.dumps(summary | {"sanitizer": program, "strange_files": list(strange)}))
    else:
        out(f"{good} of {len(found)} kernels hold")
    return good == len(found)


def preamble(todo: Plan, sanitizer: str, strange: tuple[str, ...]) -> list[str]:
    """Return the lines before the first verdict."""
    lines = [f"seed {todo.seed}: see the same problems again with --seed {todo.seed}"]
    if todo.sanitizer is None and sanitizer == "auto":
        lines.append(
            f"compute-sanitizer is not installed, {INSTALL}: memory and races are not checked by it"
        )
    if strange:
        names = ", ".join(strange)
        lines.append(f"{names}: not as this version exports; kernels are judged, that code is not")
    return lines


def line_of(verdict: Verdict) -> str:
    """Return one kernel's verdict as a line."""
    outcome, name = verdict.outcome, verdict.subject.name
    if isinstance(outcome, Rejected):
        return f"{name}: {outcome.trial_class}: {' '.join(outcome.reason.split())}"
    shapes = len(verdict.subject.shapes)
    text = (
        f"{name}: ok, {outcome.problems} problems and {shapes} tuned shapes among them, error at "
        f"most {outcome.error_ratio:.2f} of plain attention's"
    )
    for finding in verdict.sanitizer:
        text += f"; {finding}"
    return text


def as_dict(verdict: Verdict, seed: int) -> dict[str, object]:
    """Return one kernel's verdict as JSON values."""
    outcome, s = verdict.outcome, verdict.subject
    body: dict[str, object] = {
        "kernel": s.name, "problem": s.problem.key, "gpu": s.gpu, "holds": verdict.holds,
        "shapes": [shape.key for shape in s.shapes], "seed": seed,
    }  # fmt: skip
    if isinstance(outcome, Rejected):
        body |= {"class": str(outcome.trial_class), "reason": outcome.reason}
    else:
        body |= {
            "class": "ok", "problems": outcome.problems,
            "error_ratio": round(outcome.error_ratio, 4),
        }  # fmt: skip
    body["sanitizer"] = {
        f.tool: {"state": str(f.state)}
        | ({"said": f.said} if f.said or f.state is not State.CLEAN else {})
        for f in verdict.sanitizer
    }
    return body
