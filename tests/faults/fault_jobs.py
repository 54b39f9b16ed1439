"""Jobs and builds that last, hog or fall, and a canary for a worker without a GPU."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
import unittest.mock
from dataclasses import dataclass, replace

import numpy as np
from builders import SOURCE

from codegen.kernel import Cubin, KernelSource, Launch
from runs.record import Broken, Rejected, Stage, TrialClass
from space.params import Point
from tuner.job import Built, CompileJob


@dataclass(frozen=True)
class Trial:
    """Takes `seconds` and gives its number back."""

    number: int
    seconds: float = 0.0
    limit_s: float = 20.0

    def run(self, bench: object) -> Rejected:
        """Judge."""
        time.sleep(self.seconds)
        return Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, f"trial {self.number}")


@dataclass(frozen=True)
class Canary:
    """A known-good job that needs no GPU."""

    limit_s: float = 20.0

    def run(self, bench: object) -> bool:
        """Sing."""
        return True


@dataclass(frozen=True)
class DeadCanary:
    """The machine is gone."""

    limit_s: float = 20.0

    def run(self, bench: object) -> bool:
        """Fall."""
        os.abort()


def faulty(job: CompileJob) -> Built | Rejected | Broken:
    """Do in a compile process what the sketch's text says."""
    match job.sketch_text.split():
        case ["abort"]:
            os.abort()
        case ["segfault"]:
            ctypes.string_at(0)
        case ["exit"]:
            os._exit(7)
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["hang"]:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
            time.sleep(600)
        case ["spin"]:
            while True:
                pass
        case ["cpu-limit"]:
            os.kill(os.getpid(), signal.SIGXCPU)
            time.sleep(600)
        case ["memory"]:
            held = []
            while True:
                held.append(np.empty(1 << 30, np.uint8))  # asked for, never touched
        case ["malloc"]:
            if not ctypes.CDLL(None).malloc(ctypes.c_size_t(64 << 30)):
                os.abort()  # what a compiler does when memory is refused
        case ["compiler-memory"]:
            return _bomb(job)
    cubin = Cubin(b"", job.arch, SOURCE.digest, str(os.getpid()), "", (), 0.0, "13.0")
    return Built(SOURCE, cubin)


#: a text whose preprocessed form has 8^12 statements
BOMB = """
#define A(x) x x x x x x x x
#define B(x) A(A(A(A(x))))
extern "C" __global__ void forward(int* p) { B(B(B(*p += 1;))) }
"""


def _bomb(job: CompileJob) -> Built | Rejected | Broken:
    """Let the real build meet a source that no memory is enough for, with little of it."""
    from llm_proposer.builtin import sketches
    from tuner import build

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, hard))
    text = next(iter(sketches("mha", False).values()))
    source = KernelSource(BOMB, "sm_90a", (Launch("forward", 32, 0, (), ()),), ())
    with unittest.mock.patch.object(build.cute, "translate", lambda *_: source):
        return build.build(replace(job, sketch_text=text, point=Point.of({"BM": 64, "BN": 64})))
