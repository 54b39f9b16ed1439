"""The hand-written programs are clean TL, bind everywhere and differ where they should."""

from __future__ import annotations

import pytest

from codegen.tl.ast import Copy, For, Memory, walk
from codegen.tl.bind import bind
from codegen.tl.checker import check
from codegen.tl.parser import parse
from codegen.tl.printer import to_text
from llm_proposer.builtin import programs, sketches
from space.constraints import space_for, violated
from space.gpu import GPUS
from space.params import Point
from space.variant import VARIANTS, DType, Problem, SpaceError

POINT = Point.of({"BM": 128, "BN": 64, "warps": 4, "stages": 2})


@pytest.mark.parametrize("causal", [False, True])
def test_every_program_is_clean_and_printable(causal: bool) -> None:
    for name, text in programs(causal).items():
        sketch = parse(text)
        assert check(sketch) == (), name
        assert parse(to_text(sketch)) == sketch, name


def test_the_programs_of_the_language_are_all_there() -> None:
    assert set(programs()) >= {
        "forward", "q_in_registers", "v_early", "relu", "sigmoid", "softcap_window", "linear",
        "gemm_epilogue", "split_kv", "explicit_softmax",
    }  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_attention_sketches_bind_for_every_head_dim(variant: str, causal: bool) -> None:
    found = sketches(variant, causal)
    assert next(iter(found)) == "forward"
    for dims in ((16, 16), (80, 80), (192, 128), (256, 256), (72, 40)):
        problem = Problem(variant, DType.BF16, *dims, causal)
        for text in found.values():
            (kernel,) = bind(parse(text), problem, POINT).kernels
            assert [t.columns for t in kernel.tensors if t.name in ("Q", "O")] == list(dims)


def test_different_dataflow_gives_different_programs() -> None:
    problem = Problem("mha", DType.BF16, 128, 128, False)
    bodies = {
        bind(parse(t), problem, POINT).kernels[0].body for t in sketches("mha", False).values()
    }
    assert len(bodies) == len(sketches("mha", False))


def test_v_early_copies_v_before_the_scores() -> None:
    problem = Problem("mha", DType.BF16, 128, 128, False)
    body = bind(parse(programs()["v_early"]), problem, POINT).kernels[0].body
    loop = next(s for s in body if isinstance(s, For))
    assert [s.name for s in loop.body[:2] if isinstance(s, Copy)] == ["K", "V"]


def test_q_in_registers_has_a_register_tile() -> None:
    problem = Problem("mha", DType.BF16, 128, 128, False)
    (kernel,) = bind(parse(programs()["q_in_registers"]), problem, POINT).kernels
    assert kernel.tile("Q", Memory.REGISTER) is not None
    moves = [s for s in walk(kernel.body) if isinstance(s, Copy) and s.name == "Q"]
    assert [(s.src, s.dst) for s in moves] == [
        (Memory.GLOBAL, Memory.SHARED),
        (Memory.SHARED, Memory.REGISTER),
    ]


def test_some_legal_point_of_every_gpu_binds() -> None:
    for gpu in GPUS.values():
        problem = Problem("mha", DType.FP16, 64, 64, True)
        space = space_for(problem, gpu)
        legal = next(p for p in space.points() if violated(problem, p, gpu) is None)
        sketch = parse(sketches("mha", True)["forward"])
        assert check(sketch, problem, gpu, legal) == ()
        assert bind(sketch, problem, legal).params == tuple(sorted(legal.items))


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(SpaceError, match="unknown variant 'mqqa'"):
        sketches("mqqa", False)
