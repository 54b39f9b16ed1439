"""parse(to_text(x)) == x, for every node the grammar has."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.tl.ast import (
    Allocate,
    Arith,
    BinOp,
    Call,
    Compare,
    Coord,
    Copy,
    Custom,
    Expr,
    For,
    Gemm,
    If,
    Index,
    Memory,
    Name,
    Num,
    Operand,
    Param,
    Reshape,
    Sketch,
    Slice,
    Stmt,
)
from codegen.tl.identifiers import name_fault
from codegen.tl.parser import read
from codegen.tl.printer import to_text
from codegen.tl.vocabulary import ARITH_OPS, OPS, RESERVED, SCHEDULE_WORDS

_WORDS = {
    "true", "false", "on", "off", "True", "False", "range", "barrier", "mbarrier",
    "the", "a", "an", "all", "each", "this", "is", "are", "of", "you", "it", "we", "not",
}  # fmt: skip
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True).filter(
    lambda n: n not in RESERVED | SCHEDULE_WORDS | _WORDS and name_fault(n) is None
)
numbers = st.one_of(
    st.integers(-1000, 100000),
    st.floats(allow_nan=False, allow_infinity=True, width=32),
)
memories = st.sampled_from(Memory)


def _wider(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    some = st.lists(inner, min_size=1, max_size=3).map(tuple)
    return st.one_of(
        st.builds(BinOp, st.sampled_from("+-*/%"), inner, inner),
        st.builds(Compare, st.sampled_from(("<", "<=", ">", ">=", "==", "!=")), inner, inner),
        st.builds(Call, names, some),
        st.builds(Index, names, some),
    )


exprs: st.SearchStrategy[Expr] = st.recursive(
    st.one_of(st.builds(Num, numbers), st.builds(Name, names)), _wider, max_leaves=6
)
shapes = st.lists(exprs, min_size=1, max_size=3).map(tuple)
coords = st.lists(st.builds(Coord, names, exprs), min_size=1, max_size=3).map(tuple)
slices = st.lists(
    st.builds(Slice, st.none() | exprs, st.none() | exprs), min_size=1, max_size=2
).map(tuple)
operands = st.builds(Operand, names, st.just(()) | slices, st.booleans())
fragments = st.tuples(names, names, names)

params = st.builds(
    Param, names, st.lists(st.integers(-5, 512), min_size=1, max_size=4).map(tuple)
) | st.builds(lambda n, v: Param(n, (), v), names, exprs)
allocates = st.builds(Allocate, names, memories, shapes, st.none() | names, st.none() | names)
copies = st.builds(
    Copy,
    names,
    st.just(()) | shapes,
    st.just(()) | coords,
    memories,
    memories,
    st.none() | names,
    st.just(()) | shapes,
) | st.builds(lambda a, b: Copy(a, target=b), names, names)
gemms = st.builds(Gemm, operands, operands, names, st.booleans())
arith_seconds = names | st.floats(allow_nan=False, width=32)
ariths = st.builds(Arith, st.sampled_from(ARITH_OPS), names, arith_seconds, names, st.booleans())
customs = st.builds(
    lambda op, name, args, out, new: Custom(op, name, args, out, new and out is not None),
    st.sampled_from([op for op in OPS if op != "Fill"]),
    names,
    st.lists(exprs, max_size=3).map(tuple),
    st.none() | names,
    st.booleans(),
)
reshapes = st.builds(Reshape, names, fragments, fragments)
declarations: st.SearchStrategy[Stmt] = params | allocates
simple: st.SearchStrategy[Stmt] = st.one_of(copies, gemms, ariths, customs, reshapes)


def _blocks(inner: st.SearchStrategy[Stmt]) -> st.SearchStrategy[Stmt]:
    body = st.lists(inner, max_size=3).map(tuple)
    return st.builds(For, names, exprs, exprs, body) | st.builds(If, exprs, body, body)


statements = declarations | st.recursive(simple, _blocks, max_leaves=6)


@settings(max_examples=150, deadline=None)
@given(st.lists(statements, min_size=1, max_size=5))
def test_parsing_what_was_printed_gives_the_same_sketch(body: list[Stmt]) -> None:
    sketch = Sketch(tuple(body))
    text = to_text(sketch)
    reading = read(text)
    assert reading.diagnostics == (), text
    assert reading.sketch == sketch, text


@settings(max_examples=100, deadline=None)
@given(exprs)
def test_expressions_keep_their_structure(expr: Expr) -> None:
    reading = read(f"Param p = {to_text(expr)}")
    assert reading.sketch.statements == (Param("p", (), expr),)
