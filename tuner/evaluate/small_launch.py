"""Launches one kernel on a few small problems and nothing else: what a sanitizer watches.

python -m tuner.evaluate.small_launch RUN|DIR KERNEL
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tuner.evaluate.checks import small_shape
from tuner.evaluate.inputs import Check, Data, make
from tuner.evaluate.subject import loaded
from tuner.subjects import subjects_of

LENGTHS = ((130, 201), (1, 77), (200, 72))  #: two tiles, one row, more queries than keys


def main(argv: list[str]) -> int:
    """Launch the kernel that the arguments name; 1 when there is none of this name."""
    target, name = Path(argv[0]), argv[1]
    device = torch.device("cuda", 0)
    found = [s for s in subjects_of(target) if s.kernel == name]
    for subject in found:
        prepare = loaded(subject, device)
        for rows, keys in LENGTHS:
            shape = small_shape(subject.problem, 1, rows, keys)
            inputs = make(Check("small", shape, Data.NORMAL), subject.problem.dtype, device)
            sizes = (*inputs.q.shape[:3], inputs.v.shape[3])
            out = torch.empty(sizes, dtype=inputs.q.dtype, device=device)
            prepare(*inputs.tensors, out, inputs.scale)()
            torch.cuda.synchronize(device)
    return 0 if found else 1  # nothing launched is nothing found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
