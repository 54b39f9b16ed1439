"""KernelSource to Cubin through NVRTC, with a cache of what was built.

NVRTC runs in the calling process; who must survive a crash of it calls this in another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from codegen import pch
from codegen.cubin_cache import read_cubin, write_cubin
from codegen.errors import CompileError, ToolchainMissing
from codegen.headers import find_headers
from codegen.kernel import Cubin, KernelSource
from codegen.ptxas import parse_resources, serialised_wgmma

FILE_NAME = "kernel.cu"
# NVRTC's own cache answers a repeated source without the assembler's report; ours keeps it.
OPTIONS = ("--std=c++17", "-default-device", "--ptxas-options=-v", "--no-cache")


def compile_source(source: KernelSource, arch: str, cache: Path | None = None) -> Cubin:
    """Build `source` for `arch` ("sm_80", "sm_90a", ...), or take it from the cache.

    A cache that cannot be written costs time later and nothing else. Raises CompileError with
    NVRTC's log, ToolchainMissing naming the package to install.
    """
    key = cache_key(source, arch)
    if cache is not None and (known := read_cubin(cache, key)) is not None:
        return known
    started = time.perf_counter()
    image, log = _build(source, arch)
    cubin = Cubin(
        image=image,
        arch=arch,
        source_digest=source.digest,
        key=key,
        log=log,
        resources=parse_resources(log),
        compile_s=time.perf_counter() - started,
        nvrtc_version=nvrtc_version(),
    )
    if cache is not None:
        with contextlib.suppress(OSError):
            write_cubin(cache, cubin)
    return cubin


def cache_key(source: KernelSource, arch: str) -> str:
    """Return a digest of everything that changes the cubin or how it is started."""
    parts = [asdict(source), arch, OPTIONS, nvrtc_version(), find_headers().versions]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def nvrtc_version() -> str:
    """Return NVRTC's version, to the patch level where the wheel tells it."""
    nvrtc = _nvrtc()
    major, minor = _checked(nvrtc, nvrtc.nvrtcVersion(), "nvrtcVersion")
    try:
        wheel = metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        wheel = ""
    return wheel if wheel.startswith(f"{major}.{minor}.") else f"{major}.{minor}"


def supported_archs() -> tuple[str, ...]:
    """Return what this NVRTC can build for, including the `a` targets of sm_90 and later."""
    nvrtc = _nvrtc()
    numbers = _checked(nvrtc, nvrtc.nvrtcGetSupportedArchs(), "nvrtcGetSupportedArchs")
    plain = [f"sm_{n}" for n in numbers]
    return tuple(a for n, p in zip(numbers, plain, strict=True) for a in _targets(n, p))


def _targets(number: int, plain: str) -> tuple[str, ...]:
    return (plain, f"{plain}a") if number >= 90 else (plain,)


def _nvrtc() -> Any:
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError:
        raise ToolchainMissing("NVRTC bindings not found; pip install cuda-bindings") from None
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the bindings find no libnvrtc
        message = f"NVRTC not found ({error}); pip install 'nvidia-cuda-nvrtc>=13.0,<13.1'"
        raise ToolchainMissing(message) from None
    return nvrtc


def _build(source: KernelSource, arch: str) -> tuple[bytes, str]:
    """Return the image and the log. Raises CompileError."""
    if arch not in (known := supported_archs()):
        log = f"error: NVRTC {nvrtc_version()} does not build {arch}; it builds {', '.join(known)}"
        raise CompileError(log, source)
    includes = tuple(f"-I{folder}" for folder in find_headers().folders)
    options = (f"--gpu-architecture={arch}", *OPTIONS, *includes)
    image, log = b"", ""
    if extra := pch.options():
        image, log = _run(source.text, (*options, *extra))
    if not image:  # a refusal is only believed without the precompiled header
        image, log = _run(source.text, options)
    if not image:
        raise CompileError(log, source)
    if (line := serialised_wgmma(log)) is not None:
        raise CompileError(f"{line}\n{log}", source)
    pch.compiled()
    return image, log


def _run(text: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """Compile once. Returns the image, empty when NVRTC refused, and the log."""
    nvrtc = _nvrtc()
    program = _checked(
        nvrtc,
        nvrtc.nvrtcCreateProgram(text.encode(), FILE_NAME.encode(), 0, None, None),
        "nvrtcCreateProgram",
    )
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _fetched(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if int(status):
            name = nvrtc.nvrtcGetErrorString(status)[1].decode()
            return b"", log if log.strip() else name
        return _fetched(nvrtc, program, "CUBIN"), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _fetched(nvrtc: Any, program: Any, what: str) -> bytes:
    size = _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program), f"nvrtcGet{what}Size")
    buffer = bytearray(size)
    _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}")
    return bytes(buffer)


def _checked(nvrtc: Any, result: tuple[Any, ...], what: str) -> Any:
    if int(result[0]):
        text = nvrtc.nvrtcGetErrorString(result[0])[1].decode()
        raise ToolchainMissing(f"{what} failed: {text}; reinstall nvidia-cuda-nvrtc")
    values = result[1:]
    return values[0] if len(values) == 1 else values
