"""Judges known programs on the GPU of this machine and writes down which text ran right.

    python -m tests.gpu.attest [--only NAME,..]

For every generation the text is the one emitted for that GPU, built for the card that is here.
Writes tests/gpu/attested.json; prints one line a program; exits 1 when any was not right.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from llm_proposer.builtin import sketches
from llm_proposer.seeds import seeds
from runs.attest import Attestation, add
from runs.record import Broken, Measured, Rejected
from space.constraints import Backend, space_for
from space.gpu import GPUS, gpu_of_device_name
from space.params import Point
from space.variant import LATENT_DIMS, DType, Phase, Problem, Shape
from tuner.devices import device_names
from tuner.job import Built, CompileJob, EvalJob
from tuner.pools import CompilePool, GpuPool

ATTESTED = Path(__file__).parent / "attested.json"
HEADS = {"mha": (8, 8), "gqa": (12, 4), "mqa": (8, 1), "mla": (8, 8)}
DIMS = {"mha": ((64, 64), (128, 128), (256, 256), (72, 72)), "gqa": ((128, 128),),
        "mqa": ((128, 128),), "mla": ((192, 128),)}  # fmt: skip
DECODE_HEADS = {"mha": (8, 8), "gqa": (28, 4), "mqa": (32, 1), "mla": (128, 1)}
#: (variant, head dims, causal, page size)
DECODE = (
    ("gqa", (128, 128), False, 0), ("gqa", (128, 128), True, 64), ("mqa", (64, 64), False, 16),
    ("mha", (96, 80), True, 0), ("mla", LATENT_DIMS, False, 0), ("mla", LATENT_DIMS, True, 64),
)  # fmt: skip
TARGETS = (
    ("h200", Backend.WGMMA), ("h200", Backend.MMA_SYNC), ("a100", Backend.MMA_SYNC),
    ("l40s", Backend.MMA_SYNC), ("t4", Backend.MMA_SYNC),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Known:
    """A program that is attested: a built-in sketch at one of its seeds."""

    name: str
    problem: Problem
    sketch: str
    point: Point
    gpu: str


def known() -> Iterator[Known]:
    """Yield the programs: variants, dims, masks and dtypes; the first seed and the second."""
    for gpu, backend in TARGETS:
        for variant, dims in DIMS.items():
            for head_dims in dims:
                for causal in (False, True):
                    for dtype in GPUS[gpu].dtypes if head_dims == (128, 128) else (DType.FP16,):
                        problem = Problem(variant, dtype, *head_dims, causal)
                        space = space_for(problem, GPUS[gpu], backend)
                        wide = head_dims == (128, 128)
                        found = seeds(problem, GPUS[gpu], space)
                        for nth, point in enumerate(found):
                            if nth >= (3 if wide else 1) and point.get("pack_heads", 1) == 1:
                                continue
                            name = f"{problem.key}-{gpu}-{backend}-seed{nth}"
                            yield Known(name, problem, "forward", point, gpu)
        for variant, head_dims, causal, page in DECODE:
            dtype = GPUS[gpu].dtypes[-1]
            problem = Problem(variant, dtype, *head_dims, causal, Phase.DECODE, page)
            found = seeds(problem, GPUS[gpu], space_for(problem, GPUS[gpu], backend))
            for nth, point in enumerate(found[:2]):
                name = f"{problem.key}-{gpu}-{backend}-seed{nth}"
                yield Known(name, problem, "decode", point, gpu)


def attest(
    program: Known, built: Built | Rejected | Broken, device: str, pool: GpuPool, day: str
) -> Attestation | str:
    """Judge one program; return its attestation, or why it was not right."""
    if not isinstance(built, Built):
        return str(built)
    p = program.problem
    if p.phase is Phase.DECODE:
        queries = 4 if p.causal else 1
        dims = (p.head_dim, p.head_dim_v, p.causal)
        shape = Shape(4, *DECODE_HEADS[p.variant], queries, 2048, *dims)
    else:
        shape = Shape(4, *HEADS[p.variant], 2048, 2048, p.head_dim, p.head_dim_v, p.causal)
    job = EvalJob(p, built.source, built.cubin.image, (shape,), 1)
    outcome = pool.submit(job).result()
    if not isinstance(outcome, Measured):
        return str(outcome)
    versions = (("nvrtc", built.cubin.nvrtc_version),)
    return Attestation(
        program.name, built.source.digest, p, program.sketch, program.point, program.gpu, device,
        outcome.error_ratio or 0.0, outcome.timings, versions, day,
    )  # fmt: skip


def main() -> int:
    """Attest every known program. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=ATTESTED)
    args = parser.parse_args()
    names = device_names()
    card = gpu_of_device_name(names[0]) if names else None
    if card is None:
        print("no CUDA device that is known")
        return 3
    pool = GpuPool([0])
    day = datetime.now(UTC).isoformat(timespec="seconds")
    only = args.only.split(",")
    chosen = [p for p in known() if any(part in p.name for part in only)]
    compiling = CompilePool()
    jobs = []
    for p in chosen:
        text = sketches(p.problem.variant, p.problem.causal, p.problem.phase)[p.sketch]
        jobs.append(compiling.submit(CompileJob(text, p.problem, p.point, p.gpu, card.arch)))
    good, bad = [], 0
    for program, job in zip(chosen, jobs, strict=True):
        found = attest(program, job.result(), names[0], pool, day)
        if isinstance(found, str):
            bad += 1
            print(f"NOT RIGHT {program.name}: {found}", flush=True)
        else:
            good.append(found)
    pool.close()
    compiling.close()
    add(args.out, good)
    print(f"attested {len(good)} programs on {names[0]}, {bad} not right")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
