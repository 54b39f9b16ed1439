"""The GPU that is present, if it is a known one, and the marks of tests that need it."""

from __future__ import annotations

import pytest

from space.gpu import gpu_of_device_name
from tuner.devices import device_names

DEVICES = device_names()
GPU = gpu_of_device_name(DEVICES[0]) if DEVICES else None
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPU is None, reason="no CUDA device that is known"),
]
