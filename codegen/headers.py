"""Where the CuTe, CUDA runtime and CCCL headers lie, and which versions they are."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from codegen.errors import ToolchainMissing


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One set of headers: folders it may be in, a file that proves it, and how to get it."""

    title: str
    folders: tuple[str, ...]  #: relative to an import root
    toolkit: str | None  #: relative to a CUDA toolkit
    proof: str
    version: tuple[str, ...]  #: macros of `proof` that make up the version
    package: str


_CUTLASS = _Wanted(
    "CuTe headers", ("cutlass_library/source/include",), None, "cutlass/version.h",
    ("CUTLASS_MAJOR", "CUTLASS_MINOR", "CUTLASS_PATCH"), "nvidia-cutlass==4.2.0.0",
)  # fmt: skip
_RUNTIME = _Wanted(
    "CUDA runtime headers", ("nvidia/cu13/include", "nvidia/cuda_runtime/include"), "include",
    "cuda_runtime_api.h", ("CUDART_VERSION",), "'nvidia-cuda-runtime>=13.0,<13.1'",
)  # fmt: skip
_CCCL = _Wanted(
    "CCCL headers", ("nvidia/cu13/include/cccl", "nvidia/cuda_cccl/include"), "include/cccl",
    "cuda/std/__cccl/version.h", ("CCCL_VERSION",), "'nvidia-cuda-cccl>=13.0,<13.1'",
)  # fmt: skip
_TOOLKITS = (Path("/usr/local/cuda"),)


@dataclass(frozen=True, slots=True)
class Headers:
    """Include folders, in order, and the version of each set."""

    folders: tuple[Path, ...]
    versions: tuple[tuple[str, str], ...]


def find_headers(
    roots: Iterable[Path] | None = None, toolkits: Iterable[Path] = _TOOLKITS
) -> Headers:
    """Find the headers in the installed wheels, or else in a toolkit.

    `roots` is where packages are imported from, by default `sys.path`. Raises ToolchainMissing
    naming the package to install.
    """
    if roots is None:
        return _installed_headers()
    paths, kits = tuple(roots), tuple(toolkits)
    cutlass, cutlass_version = _find(_CUTLASS, paths, ())
    runtime, runtime_version = _find(_RUNTIME, paths, kits)
    cccl, cccl_version = _find(_CCCL, paths, kits)
    if int(cccl_version) >= 3_002_000 and tuple(map(int, cutlass_version.split("."))) < (4, 8):
        raise ToolchainMissing(
            f"CUTLASS {cutlass_version} does not parse with the CCCL {cccl_version} headers in "
            f"{cccl}; pip install {_CCCL.package}"
        )
    versions = (("cutlass", cutlass_version), ("cudart", runtime_version), ("cccl", cccl_version))
    # CuTe spells some of them <cccl/cuda/...>; with wheels in two places that folder is its own
    folders = dict.fromkeys((cutlass, runtime, cccl, cccl.parent))
    return Headers(tuple(folders), versions)


@functools.cache
def _installed_headers() -> Headers:
    return find_headers([Path(p) for p in sys.path if p])


def _find(wanted: _Wanted, roots: tuple[Path, ...], kits: tuple[Path, ...]) -> tuple[Path, str]:
    candidates = [root / folder for root in roots for folder in wanted.folders]
    candidates += [kit / wanted.toolkit for kit in kits if wanted.toolkit]
    for folder in candidates:
        if (folder / wanted.proof).is_file():
            return folder, _version(folder / wanted.proof, wanted)
    raise ToolchainMissing(f"{wanted.title} not found; pip install {wanted.package}")


def _version(proof: Path, wanted: _Wanted) -> str:
    text = proof.read_text(encoding="utf-8", errors="replace")
    parts = []
    for macro in wanted.version:
        found = re.search(rf"^\s*#\s*define\s+{macro}\s+(\d+)", text, re.MULTILINE)
        if found is None:
            raise ToolchainMissing(
                f"{wanted.title}: {proof} does not define {macro}; pip install {wanted.package}"
            )
        parts.append(found[1])
    return ".".join(parts)
