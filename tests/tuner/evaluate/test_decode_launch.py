"""The judge's launches of decode kernels, on a device of host memory."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import fakes
import pytest
import torch
from scripted_clock import ScriptedClock

sys.path.insert(0, str(Path(__file__).parents[2] / "runs"))
from decode_runs import FEW, LATENT, ONE, problem_of
from fake_cuda import reference
from fake_decode import PAGE, RULE, DecodeDriver, decode_kernel

from codegen.kernel import KernelSource
from runs.record import Measured
from space.gpu import gpu_named
from space.variant import Phase, Shape
from tuner.evaluate import launch as module
from tuner.evaluate.finals import run_finals
from tuner.evaluate.judge import Judge
from tuner.evaluate.launch import LaunchError, LoadedKernel
from tuner.evaluate.splits import multiprocessors, with_splits
from tuner.job import Entry

T = torch.Tensor
CPU = torch.device("cpu")
I32 = torch.int32
Load = Callable[[Shape, int], LoadedKernel]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads the made-up kernel of a shape and a page size."""
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    real = module.driver.load

    def loaded(shape: Shape, page: int) -> LoadedKernel:
        source, cubin = decode_kernel(problem_of(shape, page))
        driver = DecodeDriver((shape.head_dim, shape.head_dim_v))
        monkeypatch.setattr(module.driver, "load", lambda image, index: real(image, index, driver))
        return LoadedKernel(source, cubin.image, CPU)

    return loaded


def inputs(shape: Shape, pages: int = 0) -> tuple[T, T, T, T]:
    generator = torch.Generator().manual_seed(1)

    def draw(*sizes: int) -> T:
        return torch.randn(*sizes, generator=generator).half()

    rows = (pages, PAGE) if pages else (shape.batch, shape.seqlen_k)
    q = draw(shape.batch, shape.seqlen_q, shape.heads, shape.head_dim)
    k = draw(*rows, shape.kv_heads, shape.head_dim)
    v = k[..., : shape.head_dim_v] if shape.latent else draw(*rows, shape.kv_heads, 32)
    return q, k, v, torch.full((*q.shape[:3], shape.head_dim_v), float("nan")).half()


@pytest.mark.parametrize("shape", [ONE, FEW, LATENT], ids=lambda s: s.key)
def test_sequences_have_their_own_lengths(load: Load, shape: Shape) -> None:
    q, k, v, out = inputs(shape)
    counts = torch.tensor([shape.seqlen_k, 21], dtype=I32)
    load(shape, 0).prepare(q, k, v, out, 0.2, key_counts=counts)()
    for b, n in enumerate(counts.tolist()):
        part = (t[b : b + 1, :n] for t in (k, v))
        want = reference(q[b : b + 1], *part, shape.causal, 0.2)
        torch.testing.assert_close(out[b : b + 1], want, rtol=2e-3, atol=2e-3)


def test_pages_are_found_through_the_table(load: Load) -> None:
    q, k, v, out = inputs(ONE, pages=9)
    table = torch.tensor([[3, 0, 7, 7], [8, 1, 2, -1]], dtype=I32)
    counts = torch.tensor([64, 40], dtype=I32)
    load(ONE, PAGE).prepare(q, k, v, out, 0.2, counts, table)()
    for b, n in enumerate(counts.tolist()):
        part = (t[table[b].long()].reshape(1, 4 * PAGE, 2, 32)[:, :n] for t in (k, v))
        want = reference(q[b : b + 1], *part, False, 0.2)
        torch.testing.assert_close(out[b : b + 1], want, rtol=2e-3, atol=2e-3)


def test_what_kernel_and_tensors_differ_about_is_named(load: Load) -> None:
    q, k, v, out = inputs(ONE, pages=9)
    table = torch.zeros(2, 4, dtype=I32)
    paged, whole = load(ONE, PAGE), load(ONE, 0)
    with pytest.raises(LaunchError, match="reads a paged cache; pages are wanted"):
        paged.prepare(q, k, v, out, 0.2)
    with pytest.raises(LaunchError, match="reads no paged cache; pages were given"):
        whole.prepare(q, k, v, out, 0.2, pages=table)
    with pytest.raises(LaunchError, match=r"block_table is torch.int64; int32 is wanted"):
        paged.prepare(q, k, v, out, 0.2, pages=table.long())
    with pytest.raises(LaunchError, match=r"seqlens_k is \[3\]"):
        paged.prepare(q, k, v, out, 0.2, torch.zeros(3, dtype=I32), table)
    with pytest.raises(LaunchError, match=r"K has \[batch, rows, heads\]"):
        paged.prepare(q, k[:-1], v, out, 0.2, pages=table)
    q, k, v, out = inputs(LATENT)
    with pytest.raises(LaunchError, match=r"pass v = k\[..., :512\]"):
        load(LATENT, 0).prepare(q, k, v.clone(), out, 0.2)


def test_lengths_of_a_launch_hold_its_splits(load: Load) -> None:
    q, k, _, _ = inputs(ONE)
    assert load(ONE, 0).lengths(q, k)["splits"] == 7
    q, k, _, _ = inputs(ONE, pages=9)
    lengths = load(ONE, PAGE).lengths(q, k, torch.zeros(2, 4, dtype=I32))
    assert (lengths["N"], lengths["rows"], lengths["splits"]) == (64, 4, 4)


# ---- the record of the splits ------------------------------------------------------------------


PREFILL = KernelSource("", "sm_90a", (), ())
SPLIT = dataclasses.replace(PREFILL, splits=RULE)


class Loaded:
    def __init__(self) -> None:
        self.prepare = fakes.kernel(fakes.right, False)

    def unload(self) -> None:
        pass


@pytest.mark.parametrize(("source", "splits"), [(SPLIT, 7), (PREFILL, 1)])
def test_times_say_how_many_splits_ran(source: KernelSource, splits: int) -> None:
    problem = dataclasses.replace(problem_of(ONE, 0), phase=Phase.PREFILL)
    judge = Judge(CPU, ScriptedClock(100.0), lambda *_: Loaded(), gpu_named("h200"))
    outcome = judge.judge(problem, source, b"", (ONE,), 1, {})
    assert isinstance(outcome, Measured) and [t.splits for t in outcome.timings] == [splits]
    finals = run_finals(judge, problem, [Entry(3, source, b"", (ONE,))], (ONE,), 1, {})
    assert [f.timing.splits for f in finals.finalists] == [splits]
    in_pages = with_splits(outcome.timings[0], source, 132, 128)
    assert in_pages.splits == (8 if source.splits else 1)  # 100 keys lie in a page of 128
    assert with_splits(outcome.timings[0], source, 1).splits == 1  # one multiprocessor is full
    assert multiprocessors(CPU, None) == 0
