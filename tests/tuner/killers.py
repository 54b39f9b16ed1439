"""Jobs that misbehave. Run in a worker without a GPU."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass

from runs.record import Rejected, Stage, TrialClass


class Unpicklable(Exception):
    """Holds something that no pickle takes."""

    def __init__(self) -> None:
        super().__init__("holds a lambda")
        self.trap = lambda: None

    def __reduce__(self) -> str:
        raise TypeError("not me")


@dataclass(frozen=True)
class Killer:
    """`how` names what the job does to its worker."""

    how: str
    limit_s: float = 20.0

    def run(self, bench: object) -> object:
        """Misbehave."""
        match self.how:
            case "sleep":
                time.sleep(60)
            case "abort":
                os.abort()
            case "exit":
                sys.exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "raise":
                raise ValueError("a plain fault")
            case "unpicklable":
                raise Unpicklable
            case "lambda":
                return lambda: None
            case "foreign":
                return Killer("x")
            case "closed":
                os.closerange(3, 64)
            case "garbage":
                _scribble()
            case "print":
                print("words on stdout")
                sys.stdout.flush()
        return Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, f"{os.getpid()} is well")


def _scribble() -> None:
    """Write bytes that are no pickle where the answer goes."""
    from multiprocessing.connection import Connection

    fd = int(sys.argv[1])
    pipe: Connection[object, object] = Connection(fd)
    pipe.send_bytes(b"\x00\xff no pickle at all")
    time.sleep(60)


@dataclass(frozen=True)
class Sum:
    """A job that works."""

    a: int
    b: int
    limit_s: float = 20.0

    def run(self, bench: object) -> int:
        """Add."""
        return self.a + self.b
