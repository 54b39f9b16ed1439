"""Emitted decode kernels before the judge on a CPU: the problems a trial is given, emulated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from codegen.cute import translate
from codegen.kernel import KernelSource
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import sketches
from llm_proposer.seeds import seeds
from runs.record import Rejected, TrialClass
from runs.templates.launch import problem_lengths, split_count
from space.constraints import space_for
from space.gpu import gpu_named
from space.variant import DType, Phase, Problem
from tests.emulation.emulator import COMPILER, Emulator
from tuner.evaluate.decode_checks import trial_checks
from tuner.evaluate.inputs import Check, make
from tuner.evaluate.launch import Launcher, Prepare
from tuner.evaluate.verify import set_exam, verify

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")

GPU = gpu_named("a100")
PROBLEM = Problem("gqa", DType.BF16, 64, 64, True, Phase.DECODE, 16)


def source_of(problem: Problem) -> KernelSource:
    """The known-good kernel."""
    point = seeds(problem, GPU, space_for(problem, GPU))[0]
    text = sketches(problem.variant, problem.causal, Phase.DECODE)["decode"]
    return translate(bind(parse(text), problem, point), problem, GPU)


def emulated(source: KernelSource, dtype: DType) -> Prepare:
    """A kernel as the judge takes it."""
    kernels, rule = Emulator(source, dtype), source.splits
    assert rule is not None

    def prepare(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float,
        key_counts: torch.Tensor | None = None, pages: torch.Tensor | None = None,
        splits: int | None = None,
    ) -> Launcher:  # fmt: skip
        keys = k.shape[1] * (1 if pages is None else pages.shape[1])
        lengths = problem_lengths(q.shape[0], q.shape[2], k.shape[2], q.shape[1], keys)
        lengths["splits"] = splits or split_count(rule, lengths, GPU.num_sms)
        named = {"Q": q, "K": k, "V": v, "O": out, "key_counts": key_counts, "pages": pages}
        tensors = {name: t for name, t in named.items() if t is not None}
        return lambda: kernels.run(tensors, lengths, {"scale": scale})

    return prepare


def check_named(problem: Problem, name: str) -> Check:
    return next(c for c in trial_checks(problem) if c.name == name)


MANY = "many splits, none empty"


@pytest.mark.parametrize("name", ["three splits, some empty", "more splits than tiles", MANY])
def test_emitted_kernel_is_right(name: str) -> None:
    check = check_named(PROBLEM, name)
    exam = set_exam(name, make(check, PROBLEM.dtype, torch.device("cpu")))
    found = verify(emulated(source_of(PROBLEM), PROBLEM.dtype), exam, 0)
    assert isinstance(found, float), found


def test_kernel_that_is_not_told_the_lengths_is_wrong() -> None:
    check = check_named(PROBLEM, "more splits than tiles")
    whole = emulated(source_of(PROBLEM), PROBLEM.dtype)

    def untold(*given: object, **more: object) -> Launcher:
        # every page of the table is then read, and those that no sequence owns are page 0
        pages = more["pages"]
        assert isinstance(pages, torch.Tensor)
        return whole(*given, **more | {"key_counts": None, "pages": pages.clamp(min=0)})

    exam = set_exam("x", make(check, PROBLEM.dtype, torch.device("cpu")))
    said = verify(untold, exam, 0)
    assert isinstance(said, Rejected)
    assert said.trial_class is TrialClass.WRONG_OUTPUT


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("while (s_first4 < splits) {", "while (s_first4 < min(splits, 16)) {"),
        ("__ldg(table + key / 16)", "(__ldg(table + key / 16) & 255)"),
        ("__ldg(table + key / 16)", "__ldg(table + (key / 16 & 127))"),
    ],
    ids=["16 splits combined", "page number of 8 bits", "128 pages of a sequence"],
)
def test_what_only_a_long_cache_shows_is_seen(right: str, wrong: str) -> None:
    source = source_of(PROBLEM)
    assert right in source.text
    spoiled = replace(source, text=source.text.replace(right, wrong))
    check = check_named(PROBLEM, MANY)
    exam = set_exam(MANY, make(check, PROBLEM.dtype, torch.device("cpu")))
    said = verify(emulated(spoiled, PROBLEM.dtype), exam, 0)
    assert isinstance(said, Rejected)
    assert said.trial_class is TrialClass.WRONG_OUTPUT
