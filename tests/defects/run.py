"""Puts each defect into the emitted text, asks the judge, and prints `caught k of n`.

    python -m tests.defects.run [--json OUT] [--only WORDS] [--held-up]

With --held-up the kernels are those of `held_up`: right ones must still pass, and a barrier that is
missing shows though no warp would have been late. Needs a Hopper card. Exits 1 when a defect was
not caught, or a right kernel was refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from codegen.kernel import KernelSource
from runs.record import Measured, Outcome, Rejected, TrialClass
from tests.defects.build import images_of, seeded
from tests.defects.defects import DEFECTS, Defect
from tests.defects.held_up import held_up
from tests.defects.subjects import SUBJECTS, Subject, emitted
from tuner.job import EvalJob
from tuner.worker import Supervisor, Worker

LIMIT_S = 25.0
SEED = 1


def job_of(subject: Subject, source: KernelSource, image: bytes) -> EvalJob:
    """What a search would ask the judge about this kernel."""
    return EvalJob(subject.problem, source, image, subject.shapes, SEED, LIMIT_S)


def is_caught(outcome: Outcome) -> bool:
    """Whether the judge blamed the kernel; a broken machine is no verdict."""
    return isinstance(outcome, Rejected)


def told(outcome: Outcome) -> str:
    """The class and the evidence in one line."""
    if isinstance(outcome, Measured):
        return f"{TrialClass.OK}: error {outcome.error_ratio:.2f} of plain attention's"
    return f"{outcome.trial_class}: {' '.join(outcome.reason.split())}"


def main(argv: list[str] | None = None) -> int:
    """Judge the right kernels, then every defect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="defects whose key holds these words")
    parser.add_argument("--held-up", action="store_true", help="warps sleep now and then")
    args = parser.parse_args(argv)
    defects = [d for d in DEFECTS if args.only in d.key]
    names = list(dict.fromkeys(d.subject for d in defects))
    sources = [*map(emitted, names), *map(seeded, defects)]
    if args.held_up:
        sources = [held_up(source) for source in sources]
    images = images_of(sources)
    supervisor = Supervisor(Worker(0))
    rows = []
    try:
        for name, source, image in zip(names, sources, images, strict=False):
            outcome = supervisor.judge(job_of(SUBJECTS[name], source, image))
            print(f"{name}, as emitted: {told(outcome)}", flush=True)
            if not isinstance(outcome, Measured):
                return 1
        start = len(names)
        for defect, source, image in zip(defects, sources[start:], images[start:], strict=True):
            rows.append(_judge(supervisor, defect, source, image))
    finally:
        supervisor.worker.close()
    caught = sum(bool(r["caught"]) for r in rows)
    print(f"caught {caught} of {len(rows)}")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if rows and caught == len(rows) else 1


def _judge(
    supervisor: Supervisor, defect: Defect, source: KernelSource, image: bytes
) -> dict[str, str | bool]:
    outcome = supervisor.judge(job_of(SUBJECTS[defect.subject], source, image))
    caught = is_caught(outcome)
    print(f"{'caught' if caught else 'MISSED'}  {defect.key}: {told(outcome)}", flush=True)
    return {
        "defect": defect.name,
        "kernel": defect.subject,
        "caught": caught,
        "class": str(outcome.trial_class),
        "evidence": told(outcome),
    }


if __name__ == "__main__":
    sys.exit(main())
