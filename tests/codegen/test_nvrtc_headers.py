"""Finding the headers: wheels first, then a toolkit; what is missing is named by its package."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.errors import ToolchainMissing
from codegen.headers import find_headers

FILES = {
    "cutlass_library/source/include/cutlass/version.h": (
        "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n"
    ),
    "nvidia/cu13/include/cuda_runtime_api.h": "  #define CUDART_VERSION  13000\n",
    "nvidia/cu13/include/cccl/cuda/std/__cccl/version.h": "#define CCCL_VERSION 3000001\n",
}


def install(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_finds_the_wheels(tmp_path: Path) -> None:
    root = install(tmp_path, FILES)
    headers = find_headers([tmp_path / "empty", root], ())
    include = root / "nvidia/cu13/include"
    assert headers.folders == (
        root / "cutlass_library/source/include", include, include / "cccl",
    )  # fmt: skip
    assert headers.versions == (("cutlass", "4.2.0"), ("cudart", "13000"), ("cccl", "3000001"))


def test_takes_the_runtime_from_a_toolkit(tmp_path: Path) -> None:
    names = list(FILES)
    root = install(tmp_path / "site", {names[0]: FILES[names[0]]})
    kit = install(
        tmp_path / "cuda",
        {n.replace("nvidia/cu13/", ""): FILES[n] for n in names[1:]},
    )
    headers = find_headers([root], [kit])
    assert headers.folders[1:] == (kit / "include", kit / "include/cccl")


@pytest.mark.parametrize(
    ("absent", "package"),
    [(0, "nvidia-cutlass==4.2.0.0"), (1, "nvidia-cuda-runtime"), (2, "nvidia-cuda-cccl")],
)
def test_names_the_package_that_is_missing(tmp_path: Path, absent: int, package: str) -> None:
    names = list(FILES)
    install(tmp_path, {n: FILES[n] for n in names if n != names[absent]})
    with pytest.raises(ToolchainMissing, match=f"not found; pip install .*{package}"):
        find_headers([tmp_path], ())


def test_refuses_a_cccl_that_cutlass_does_not_parse_with(tmp_path: Path) -> None:
    newer = FILES | {list(FILES)[2]: "#define CCCL_VERSION 3002000\n"}
    install(tmp_path, newer)
    with pytest.raises(ToolchainMissing, match=r"CUTLASS 4.2.0 does not parse with .*3002000"):
        find_headers([tmp_path], ())
    first = next(iter(FILES))
    install(tmp_path, {first: FILES[first].replace("MINOR 2", "MINOR 8")})
    assert find_headers([tmp_path], ()).versions[0] == ("cutlass", "4.8.0")


def test_a_header_without_its_version_is_named(tmp_path: Path) -> None:
    install(tmp_path, FILES | {list(FILES)[1]: ""})
    with pytest.raises(ToolchainMissing, match="does not define CUDART_VERSION"):
        find_headers([tmp_path], ())
