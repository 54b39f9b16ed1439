"""What the judged kernels share: the GPU, and a worker on it for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpu_here import GPU

from space.gpu import GpuSpec
from tuner.pools import GpuPool


@pytest.fixture(scope="module")
def pool() -> Iterator[GpuPool]:
    pool = GpuPool([0])
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def gpu() -> GpuSpec:
    assert GPU is not None
    return GPU
