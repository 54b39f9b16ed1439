"""An exported folder with real kernels on the GPU that is present."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from codegen.cute import translate
from codegen.nvrtc import compile_source
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import sketches
from llm_proposer.seeds import seeds
from runs.export import export
from runs.record import Basis, Measured, RunSpec, Timing, TrialRecord
from runs.store import RunStore
from runs.templates.attention import Attention, NoKernelError
from space.constraints import space_for
from space.gpu import gpu_of_device_name
from space.variant import DType, Problem, Shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

FULL = Shape(2, 4, 2, 300, 457, 64, 64)
SHAPES = (FULL, dataclasses.replace(FULL, causal=True))


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Attention:
    root = tmp_path_factory.mktemp("export")
    gpu = gpu_of_device_name(torch.cuda.get_device_name())
    if gpu is None:
        pytest.skip(f"{torch.cuda.get_device_name()} is not a GPU that is known")
    spec = RunSpec("20261130T1200Z-gqa", "gqa", gpu.name, DType.FP16, SHAPES, 2, 0, Basis.MEASURED)
    with RunStore.create(root, spec) as store:
        for index, shape in enumerate(SHAPES):
            problem = Problem("gqa", DType.FP16, 64, 64, shape.causal)
            point = seeds(problem, gpu, space_for(problem, gpu))[0]
            name, text = next(iter(sketches("gqa", shape.causal).items()))
            source = translate(bind(parse(text), problem, point), problem, gpu)
            cubin = compile_source(source, gpu.arch)
            store.put_kernel(source, cubin)
            timing = Timing(shape, 1.0, 1.0, 1.0, 1, Basis.MEASURED)
            store.append(
                TrialRecord(
                    index, problem, name, point, "first", Measured((timing,), 1.0),
                    source.digest, cubin.key, cubin.resources,
                )
            )  # fmt: skip
    export(store, root / "out")
    return Attention(root / "out")


def inputs(shape: Shape = FULL, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(length: int, heads: int, columns: int) -> torch.Tensor:
        size = (shape.batch, length, heads, columns)
        return torch.randn(size, device="cuda", generator=generator).half()

    k = draw(shape.seqlen_k, shape.kv_heads, shape.head_dim)
    v = draw(shape.seqlen_k, shape.kv_heads, shape.head_dim_v)
    return draw(shape.seqlen_q, shape.heads, shape.head_dim), k, v


def reference(q, k, v, causal: bool, scale: float = 0.125) -> torch.Tensor:
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = scale * (q @ k.transpose(-1, -2))
    if causal:
        rows, keys = s.shape[-2:]
        seen = torch.ones(rows, keys, dtype=torch.bool, device=s.device).tril(keys - rows)
        s = s.masked_fill(~seen, -math.inf)
    return (s.softmax(-1).nan_to_num(0) @ v).transpose(1, 2).half()


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_is_right(attention: Attention, causal: bool) -> None:
    for seed in range(3):
        q, k, v = inputs(seed=seed)
        assert_close(attention(q, k, v, causal=causal), reference(q, k, v, causal))
        got = attention(q, k, v, causal=causal, scale=-0.3)
        assert_close(got, reference(q, k, v, causal, -0.3))


@pytest.mark.parametrize("causal", [False, True])
def test_strides_offsets_and_out(attention: Attention, causal: bool) -> None:
    q, k, v = inputs()
    want = reference(q, k, v, causal)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert_close(attention(*heads_first, causal=causal), want)
    wide = [torch.cat((t, torch.full_like(t, math.nan)), -1)[..., :64] for t in (q, k, v)]
    assert_close(attention(*wide, causal=causal), want)
    shifted = [torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape) for t in (q, k, v)]
    assert_close(attention(*shifted, causal=causal), want)
    out = torch.full((2, 4, 300, 64), math.nan, device="cuda").half().transpose(1, 2)
    assert attention(q, k, v, causal=causal, out=out) is out
    assert_close(out, want)


def test_runs_on_the_current_stream_and_in_a_graph(attention: Attention) -> None:
    q, k, v = inputs()
    out = torch.empty_like(q)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        attention(q, k, v, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention(q, k, v, out=out)
    again = inputs(seed=1)
    for old, new in zip((q, k, v), again, strict=True):
        old.copy_(new)
    out.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert_close(out, reference(q, k, v, False))


def test_untuned_shapes_are_refused_or_nearest(attention: Attention) -> None:
    shape = dataclasses.replace(FULL, batch=3, heads=6, seqlen_q=77, seqlen_k=1)
    q, k, v = inputs(shape)
    with pytest.raises(NoKernelError, match="allow_untuned=True"):
        attention(q, k, v)
    assert_close(attention(q, k, v, allow_untuned=True), reference(q, k, v, False))
    got = attention(q, k, v, causal=True, allow_untuned=True)
    assert_close(got, reference(q, k, v, True))  # all rows but the last see nothing
