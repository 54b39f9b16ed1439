"""Which GPUs are present, asked of the driver alone: no torch, no context."""

from __future__ import annotations


def device_names() -> tuple[str, ...]:
    """Return the names of the CUDA devices, in the driver's order; empty without a driver."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return ()
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError:  # no libcuda on this machine
        return ()
    if status != driver.CUresult.CUDA_SUCCESS:
        return ()
    status, count = driver.cuDeviceGetCount()
    names = []
    for index in range(count if status == driver.CUresult.CUDA_SUCCESS else 0):
        status, name = driver.cuDeviceGetName(256, index)
        if status == driver.CUresult.CUDA_SUCCESS:
            names.append(name.split(b"\0", 1)[0].decode().strip())
    return tuple(names)
