"""A process for the kill tests: `tune` on a fake A100 whose trials take a moment."""

from __future__ import annotations

import sys
import time

from fake_machine import FakeMachine

from runs.record import Outcome
from tuner.cli import main
from tuner.lanes import Candidate


def verdict(candidate: Candidate) -> Outcome | None:
    time.sleep(0.02)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], FakeMachine(("NVIDIA A100-SXM4-80GB",), verdict).machine()))
