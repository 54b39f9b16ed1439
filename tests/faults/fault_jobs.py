"""Jobs and builds that last, hog or fall, and a canary for a worker without a GPU."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from dataclasses import dataclass

import numpy as np
from builders import SOURCE

from codegen.kernel import Cubin
from runs.record import Broken, Rejected, Stage, TrialClass
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
    cubin = Cubin(b"", job.arch, SOURCE.digest, str(os.getpid()), "", (), 0.0, "13.0")
    return Built(SOURCE, cubin)
