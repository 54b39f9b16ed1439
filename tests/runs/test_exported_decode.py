"""The exported `attention` that decodes, on a device of host memory: results and refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from decode_runs import DIMS, FEW, LATENT, ONE, exported, make_decode_run
from exported import sealed
from fake_cuda import assert_close, reference
from fake_decode import PAGE, DecodeCuda

from runs.errors import ExportError
from runs.export import export
from runs.templates.attention import Attention, NoKernelError
from runs.templates.launch import LaunchError
from space.variant import Shape


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("decode"), (ONE, FEW), (0, PAGE))


@pytest.fixture
def cuda() -> DecodeCuda:
    return DecodeCuda()


@pytest.fixture
def attention(folder: Path, cuda: DecodeCuda) -> Attention:
    return Attention(folder, cuda)


def inputs(shape: Shape, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, heads: int, columns: int) -> torch.Tensor:
        return torch.randn(shape.batch, rows, heads, columns, generator=generator).half()

    k = draw(shape.seqlen_k, shape.kv_heads, shape.head_dim)
    v = k[..., :512] if shape.latent else draw(shape.seqlen_k, shape.kv_heads, shape.head_dim_v)
    return draw(shape.seqlen_q, shape.heads, shape.head_dim), k, v


def expected(q, k, v, causal: bool, counts: list[int] | None = None) -> torch.Tensor:
    """Sequence by sequence, each with its own number of keys."""
    scale = (192 if q.shape[3] == 576 else q.shape[3]) ** -0.5
    parts = [
        reference(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], causal, scale)
        for b, n in enumerate(counts or [k.shape[1]] * len(q))
    ]
    return torch.cat(parts)


def paged(*caches: torch.Tensor, spare: int = 2) -> tuple[torch.Tensor, ...]:
    """The caches cut into pages that lie in disorder, and the table that finds them."""
    batch, keys = caches[0].shape[:2]
    columns = -(-keys // PAGE)
    numbers = torch.randperm(batch * columns + spare, generator=torch.Generator().manual_seed(3))
    table = numbers[: batch * columns].int().reshape(batch, columns)
    found = []
    for t in caches:
        whole = torch.zeros(batch, columns * PAGE, *t.shape[2:], dtype=t.dtype)
        whole[:, :keys] = t
        pages = torch.full((len(numbers), PAGE, *t.shape[2:]), float("nan"), dtype=t.dtype)
        pages[table.flatten().long()] = whole.reshape(-1, PAGE, *t.shape[2:])
        found.append(pages)
    return (*found, table)


def test_a_folder_says_what_decodes_and_how(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["version"] == 2
    kinds = [(s["phase"], s["page"], s["causal"], s["splits"]) for s in manifest["shapes"]]
    assert kinds == [("decode", page, causal, 5) for page in (0, PAGE) for causal in (False, True)]
    rules = [k["splits"] for k in manifest["kernels"].values()]
    one = {"rows": 16, "keys": 16, "blocks_per_sm": 1, "min_tiles": 1, "sharing": 1}
    assert rules == [one] * 4
    flags = [(x.get("if_split"), x.get("dependent"))
             for k in manifest["kernels"].values() for x in k["launches"]]  # fmt: skip
    assert flags == [(None, None), (True, True)] * 4
    keys = [str(k) for k in Attention(folder).manifest.shapes]
    assert keys[0].endswith("full fp16 decode on h200")
    assert keys[-1].endswith("causal fp16 decode in pages of 16 on h200")


def test_a_rule_that_does_not_say_so_is_of_blocks_with_splits_of_their_own(
    folder: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(folder, tmp_path / "older")
    manifest = json.loads((copied / "manifest.json").read_text())
    for entry in manifest["kernels"].values():
        del entry["splits"]["sharing"]
    (copied / "manifest.json").write_text(json.dumps(sealed(manifest)))
    found = Attention(copied).manifest.kernels.values()
    assert [k.splits.sharing for k in found if k.splits] == [1] * 4


@pytest.mark.parametrize("shape", [ONE, FEW], ids=lambda s: s.key)
def test_decodes_in_splits(attention: Attention, cuda: DecodeCuda, shape: Shape) -> None:
    for seed in range(2):  # the second call takes the packed launches
        q, k, v = inputs(shape, seed)
        assert_close(attention(q, k, v, causal=shape.causal), expected(q, k, v, shape.causal))
    assert cuda.driver.started == ["partial", "combine"] * 2
    assert cuda.driver.splits == [7] * 4  # 7 tiles of 16 keys, 4 blocks, 132 multiprocessors


def test_one_split_writes_the_output_itself(attention: Attention, cuda: DecodeCuda) -> None:
    q, k, v = inputs(dataclasses.replace(ONE, seqlen_k=9))
    assert_close(attention(q, k, v), expected(q, k, v, False))
    assert attention.workspace_bytes(q, k, v) == 0
    assert (cuda.driver.started, cuda.driver.splits) == (["partial"], [1])


@pytest.mark.parametrize("shape", [ONE, FEW], ids=lambda s: s.key)
def test_each_sequence_has_its_own_length(attention: Attention, shape: Shape) -> None:
    q, k, v = inputs(shape)
    for counts in ([100, 37], [1, 0], [16, 17]):  # the packed launches read the lengths anew
        lengths = torch.tensor(counts, dtype=torch.int32)
        got = attention(q, k, v, causal=shape.causal, seqlens_k=lengths)
        assert_close(got, expected(q, k, v, shape.causal, counts))
    assert_close(attention(q, k, v, causal=shape.causal), expected(q, k, v, shape.causal))


@pytest.mark.parametrize("shape", [ONE, FEW], ids=lambda s: s.key)
def test_a_paged_cache_gives_the_same_bits(attention: Attention, shape: Shape) -> None:
    q, k, v = inputs(dataclasses.replace(shape, seqlen_k=6 * PAGE))
    *pages, table = paged(k, v)
    lengths = torch.tensor([90, 41], dtype=torch.int32)
    for counts in (None, lengths):
        whole = attention(q, k, v, causal=shape.causal, seqlens_k=counts)
        got = attention(q, *pages, causal=shape.causal, seqlens_k=counts, block_table=table)
        assert torch.equal(whole, got)
    wide = torch.full((2, 11), -1, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    got = attention(
        q, *pages, causal=shape.causal, seqlens_k=lengths, block_table=wide[:, : table.shape[1]]
    )
    assert torch.equal(got, whole)  # a table with a stride of its own


def test_absorbed_mla_reads_v_from_k(tmp_path: Path) -> None:
    cuda = DecodeCuda((576, 512))
    attention = Attention(exported(tmp_path, (LATENT,)), cuda)
    q, k, v = inputs(LATENT)
    assert_close(attention(q, k, v), expected(q, k, v, False))
    shifted = torch.cat((k.new_zeros(1), k.flatten()))[1:].view(k.shape)  # is copied first
    assert_close(attention(q, shifted, shifted[..., :512]), expected(q, k, v, False))
    message = r"pass v = k\[\.\.\., :512\]"
    for other in (v.contiguous(), k[..., 64:], k.clone()[..., :512]):
        with pytest.raises(ValueError, match=message):
            attention(q, k, other)


def test_one_query_is_the_same_with_a_causal_mask(attention: Attention) -> None:
    q, k, v = inputs(ONE)
    assert torch.equal(attention(q, k, v, causal=True), attention(q, k, v))


def test_a_workspace_is_used_where_it_is_given(attention: Attention, cuda: DecodeCuda) -> None:
    q, k, v = inputs(ONE)
    wanted = attention.workspace_bytes(q, k, v)
    assert wanted == 7 * 2 * 8 * 32 * 4 + 512  # O_s, and lse_s on 256 bytes
    space, want = torch.empty(wanted, dtype=torch.uint8), expected(q, k, v, False)
    for _ in range(2):
        assert_close(attention(q, k, v, workspace=space), want)
    assert set(cuda.driver.spaces) == {space.data_ptr()}
    for bad, message in (
        (space[:-1], f"workspace has {wanted - 1} bytes and this call needs {wanted}"),
        (torch.empty(wanted + 1, dtype=torch.uint8)[1:], "lie at a multiple of 16 bytes"),
        (torch.empty(wanted, 2, dtype=torch.uint8)[:, 0], "must be contiguous"),
        (space.to("meta"), "workspace is on meta and q is on cpu"),
        (b"", "workspace is a bytes, not a tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, workspace=bad)  # type: ignore[arg-type]


def test_a_call_can_be_captured_once_its_workspace_was_asked_for(
    attention: Attention, cuda: DecodeCuda
) -> None:
    q, k, v = inputs(ONE)
    cuda.capturing = True
    with pytest.raises(LaunchError, match="or ask workspace_bytes of them, before capturing"):
        attention(q, k, v)
    cuda.capturing = False
    space = torch.empty(attention.workspace_bytes(q, k, v), dtype=torch.uint8)
    cuda.capturing = True
    assert_close(attention(q, k, v, workspace=space), expected(q, k, v, False))
    with pytest.raises(ValueError, match="leave it out of a CUDA graph"):
        attention(q, k, v, workspace=space, validate=True)


def test_a_kernel_that_decodes_without_a_rule_is_not_exported(tmp_path: Path) -> None:
    store = make_decode_run(tmp_path, (ONE,), 0, rule=None)
    with pytest.raises(ExportError, match="does not say how to split the keys"):
        export(store, tmp_path / "out")


# ---- the rule between tuned shapes -------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        Shape(5, 8, 2, 1, 100, *DIMS),
        Shape(2, 6, 1, 1, 40, *DIMS),
        Shape(1, 4, 4, 1, 333, *DIMS),
        Shape(2, 8, 2, 8, 100, *DIMS, causal=True),
        Shape(2, 71, 1, 2, 20, *DIMS, causal=True),
    ],
    ids=lambda s: s.key,
)
def test_shapes_between_are_served_without_asking(attention: Attention, shape: Shape) -> None:
    q, k, v = inputs(shape)
    assert_close(attention(q, k, v, causal=shape.causal), expected(q, k, v, shape.causal))


def nearest(tmp_path: Path, shapes: tuple[Shape, ...], asked: Shape) -> str:
    """The tuned shape whose kernel serves `asked`: each has one of its own."""
    folder = exported(tmp_path, shapes)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    (name,) = manifest["kernels"]
    for i, entry in enumerate(manifest["shapes"]):
        entry["kernel"] = f"k{i}"
        manifest["kernels"][f"k{i}"] = manifest["kernels"][name]
    path.write_text(json.dumps(sealed(manifest)))
    attention = Attention(folder, DecodeCuda())
    attention(*inputs(asked))
    ((chosen, _),) = attention._modules
    return shapes[int(chosen[1:])].key


CACHES = (
    Shape(1, 8, 2, 1, 4096, *DIMS),
    Shape(64, 8, 2, 1, 4096, *DIMS),
    Shape(1, 8, 2, 1, 128, *DIMS),
    Shape(4, 32, 2, 1, 512, *DIMS),
    Shape(2, 8, 2, 6, 64, *DIMS),
)


@pytest.mark.parametrize(
    ("asked", "expected_index"),
    [
        (Shape(2, 8, 2, 1, 100, *DIMS), 2),
        (Shape(3, 4, 1, 1, 700, *DIMS), 2),  # the other group is nearer, but of another kind
        (Shape(3, 16, 1, 1, 100, *DIMS), 3),  # its own group, though far
        (Shape(30, 8, 2, 1, 600, *DIMS), 1),
        (Shape(2, 8, 2, 5, 100, *DIMS), 4),  # as many rows
        (CACHES[4], 4),
    ],
)
def test_the_nearest_is_of_the_same_group(
    tmp_path: Path, asked: Shape, expected_index: int
) -> None:
    assert nearest(tmp_path, CACHES, asked) == CACHES[expected_index].key


def test_prefill_stays_strict_and_other_gpus_are_not_believed(folder: Path) -> None:
    q, k, v = inputs(dataclasses.replace(ONE, seqlen_q=9))
    with pytest.raises(NoKernelError, match=r"no kernel here was checked on B=2 .* Sq=9"):
        Attention(folder, DecodeCuda())(q, k, v)
    other = DecodeCuda()
    other.device_name = "NVIDIA H100"
    q, k, v = inputs(dataclasses.replace(ONE, seqlen_k=99))
    with pytest.raises(NoKernelError, match=r"decode on NVIDIA H100; .* Pass allow_untuned=True"):
        Attention(folder, other)(q, k, v)
    got = Attention(folder, other)(q, k, v, allow_untuned=True)
    assert_close(got, expected(q, k, v, False))


# ---- refusals before launch --------------------------------------------------------------------


I32 = torch.int32


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([5, 5], "seqlens_k is a list, not a tensor"),
        (torch.ones(2, dtype=torch.int64), r"seqlens_k is torch.int64; .* pass seqlens_k.int\(\)"),
        (torch.ones(3, dtype=I32), r"seqlens_k is \[3\]; one number for each sequence .* \[2\]"),
        (torch.ones(2, 1, dtype=I32), r"seqlens_k is \[2, 1\]"),
        (torch.ones(4, dtype=I32)[::2], "seqlens_k has stride 2"),
        (torch.ones(2, dtype=I32, device="meta"), "seqlens_k is on meta and q is on cpu"),
    ],
)
def test_lengths_that_no_kernel_reads(attention: Attention, lengths, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(*inputs(ONE), seqlens_k=lengths)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (torch.zeros(2, 3), "block_table is torch.float32; int32 is wanted"),
        (torch.zeros(3, 3, dtype=I32), r"block_table is \[3, 3\]; .* \[2, pages\]"),
        (torch.zeros(3, dtype=I32), r"block_table is \[3\]"),
        (torch.zeros(2, 6, dtype=I32)[:, ::2], "a row has stride 2"),
        (torch.zeros(2, 1, dtype=I32).expand(2, 2**27), "2147483648 keys, and at most 2147483647"),
    ],
)
def test_tables_that_no_kernel_reads(attention: Attention, table, message: str) -> None:
    q, k, v = inputs(ONE)
    *pages, _ = paged(k, v)
    with pytest.raises(ValueError, match=message):
        attention(q, *pages, block_table=table)


def test_what_the_cache_lacks_is_named(attention: Attention, folder: Path, tmp_path: Path) -> None:
    q, k, v = inputs(ONE)
    k_pages, v_pages, table = paged(k, v)
    for given, message in (
        ((q, k_pages[:-1], v_pages), "k has 15 pages and v has 16"),
        ((q[:, :, :3], k_pages, v_pages), "q has 3 heads, which is not a multiple of the 2 of k"),
        ((q, k_pages[:, :8], v_pages[:, :8]),
         "k has pages of 8 keys, and paged kernels here read pages of 16"),
        ((q, k_pages.transpose(2, 3).contiguous().transpose(2, 3), v_pages),
         "is a paged cache that kernels cannot read in place"),
        ((q.expand(2, 9, 8, 32), k_pages, v_pages), "at most 8 queries, and q has 9"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            attention(*given, block_table=table)
    whole = Attention(exported(tmp_path / "a", (ONE,)), DecodeCuda())
    with pytest.raises(NoKernelError, match="no kernel here reads pages; leave out block_table"):
        whole(q, k_pages, v_pages, block_table=table)
    only = Attention(exported(tmp_path / "b", (ONE,), (PAGE,)), DecodeCuda())
    with pytest.raises(NoKernelError, match="they read pages of 16 keys; pass block_table"):
        only(q, k, v)


def test_validate_names_the_sequence_the_value_and_its_limit(attention: Attention) -> None:
    q, k, v = inputs(ONE)
    *pages, table = paged(k, v)
    for counts, message in (
        ([100, 101], r"seqlens_k\[1\] is 101; 0 to 100 is possible, as its cache has 100 rows"),
        ([-1, 5], r"seqlens_k\[0\] is -1; 0 to 100"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, seqlens_k=torch.tensor(counts, dtype=I32), validate=True)
    lengths = torch.tensor([33, 113], dtype=I32)
    with pytest.raises(ValueError, match=r"0 to 112 is possible.*7 pages of 16 keys in block_tab"):
        attention(q, *pages, seqlens_k=lengths, block_table=table, validate=True)
    lengths[1] = 100
    table[0, 3] = 99  # behind the 33 keys of that sequence: nobody looks
    want = expected(q, k, v, False, [33, 100])
    got = attention(q, *pages, seqlens_k=lengths, block_table=table, validate=True)
    assert_close(got, want)
    for number in (16, -1):
        table[1, 6] = number
        with pytest.raises(ValueError, match=rf"block_table\[1, 6\] is {number}; .* 0 to 15"):
            attention(q, *pages, seqlens_k=lengths, block_table=table, validate=True)


@pytest.mark.parametrize("counts", [[0, 0], [100, 0]])
def test_sequences_without_keys_are_zero(attention: Attention, counts: list[int]) -> None:
    q, k, v = inputs(ONE)
    out = torch.full_like(q, float("nan"))
    attention(q, k, v, seqlens_k=torch.tensor(counts, dtype=I32), out=out)
    assert_close(out, expected(q, k, v, False, counts))
    assert not out[1].any()


def test_an_empty_table_is_a_cache_without_keys(attention: Attention) -> None:
    q, k, v = inputs(ONE)
    *pages, table = paged(k, v)
    assert not attention(q, *pages, block_table=table[:, :0]).any()
