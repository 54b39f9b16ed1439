"""The exported `attention` on a device of host memory: results, and refusals before launch."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from exported import CAUSAL, FULL, LONG, make_run, sealed
from fake_cuda import HostCuda, assert_close, inputs, reference

from runs.export import export
from runs.templates import checks
from runs.templates.attention import Attention
from runs.templates.launch import LaunchError
from space.variant import Shape


@pytest.mark.parametrize("shape", [FULL, LONG, CAUSAL], ids=lambda s: s.key)
def test_computes_attention(attention: Attention, cuda: HostCuda, shape: Shape) -> None:
    for seed in range(3):  # the later calls take the packed launch
        q, k, v = inputs(shape, seed)
        got = attention(q, k, v, causal=shape.causal)
        assert_close(got, reference(q, k, v, shape.causal, 0.25))
    assert (cuda.driver.launches, len(cuda.driver.images)) == (3, 1)


@pytest.mark.parametrize("scale", [0.1, -0.7, 0, 2])
def test_takes_a_scale(attention: Attention, scale: float) -> None:
    q, k, v = inputs(FULL)
    assert_close(attention(q, k, v, scale=scale), reference(q, k, v, False, scale))


def _transposed(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _padded(t: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*t.shape[:3], 24), math.nan, dtype=t.dtype)
    wide[..., :16] = t
    return wide[..., :16]


def _inner_stride_two(t: torch.Tensor) -> torch.Tensor:
    return t.repeat_interleave(2, -1)[..., ::2]


def _misaligned(t: torch.Tensor) -> torch.Tensor:
    flat = torch.full((t.numel() + 1,), math.nan, dtype=t.dtype)
    flat[1:] = t.flatten()
    return flat[1:].view(t.shape)


def _odd_rows(t: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*t.shape[:3], 17), math.nan, dtype=t.dtype)
    wide[..., :16] = t
    return wide[..., :16]


def _broadcast(t: torch.Tensor) -> torch.Tensor:
    return t[:, :1].expand(t.shape)


LAYOUTS = (_transposed, _padded, _inner_stride_two, _misaligned, _odd_rows, _broadcast)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_takes_any_strides(attention: Attention, layout) -> None:
    for seed in range(2):
        q, k, v = (layout(t) for t in inputs(CAUSAL, seed))
        copies = [t.clone() for t in (q, k, v)]
        assert_close(attention(q, k, v, causal=True), reference(q, k, v, True, 0.25))
        assert all(torch.equal(a, b) for a, b in zip((q, k, v), copies, strict=True))


def test_a_packed_launch_is_not_used_for_a_misaligned_address(attention: Attention) -> None:
    q, k, v = inputs(FULL)
    want = attention(q, k, v)
    assert torch.equal(attention(_misaligned(q), k, _misaligned(v)), want)


def _dense(t: torch.Tensor) -> torch.Tensor:
    return t


@pytest.mark.parametrize("layout", [_dense, *LAYOUTS[:-1]])
def test_writes_into_out(attention: Attention, layout) -> None:
    q, k, v = inputs(FULL)
    for _ in range(2):
        out = layout(torch.full(q.shape, math.nan, dtype=q.dtype))
        strides, address = out.stride(), out.data_ptr()
        assert attention(q, k, v, out=out) is out
        assert (out.stride(), out.data_ptr()) == (strides, address)
        assert_close(out, reference(q, k, v, False, 0.25))


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"batch": 0}, "empty"),
        ({"seqlen_q": 0}, "empty"),
        ({"heads": 0}, "empty"),
        ({"seqlen_k": 0}, "zeros"),
        ({"head_dim_v": 0}, "empty"),
    ],
)
def test_answers_empty_calls_without_a_launch(
    attention: Attention, cuda: HostCuda, changes: dict, answer: str
) -> None:
    shape = dataclasses.replace(FULL, **changes)
    q, k, v = inputs(shape)
    for out in (None, torch.full((*q.shape[:3], shape.head_dim_v), math.nan).half()):
        got = attention(q, k, v, causal=True, out=out)
        assert got.shape == (shape.batch, shape.seqlen_q, shape.heads, shape.head_dim_v)
        assert not got.any() and bool(got.numel()) == (answer == "zeros")
    assert cuda.driver.launches == 0


def changed(index: int, make) -> list[torch.Tensor]:
    tensors = list(inputs(FULL))
    tensors[index] = make(tensors[index])
    return tensors


@pytest.mark.parametrize(
    ("index", "make", "message"),
    [
        (0, lambda t: t[0], "q has 3 axes, not the 4"),
        (0, lambda t: t.tolist(), "q is a list, not a tensor"),
        (1, lambda t: None, "k is a NoneType, not a tensor"),
        (0, lambda t: t.float(), "q is torch.float32; float16 and bfloat16 are taken"),
        (2, lambda t: t.bfloat16(), "q is torch.float16 and v is torch.bfloat16"),
        (1, lambda t: t.to("meta"), "q is on cpu and k is on meta"),
        (1, lambda t: t[:1], "q has batch 2 and k has batch 1"),
        (2, lambda t: t[:, :9], "k has 65 rows and v has 9"),
        (2, lambda t: t[:, :, :1], "k has 2 heads and v has 1"),
        (0, lambda t: t[..., :8], "q has head dim 8 and k has 16"),
        (0, lambda t: t[:, :, :3], "q has 3 heads, which is not a multiple of the 2 of k"),
    ],
)
def test_arguments_that_do_not_agree_are_named(
    attention: Attention, cuda: HostCuda, index: int, make, message: str
) -> None:
    q, k, v = changed(index, make)
    with pytest.raises(ValueError, match=message):
        attention(q, k, v)
    assert cuda.driver.launches == 0


def test_zero_kv_heads_are_refused_with_both_numbers(attention: Attention) -> None:
    q, k, v = inputs(FULL)
    with pytest.raises(ValueError, match="q has 4 heads and k has 0"):
        attention(q, k[:, :, :0], v[:, :, :0])


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(2, 65, 4, 8).half(), r"out is \[2, 65, 4, 8\]; the result is \[2, 65, 4, 16"),
        (torch.zeros(2, 65, 4, 16), "out is torch.float32 and q is torch.float16"),
        (torch.zeros(2, 65, 4, 16, dtype=torch.half, device="meta"), "out is on meta and q is on"),
        (torch.zeros(2, 1, 4, 16).half().expand(2, 65, 4, 16), "out has stride 0"),
        (
            torch.zeros(9000).half().as_strided((2, 65, 4, 16), (4160, 32, 16, 1)),
            "elements of out may lie on one another",
        ),
        ([], "out is a list"),
    ],
)
def test_an_out_that_cannot_take_the_result_is_refused(
    attention: Attention, out: torch.Tensor, message: str
) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            attention(*inputs(FULL), out=out)
        attention(*inputs(FULL))


@pytest.mark.parametrize("scale", [math.nan, math.inf, torch.tensor(1.0), 1e39, 10**400, "1"])
def test_a_scale_that_is_no_finite_number_is_refused(attention: Attention, scale) -> None:
    with pytest.raises(ValueError, match=r"scale is .*; a finite number is wanted"):
        attention(*inputs(FULL), scale=scale)


def test_what_torch_negates_when_it_is_read_is_negated(attention: Attention) -> None:
    q, k, v = inputs(FULL)
    want = attention(q, k, v)
    assert_close(attention(q, k, torch._neg_view(v)), -want)
    assert_close(attention(torch._neg_view(q), torch._neg_view(k), v), want)
    out = torch._neg_view(torch.zeros_like(want))
    assert_close(attention(q, k, v, out=out), want)


def test_unknown_arguments_are_errors(attention: Attention) -> None:
    with pytest.raises(TypeError):
        attention(*inputs(FULL), mask=None)
    with pytest.raises(ValueError, match="causal is 1"):
        attention(*inputs(FULL), causal=1)


def test_a_missing_backward_pass_is_said(attention: Attention) -> None:
    q, k, v = inputs(FULL)
    attention(q, k, v)
    q.requires_grad_()
    with pytest.raises(ValueError, match="no backward pass"):
        attention(q, k, v)
    with torch.no_grad():
        attention(q, k, v)


def test_a_kernel_is_loaded_before_a_capture_not_in_it(
    attention: Attention, cuda: HostCuda
) -> None:
    cuda.capturing = True
    with pytest.raises(LaunchError, match="before capturing a CUDA graph"):
        attention(*inputs(FULL))
    cuda.capturing = False
    attention(*inputs(FULL))
    cuda.capturing = True
    attention(*inputs(FULL))
    assert cuda.driver.launches == 2


def test_launches_on_the_tensors_device(attention: Attention, cuda: HostCuda) -> None:
    attention(*inputs(FULL))
    assert cuda.used == [0]  # to load the code
    cuda.now = 3
    attention(*inputs(FULL))
    assert cuda.used == [0, 0]  # to launch


def test_each_stream_and_each_graph_has_its_own_ticket(tmp_path: Path) -> None:
    export(make_run(tmp_path / "runs"), tmp_path / "out")
    path = tmp_path / "out/manifest.json"
    manifest = json.loads(path.read_text())
    for entry in manifest["kernels"].values():
        entry["launches"][0]["args"].append({"kind": "tickets", "name": "t", "box": [0, 0]})
    path.write_text(json.dumps(sealed(manifest)))
    cuda = HostCuda()
    cuda.driver.takes_tickets = True
    attention = Attention(tmp_path / "out", cuda)
    q, k, v = inputs(FULL)
    for cuda.current_stream, cuda.capturing in ((0, False), (0, False), (7, False), (0, True)):
        assert_close(attention(q, k, v), reference(q, k, v, False, 0.25))
    first, again, other, _ = cuda.driver.tickets
    assert first == again != other
    cuda.capturing = False
    attention(q, k, v)
    assert cuda.driver.tickets[-1] == first != cuda.driver.tickets[3]


def test_tma_kernels_get_a_copy_of_a_broadcast_tensor() -> None:
    t = torch.zeros(2, 1, 4, 16).half().expand(2, 9, 4, 16)
    assert checks.readable(t) is t
    copied = checks.readable(t, broadcast=False)
    assert copied.stride() == (576, 64, 16, 1) and torch.equal(copied, t)
    one = torch.zeros(16).half().expand(1, 1, 1, 16)
    assert checks.readable(one, broadcast=False) is one


def test_threads_share_a_packed_launch(attention: Attention) -> None:
    cases = [inputs(FULL, seed) for seed in range(4)]
    wrong: list[int] = []

    def work(seed: int) -> None:
        q, k, v = cases[seed]
        want = reference(q, k, v, False, 0.25)
        for _ in range(20):
            if not torch.allclose(attention(q, k, v), want, atol=2e-3):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


IMPORT = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location(
    "exported_kernels", "__init__.py", submodule_search_locations=["."])
ours = importlib.util.module_from_spec(spec)
sys.modules["exported_kernels"] = ours
spec.loader.exec_module(ours)
assert len(ours.shapes()) == 3
q = torch.zeros(2, 65, 4, 16).half()
try:
    ours.attention(q, q, q)
except ValueError as error:
    print(error)
names = ("space", "codegen", "runs", "tuner", "llm_proposer", "triton")
print([n for n in names if n in sys.modules])
"""


def test_a_folder_runs_without_this_project(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", IMPORT], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stdout == "q is on cpu; these kernels run on CUDA devices\n[]\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_refuses_host_tensors_and_foreign_code_on_a_real_device(folder: Path) -> None:
    attention = Attention(folder)
    with pytest.raises(ValueError, match="these kernels run on CUDA devices"):
        attention(*inputs(FULL))
    if torch.cuda.get_device_capability() == (9, 0) and "H200" in torch.cuda.get_device_name():
        with pytest.raises(LaunchError, match="load cubin"):
            attention(*(t.cuda() for t in inputs(FULL)))
