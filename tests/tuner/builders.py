"""Builds that misbehave; run in a compile process."""

from __future__ import annotations

import os
import time

from codegen.kernel import Cubin, KernelSource
from runs.record import Broken, Rejected, Stage, TrialClass
from tuner.job import Built, CompileJob

SOURCE = KernelSource("text", "sm_80", (), ())


def scripted(job: CompileJob) -> Built | Rejected | Broken:
    """Do what the sketch's text says."""
    match job.sketch_text.split():
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["abort"]:
            os.abort()
        case ["raise"]:
            raise KeyError("no such layout")
        case ["reject"]:
            return Rejected(TrialClass.TOO_LARGE, Stage.PLAN, "too large")
    seen = f"{os.environ['CUDA_VISIBLE_DEVICES']!r} {os.environ['OMP_NUM_THREADS']}"
    cubin = Cubin(b"", job.arch, SOURCE.digest, str(os.getpid()), seen, (), 0.0, "13.0")
    return Built(SOURCE, cubin)
