"""The GPUs and how a device is recognised."""

from __future__ import annotations

import pytest

from space.gpu import GPUS, check_dtype, gpu_named, gpu_of_device_name
from space.variant import DType, SpaceError


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("Quadro RTX 8000", "rtx8000"),
    ],
)
def test_a_device_is_recognised_by_its_name(device: str, name: str) -> None:
    gpu = gpu_of_device_name(device)
    assert gpu is not None and gpu.name == name


@pytest.mark.parametrize(
    "device", ["", "NVIDIA GH200 480GB", "NVIDIA L40", "NVIDIA A10", "Tesla T40", "NVIDIA B200"]
)
def test_a_device_of_another_model_is_not(device: str) -> None:
    assert gpu_of_device_name(device) is None


def test_names_are_taken_in_any_case_and_unknown_ones_listed() -> None:
    assert gpu_named("L40S") is GPUS["l40s"]
    with pytest.raises(SpaceError, match="unknown GPU 'b200'; known GPUs: t4, rtx8000, a100"):
        gpu_named("b200")


def test_bf16_on_turing_is_refused_with_the_remedy() -> None:
    with pytest.raises(SpaceError, match=r"t4 .sm_75. has no bf16 tensor cores; use --dtype fp16"):
        check_dtype(GPUS["t4"], DType.BF16)
    check_dtype(GPUS["t4"], DType.FP16)
    for gpu in GPUS.values():
        if gpu.sm >= 80:
            check_dtype(gpu, DType.BF16)


def test_targets_and_limits() -> None:
    arch = {g.name: g.arch for g in GPUS.values()}
    assert arch == {
        "t4": "sm_75", "rtx8000": "sm_75", "a100": "sm_80", "l40s": "sm_89", "h100": "sm_90a",
        "h200": "sm_90a",
    }  # fmt: skip
    kib = {g.name: g.smem_per_block_bytes // 1024 for g in GPUS.values()}
    assert kib == {"t4": 64, "rtx8000": 64, "a100": 163, "l40s": 99, "h100": 227, "h200": 227}
    for g in GPUS.values():
        assert g.has_cp_async == (g.sm >= 80)
        assert g.smem_per_block_bytes + g.smem_reserved_bytes <= g.smem_per_sm_bytes
