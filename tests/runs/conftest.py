"""A folder of kernels that are not for decode, and its `attention` on a device of host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from exported import make_run
from fake_cuda import HostCuda

from runs.export import export
from runs.templates.attention import Attention


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export")
    export(make_run(root / "runs"), root / "out")
    return root / "out"


@pytest.fixture
def cuda() -> HostCuda:
    return HostCuda()


@pytest.fixture
def attention(folder: Path, cuda: HostCuda) -> Attention:
    return Attention(folder, cuda)
