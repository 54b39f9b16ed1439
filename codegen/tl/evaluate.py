"""The numbers of a program: what its parameters stand for, and expressions over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from codegen.tl.ast import BinOp, Call, Compare, Expr, Name, Num, Param, Sketch
from codegen.tl.vocabulary import canonical_param, is_head_count, is_scale
from space.params import Point
from space.variant import Problem

Number = int | float
LARGEST = 2**63 - 1  #: whole numbers past it have no value: squares of squares would fill memory
LOG2E = math.log2(math.e)
CEIL_DIVISIONS = ("ceil_div", "ceildiv", "cdiv")
FUNCTIONS = ("ceil", "floor", "min", "max", "sqrt", "log", "log2", "exp", *CEIL_DIVISIONS)


def evaluate(expr: Expr, names: Mapping[str, Number]) -> Number | None:
    """Return the value of an expression, or None when a name in it has no number.

    Division of whole numbers rounds up; a comparison gives 1 or 0.
    """
    match expr:
        case Num():
            return expr.value
        case Name():
            return names.get(expr.id)
        case BinOp() | Compare():
            left, right = evaluate(expr.left, names), evaluate(expr.right, names)
            return None if left is None or right is None else _safely(_apply, expr.op, left, right)
        case Call():
            args = [evaluate(a, names) for a in expr.args]
            known = [a for a in args if a is not None]
            return _safely(_call, expr.function, known) if len(known) == len(args) else None
        case _:
            return None


def _safely(function: Callable[..., Number | None], *args: object) -> Number | None:
    """Return what a function gives; None where it has no value that a kernel can hold."""
    try:
        value = function(*args)
    except (ArithmeticError, ValueError):  # sqrt(-1), ceil(inf), exp(1000)
        return None
    return value if value is None or isinstance(value, float) or abs(value) <= LARGEST else None


def _apply(op: str, a: Number, b: Number) -> Number | None:
    match op:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "/":
            if b == 0:
                return None
            return -(-a // b) if isinstance(a, int) and isinstance(b, int) else a / b
        case "%":
            return None if b == 0 else a % b
        case "<":
            return int(a < b)
        case "<=":
            return int(a <= b)
        case ">":
            return int(a > b)
        case ">=":
            return int(a >= b)
        case "==":
            return int(a == b)
        case _:
            return int(a != b)


def _call(function: str, args: list[Number]) -> Number | None:
    if function in CEIL_DIVISIONS and len(args) == 2:
        return _apply("/", *args)
    if function in ("min", "max") and args:
        return min(args) if function == "min" else max(args)
    if len(args) != 1:
        return None
    match function:
        case "ceil":
            return math.ceil(args[0])
        case "floor":
            return math.floor(args[0])
        case "sqrt":
            return math.sqrt(args[0])
        case "exp":
            return math.exp(args[0])
        case "log" | "log2" if args[0] > 0:
            return math.log(args[0]) if function == "log" else math.log2(args[0])
        case _:
            return None


@dataclass(frozen=True, slots=True)
class Params:
    """The Param statements of a sketch at one point.

    `numbers` has every parameter with a number under the sketch's own name; `tuned` has the tile
    and schedule parameters under the search's names; `declared` has all names, numbers or not.
    """

    numbers: Mapping[str, Number]
    tuned: Mapping[str, int]
    declared: frozenset[str]
    choices: Mapping[str, tuple[int, ...]]


def read_params(sketch: Sketch, problem: Problem | None, point: Point | None) -> Params:
    """Return what each parameter stands for; without a point a choice of several has no number."""
    chosen = point.as_dict() if point else {}
    numbers: dict[str, Number] = {}
    tuned: dict[str, int] = dict(chosen)
    choices: dict[str, tuple[int, ...]] = {}
    declared: set[str] = set()
    for param in (s for s in sketch.statements if isinstance(s, Param)):
        declared.add(param.name)
        known = canonical_param(param.name) or param.name
        stated = _stated(param, numbers)
        if _is_tuned(param, sketch):
            choices[known] = param.choices or ((stated,) if isinstance(stated, int) else ())
        value: Number | None = chosen.get(known, stated)
        if value is None and param.choices and (point is not None or len(param.choices) == 1):
            value = param.choices[0]
        if value is not None:
            numbers[param.name] = value
            if known in choices and isinstance(value, int):
                tuned.setdefault(known, value)
    for name in ("BM", "BN", "BK"):  # a sketch may speak of tiles that it does not declare
        if name in chosen:
            numbers.setdefault(name, chosen[name])
    return Params(numbers, tuned, frozenset(declared), {k: v for k, v in choices.items() if v})


def _stated(param: Param, numbers: Mapping[str, Number]) -> Number | None:
    return None if param.value is None else evaluate(param.value, numbers)


def _is_tuned(param: Param, sketch: Sketch) -> bool:
    """Whether a parameter is one to search: a known name, or any with a set of choices."""
    if is_scale(param.name) or is_head_count(param.name):
        return False
    return canonical_param(param.name) is not None or bool(param.choices)
