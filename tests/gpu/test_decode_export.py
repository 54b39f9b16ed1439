"""An exported folder with real kernels that decode, on the GPU that is present."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from test_exported_kernels import assert_close

from codegen.cute import translate
from codegen.nvrtc import compile_source
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import sketches
from llm_proposer.seeds import seeds
from runs.export import export
from runs.record import Basis, Measured, RunSpec, Timing, TrialRecord
from runs.store import RunStore
from runs.templates.attention import Attention
from space.constraints import space_for
from space.gpu import GpuSpec, gpu_of_device_name
from space.variant import DType, Phase, Problem, Shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PAGE = 64
KEYS = 16 * PAGE
ONE = Shape(3, 16, 4, 1, KEYS, 128, 128)
FEW = dataclasses.replace(ONE, seqlen_q=4, causal=True)
LATENT = Shape(3, 16, 1, 1, KEYS, 576, 512)
COUNTS = ((KEYS, 1, 777), (0, 64, 65), (333, KEYS - 1, 2))
T = torch.Tensor


def build(root: Path, gpu: GpuSpec, shapes: tuple[Shape, ...]) -> Path:
    """Export a kernel for each shape and for caches in one piece and in pages, untimed."""
    stores = []
    for page in (0, PAGE):
        run_id = f"20261130T1200Z-decode-{page}"
        spec = RunSpec(
            run_id, "gqa", gpu.name, DType.FP16, shapes, 2, 0, Basis.MEASURED,
            phase=Phase.DECODE, page=page,
        )  # fmt: skip
        with RunStore.create(root, spec) as store:
            for index, shape in enumerate(shapes):
                store.append(_trial(store, index, shape, page, gpu))
        stores.append(RunStore.open(store.path))
    export(stores, root / "out")
    return root / "out"


def _trial(store: RunStore, index: int, shape: Shape, page: int, gpu: GpuSpec) -> TrialRecord:
    variant = "mla" if shape.latent else "gqa"
    dims = (shape.head_dim, shape.head_dim_v)
    problem = Problem(variant, DType.FP16, *dims, shape.causal, Phase.DECODE, page)
    paged = dataclasses.replace(problem, page=PAGE)  # whose points are legal without pages too
    point = seeds(paged, gpu, space_for(paged, gpu))[0]
    ((name, text),) = sketches(variant, shape.causal, Phase.DECODE).items()
    source = translate(bind(parse(text), problem, point), problem, gpu)
    cubin = compile_source(source, gpu.arch)
    store.put_kernel(source, cubin)
    timing = Timing(shape, 1.0, 1.0, 1.0, 1, Basis.MEASURED)
    return TrialRecord(
        index, problem, name, point, "first", Measured((timing,), 1.0), source.digest, cubin.key,
        cubin.resources,
    )  # fmt: skip


@pytest.fixture(scope="module")
def gpu() -> GpuSpec:
    found = gpu_of_device_name(torch.cuda.get_device_name())
    if found is None:
        pytest.skip(f"{torch.cuda.get_device_name()} is not a GPU that is known")
    return found


@pytest.fixture(scope="module")
def folder(gpu: GpuSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("decode"), gpu, (ONE, FEW))


@pytest.fixture
def attention(folder: Path) -> Attention:
    return Attention(folder)


def inputs(shape: Shape, seed: int = 0) -> tuple[T, T, T]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(length: int, heads: int, columns: int) -> T:
        size = (shape.batch, length, heads, columns)
        return torch.randn(size, device="cuda", generator=generator).half()

    k = draw(shape.seqlen_k, shape.kv_heads, shape.head_dim)
    v = k[..., :512] if shape.latent else draw(shape.seqlen_k, shape.kv_heads, shape.head_dim_v)
    return draw(shape.seqlen_q, shape.heads, shape.head_dim), k, v


def paged(*caches: T, spare: int = 5) -> tuple[T, ...]:
    """The caches cut into pages that lie in disorder among NaN, and the table that finds them."""
    batch, keys = caches[0].shape[:2]
    columns = keys // PAGE
    numbers = torch.randperm(batch * columns + spare, device="cuda")
    table = numbers[: batch * columns].reshape(batch, columns)
    found = []
    for t in caches:
        pages = t.new_full((len(numbers), PAGE, *t.shape[2:]), math.nan)
        pages[table.flatten()] = t.reshape(-1, PAGE, *t.shape[2:])
        found.append(pages)
    return (*found, table.int())


def reference(q: T, k: T, v: T, causal: bool, counts: tuple[int, ...]) -> T:
    """Attention in float64, sequence by sequence; a query that sees no key gives zeros."""
    group = q.shape[2] // k.shape[2]
    scale = (192 if q.shape[3] == 576 else q.shape[3]) ** -0.5
    parts = []
    for b, n in enumerate(counts):
        rows, keys, values = (t[b].double().transpose(0, 1) for t in (q, k[:, :n], v[:, :n]))
        keys, values = (t.repeat_interleave(group, 0) for t in (keys, values))
        s = scale * (rows @ keys.transpose(-1, -2))
        if causal:
            seen = torch.ones(s.shape[1:], dtype=torch.bool, device=s.device).tril(n - s.shape[1])
            s = s.masked_fill(~seen, -math.inf)
        parts.append((s.softmax(-1).nan_to_num(0) @ values).transpose(0, 1))
    return torch.stack(parts).half()


def lengths_of(counts: tuple[int, ...]) -> T:
    return torch.tensor(counts, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("shape", [ONE, FEW], ids=lambda s: s.key)
def test_is_right(attention: Attention, shape: Shape) -> None:
    q, k, v = inputs(shape)
    whole = (KEYS,) * shape.batch
    assert_close(attention(q, k, v, causal=shape.causal), reference(q, k, v, shape.causal, whole))
    for counts in COUNTS:
        got = attention(q, k, v, causal=shape.causal, seqlens_k=lengths_of(counts), validate=True)
        assert_close(got, reference(q, k, v, shape.causal, counts))


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "keys"),
    [(1, 28, 4, 1, 5000), (40, 8, 8, 1, 130), (2, 71, 1, 8, 999), (1, 32, 8, 3, 20000)],
)
def test_shapes_between_are_served(
    attention: Attention, batch: int, heads: int, kv_heads: int, queries: int, keys: int
) -> None:
    shape = Shape(batch, heads, kv_heads, queries, keys, 128, 128, queries > 1)
    q, k, v = inputs(shape)
    got = attention(q, k, v, causal=shape.causal)
    assert_close(got, reference(q, k, v, shape.causal, (keys,) * batch))


@pytest.mark.parametrize("shape", [ONE, FEW], ids=lambda s: s.key)
def test_a_paged_cache_gives_the_same_bits(attention: Attention, shape: Shape) -> None:
    q, k, v = inputs(shape)
    k_pages, v_pages, table = paged(k, v)
    for counts in COUNTS:
        seqlens_k = lengths_of(counts)
        whole = attention(q, k, v, causal=shape.causal, seqlens_k=seqlens_k)
        got = attention(
            q, k_pages, v_pages, causal=shape.causal, seqlens_k=seqlens_k, block_table=table,
            validate=True,
        )  # fmt: skip
        assert torch.equal(whole, got), counts


@pytest.mark.parametrize("in_pages", [False, True])
def test_a_graph_reads_lengths_and_table_anew(attention: Attention, in_pages: bool) -> None:
    q, k, v = inputs(FEW)
    seqlens_k = lengths_of(COUNTS[0])
    out = torch.empty_like(q)
    arguments = {"causal": True, "seqlens_k": seqlens_k}
    if in_pages:
        k, v, arguments["block_table"] = paged(k, v)
    space = q.new_empty(attention.workspace_bytes(q, k, v, **arguments), dtype=torch.uint8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # no call before: workspace_bytes loaded the kernel
        attention(q, k, v, out=out, workspace=space, **arguments)
    for seed, counts in enumerate(COUNTS[1:], 1):
        queries, keys, values = inputs(FEW, seed)
        q.copy_(queries)
        seqlens_k.copy_(lengths_of(counts))
        if in_pages:
            k_pages, v_pages, table = paged(keys, values)
            k.copy_(k_pages)
            v.copy_(v_pages)
            arguments["block_table"].copy_(table)
        else:
            k.copy_(keys)
            v.copy_(values)
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_close(out, reference(queries, keys, values, True, counts))
        again = out.clone()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, again)


def test_a_call_with_workspace_and_out_takes_no_memory(attention: Attention) -> None:
    q, k, v = inputs(ONE)
    seqlens_k, out = lengths_of(COUNTS[0]), torch.empty_like(q)
    wanted = attention.workspace_bytes(q, k, v, seqlens_k=seqlens_k)
    space = q.new_empty(wanted, dtype=torch.uint8)
    attention(q, k, v, seqlens_k=seqlens_k, out=out, workspace=space)  # packs the launch

    def taken() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    before = taken()
    for _ in range(10):
        attention(q, k, v, seqlens_k=seqlens_k, out=out, workspace=space)
    assert taken() == before
    attention(q, k, v, seqlens_k=seqlens_k, out=out)
    assert wanted > 0 and taken() == before + 1  # the count does see a workspace
    assert_close(out, reference(q, k, v, False, COUNTS[0]))


def test_the_same_call_gives_the_same_bits(attention: Attention) -> None:
    q, k, v = inputs(FEW)
    first = attention(q, k, v, causal=True)
    assert all(torch.equal(attention(q, k, v, causal=True), first) for _ in range(50))


def test_absorbed_mla_reads_v_from_k(gpu: GpuSpec, tmp_path: Path) -> None:
    if gpu.sm < 80:
        pytest.skip(f"absorbed MLA does not fit an sm_{gpu.sm}")
    attention = Attention(build(tmp_path, gpu, (LATENT,)))
    q, k, v = inputs(LATENT)
    k_pages, table = paged(k)
    for counts in COUNTS:
        seqlens_k = lengths_of(counts)
        got = attention(q, k, v, seqlens_k=seqlens_k)
        assert_close(got, reference(q, k, v, False, counts))
        in_pages = attention(q, k_pages, k_pages[..., :512], seqlens_k=seqlens_k, block_table=table)
        assert torch.equal(got, in_pages)
    with pytest.raises(ValueError, match="pass v = k"):
        attention(q, k, v.contiguous())
