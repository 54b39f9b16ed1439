"""Options of the whole test suite, and one thread for each process of it."""

from __future__ import annotations

import os

#: tensors here are small, and threads that wait for each other on a busy machine take fifty times
#: as long; set before torch is imported, here and in the processes that tests start
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden files under tests/golden again instead of comparing with them",
    )
