"""Compiles subjects and defects, several at a time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import joblib

from codegen.kernel import KernelSource
from codegen.nvrtc import compile_source
from tests.defects.defects import Defect
from tests.defects.subjects import emitted

ARCH = "sm_90a"


def seeded(defect: Defect) -> KernelSource:
    """Return the subject's source with the defect in it."""
    right = emitted(defect.subject)
    return dataclasses.replace(right, text=defect.seed(right.text))


def image_of(source: KernelSource) -> bytes:
    """Return the cubin of a source."""
    return compile_source(source, ARCH, None).image


def images_of(sources: Sequence[KernelSource]) -> list[bytes]:
    """Return the cubins of several sources, compiled in as many processes as there are cores."""
    jobs = min(len(sources), len(os.sched_getaffinity(0)))
    found: list[bytes] = joblib.Parallel(n_jobs=jobs)(joblib.delayed(image_of)(s) for s in sources)
    return found
