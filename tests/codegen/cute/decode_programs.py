"""The built-in decode sketch, translated for a problem, a GPU and a point."""

from __future__ import annotations

from codegen.cute import translate
from codegen.kernel import KernelSource
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import sketches
from space.gpu import GPUS
from space.params import Point
from space.variant import DType, Phase, Problem


def decode(
    variant: str, dims: tuple[int, int], causal: bool = False, page: int = 0, dtype: str = "fp16"
) -> Problem:
    return Problem(variant, DType(dtype), *dims, causal, Phase.DECODE, page)


def text_of(problem: Problem) -> str:
    return sketches(problem.variant, problem.causal, Phase.DECODE)["decode"]


def emitted(problem: Problem, gpu: str, point: Point, text: str = "") -> KernelSource:
    return translate(bind(parse(text or text_of(problem)), problem, point), problem, GPUS[gpu])
