"""Which kernel of an exported folder answers a call, and which calls none does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from exported import FULL, make_run
from fake_cuda import HostCuda, assert_close, inputs, reference

from runs.export import export
from runs.templates.attention import Attention, NoKernelError
from runs.templates.manifest import ManifestError


def test_a_shape_that_was_not_checked_is_refused(attention: Attention) -> None:
    q, k, v = inputs(dataclasses.replace(FULL, seqlen_q=66, seqlen_k=70))
    with pytest.raises(NoKernelError) as caught:
        attention(q, k, v)
    assert str(caught.value) == (
        "no kernel here was checked on B=2 Hq=4 Hkv=2 Sq=66 Sk=70 D=16 Dv=16 full fp16 on h200; "
        "the nearest is B=2 Hq=4 Hkv=2 Sq=65 Sk=65 D=16 Dv=16 full fp16 on h200. "
        "Pass allow_untuned=True to run that one, or tune and export this shape"
    )


@pytest.mark.parametrize("causal", [False, True])
def test_allow_untuned_runs_the_nearest(attention: Attention, causal: bool) -> None:
    shape = dataclasses.replace(FULL, batch=3, heads=6, seqlen_q=40, seqlen_k=77)
    q, k, v = inputs(shape)
    got = attention(q, k, v, causal=causal, allow_untuned=True)
    assert_close(got, reference(q, k, v, causal, 0.25))


def test_what_is_compiled_in_is_never_substituted(attention: Attention) -> None:
    q, k, v = inputs(dataclasses.replace(FULL, head_dim=32))
    message = "compiled in are D=16 Dv=16 causal fp16; D=16 Dv=16 full fp16"
    with pytest.raises(NoKernelError, match=message):
        attention(q, k, v, allow_untuned=True)
    bf16 = [t.bfloat16() for t in inputs(FULL)]
    with pytest.raises(NoKernelError, match="full bf16 on h200; compiled in are"):
        attention(*bf16, allow_untuned=True)


def test_another_gpu_that_cannot_load_the_code_is_named(folder: Path) -> None:
    attention = Attention(folder, HostCuda("NVIDIA L40S", (8, 9)))
    for allowed in (False, True):
        with pytest.raises(NoKernelError, match=r"built for H200 \(sm_90a\), and this device is"):
            attention(*inputs(FULL), allow_untuned=allowed)


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"])
def test_another_gpu_of_the_same_architecture_is_not_checked(folder: Path, name: str) -> None:
    attention = Attention(folder, HostCuda(name))
    q, k, v = inputs(FULL)
    with pytest.raises(NoKernelError, match=f"on {name}; the nearest is .* on h200"):
        attention(q, k, v)
    assert_close(attention(q, k, v, allow_untuned=True), reference(q, k, v, False, 0.25))


def test_code_without_a_suffix_runs_on_later_minors(tmp_path: Path) -> None:
    export(make_run(tmp_path / "runs", gpu="a100", arch="sm_80"), tmp_path / "out")
    q, k, v = inputs(FULL)
    later = Attention(tmp_path / "out", HostCuda("NVIDIA L40S", (8, 9)))
    assert_close(later(q, k, v, allow_untuned=True), reference(q, k, v, False, 0.25))
    earlier = Attention(tmp_path / "out", HostCuda("Tesla T4", (7, 5)))
    with pytest.raises(NoKernelError, match="this device is sm_75"):
        earlier(q, k, v, allow_untuned=True)


def test_a_damaged_cubin_is_refused(tmp_path: Path) -> None:
    export(make_run(tmp_path / "runs"), tmp_path / "out")
    for cubin in (tmp_path / "out/kernels").glob("*.cubin"):
        cubin.write_bytes(cubin.read_bytes() + b"\0")
    with pytest.raises(ManifestError, match="is damaged: its digest differs"):
        Attention(tmp_path / "out", HostCuda())(*inputs(FULL))
