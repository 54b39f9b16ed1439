"""Launches one kernel on a few small problems and nothing else: what a sanitizer watches.

python -m tuner.evaluate.small_launch RUN|DIR KERNEL
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from space.variant import Phase, Problem
from tuner.evaluate.checks import small_shape
from tuner.evaluate.inputs import Check, make
from tuner.evaluate.subject import loaded
from tuner.subjects import subjects_of

LENGTHS = ((130, 201), (1, 77), (200, 72))  #: two tiles, one row, more queries than keys
#: queries, keys of each sequence and splits: several, one of them without a key, and one
DECODE = ((5, (201, 0, 77), 3), (2, (130,), 1))


def problems(problem: Problem) -> Iterator[Check]:
    """Yield the small problems of a kernel."""
    if problem.phase is Phase.DECODE:
        for rows, counts, splits in DECODE:
            shape = small_shape(problem, len(counts), rows, max(counts))
            yield Check("small", shape, counts=counts, page=problem.page, splits=splits)
        return
    for rows, keys in LENGTHS:
        yield Check("small", small_shape(problem, 1, rows, keys))


def main(argv: list[str]) -> int:
    """Launch the kernel that the arguments name; 1 when there is none of this name."""
    target, name = Path(argv[0]), argv[1]
    device = torch.device("cuda", 0)
    found = [s for s in subjects_of(target) if s.kernel == name]
    for subject in found:
        prepare = loaded(subject, device)
        for check in problems(subject.problem):
            inputs = make(check, subject.problem.dtype, device)
            sizes = (*inputs.q.shape[:3], inputs.v.shape[3])
            out = torch.empty(sizes, dtype=inputs.q.dtype, device=device)
            inputs.given_to(prepare, out)()
            torch.cuda.synchronize(device)
    return 0 if found else 1  # nothing launched is nothing found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
