"""TL expressions as C++."""

from __future__ import annotations

from codegen.errors import PlanError
from codegen.tl import ast

Environment = dict[str, str]

#: run-time lengths whose name in a kernel is another
LENGTHS = {"num_splits": "splits"}


def float_text(value: float) -> str:
    """Return a finite number as a C++ float: a whole one has a point, or `f` were a suffix."""
    text = f"{value:.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.f"


def cxx(expr: ast.Expr, environment: Environment, bound: bool = False) -> str:
    """Return C++ for `expr`; names go through `environment`. In a bound, division rounds up.

    Raises PlanError on an expression that has no run-time value.
    """
    match expr:
        case ast.Num(value=value):
            return str(int(value)) if float(value).is_integer() else f"{value:.9g}f"
        case ast.Name(id=name):
            return environment.get(name, LENGTHS.get(name, name))
        case ast.BinOp(op="/", left=left, right=right) if bound:
            return f"ceil_div({cxx(left, environment, bound)}, {cxx(right, environment, bound)})"
        case ast.BinOp(op=op, left=left, right=right) | ast.Compare(op=op, left=left, right=right):
            return f"({cxx(left, environment, bound)} {op} {cxx(right, environment, bound)})"
        case ast.Call(function="ceil", args=(inner,)):
            return cxx(inner, environment, bound=True)
        case ast.Call(function=("min" | "max") as function, args=(a, b)):
            return f"{function}({cxx(a, environment, bound)}, {cxx(b, environment, bound)})"
    raise PlanError(f"expression {expr!r} has no run-time value")
