"""`tune doctor`: what is missing on this machine, and the command that mends it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass

from codegen.errors import ToolchainMissing
from space.gpu import gpu_of_device_name
from tuner.devices import device_names


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `remedy` is empty when nothing is wanting."""

    subject: str
    state: str
    remedy: str = ""
    #: whether the main job can run without it
    optional: bool = False


#: module -> (distribution to install, what it is for)
_MODULES = {
    "numpy": ("numpy", "interpreter"),
    "torch": ("torch==2.13.0", "judge and interpreter"),
    "optuna": ("optuna", "search"),
    "joblib": ("joblib", "compile processes"),
    "cuda.bindings": ("'cuda-bindings>=13.0,<14'", "compiler and launcher"),
}


def findings() -> tuple[Finding, ...]:
    """Look at packages, the compiler, its headers and the devices."""
    found = [_module(name, *what) for name, what in _MODULES.items()]
    found.append(_compiler())
    found.append(_devices())
    cores = os.cpu_count() or 1
    found.append(Finding("cores", f"{cores} for compiling"))
    return tuple(found)


def _module(name: str, package: str, purpose: str) -> Finding:
    try:
        present = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is absent
        present = False
    if not present:
        return Finding(name, f"missing ({purpose})", f"pip install {package}")
    distribution = package.strip("'").split("=")[0].split(">")[0]
    return Finding(name, f"{importlib.metadata.version(distribution)} ({purpose})")


def _compiler() -> Finding:
    """NVRTC and the CuTe headers, by building an empty kernel's options."""
    try:
        from codegen.headers import find_headers
        from codegen.nvrtc import nvrtc_version, supported_archs

        version, archs = nvrtc_version(), supported_archs()
        find_headers()
    except ToolchainMissing as error:
        text = str(error)
        remedy = (
            text[text.index("pip install") :] if "pip install" in text else "pip install tltune"
        )
        return Finding("compiler", text, remedy)
    except ImportError as error:
        return Finding("compiler", f"missing ({error})", "pip install 'cuda-bindings>=13.0,<14'")
    return Finding("compiler", f"NVRTC {version} and CuTe headers; builds {', '.join(archs)}")


def _devices() -> Finding:
    names = device_names()
    if not names:
        return Finding(
            "GPU",
            "none seen: kernels are compiled and ranked by the model (--measure model)",
            "install an NVIDIA driver to measure",
            optional=True,
        )
    described = []
    for name in names:
        spec = gpu_of_device_name(name)
        described.append(f"{name} (--gpu {spec.name})" if spec else f"{name} (not a known GPU)")
    return Finding("GPU", "; ".join(described))
