"""Resource limits of the processes that build or run what others wrote."""

from __future__ import annotations

import faulthandler
import math
import os
import resource
import signal
import threading
import time

#: Address space of a compile process. A build takes under 1 GiB; torch is not loaded there.
COMPILE_MEMORY_BYTES = 8 << 30


def no_core_dump() -> None:
    """Leave no core file when this process crashes: they are large, and crashes are expected."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def die_with_parent() -> None:
    """Let this process end within a second or so of its parent, whatever it is in the middle of."""
    threading.Thread(target=_outlive_not, args=(os.getppid(),), daemon=True).start()


def _outlive_not(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def confine_compile_process() -> None:
    """Limit this process's memory for good; past it allocations fail, and with them the build."""
    die_with_parent()
    no_core_dump()
    faulthandler.disable()  # a crash is told in the trial's line, not over it
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = COMPILE_MEMORY_BYTES
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def allow_cpu(seconds: float) -> None:
    """Let this process compute for so long from now on; then SIGXCPU ends it.

    The parent's own clock comes first as long as there is a parent.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (most, hard))
