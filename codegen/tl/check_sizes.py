"""Checks of shapes, parameters, MMA atoms, shared memory, and of claims about the problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from codegen.tl.ast import (
    Allocate,
    Call,
    Copy,
    Custom,
    Expr,
    For,
    Gemm,
    Memory,
    Name,
    Num,
    Param,
    Stmt,
    walk,
)
from codegen.tl.axes import loop_kinds, row_kinds
from codegen.tl.dims import infer, operand_axes
from codegen.tl.evaluate import evaluate
from codegen.tl.flow import Block, names_in, rewrite
from codegen.tl.kinds import Kind
from codegen.tl.prepare import RawKernel, prepare
from codegen.tl.printer import expr_text, to_text
from codegen.tl.report import Report
from codegen.tl.roles import scores_of
from codegen.tl.source import Span
from codegen.tl.subject import Subject
from codegen.tl.vocabulary import BLOCK_ROW, SPLIT_BOUNDS, canonical_param

ATOM = 16  #: rows of an MMA atom
CHUNK = 8  #: columns that one 16-byte copy moves
_FAR = 1 << 20  #: stands for a length without a number in a bound


def check_shapes(subject: Subject, report: Report) -> None:
    """Report GEMMs whose operands don't meet, with the transposition that would."""
    for kernel in prepare(subject.sketch, subject.params.declared):
        inference = infer(
            kernel.block, _used(kernel), subject.params.numbers, row_kinds(kernel.block)
        )
        for clash in inference.clashes:
            _clash(clash.gemm, kernel, subject, report)


def check_stated_shapes(subject: Subject, report: Report) -> None:
    """Report a Copy whose shape is not that of the tile it fills or empties."""
    for stmt in walk(subject.sketch.statements):
        if not isinstance(stmt, Copy) or not stmt.shape:
            continue
        for memory in (stmt.src, stmt.dst):
            tile = None if memory is None else subject.allocated(stmt.name, memory)
            if tile is None or tile.memory is Memory.GLOBAL:
                continue
            # (stages, rows, columns): only the tile itself is copied
            for one, other in zip(tile.shape[-2:], stmt.shape[-2:], strict=False):
                values = [evaluate(e, subject.params.numbers) for e in (one, other)]
                if None in values or values[0] == values[1]:
                    continue
                listed = ", ".join(map(expr_text, tile.shape))
                report.add(
                    stmt.span,
                    "shape-mismatch",
                    f"{stmt.name} is ({listed}) in {tile.memory}, and this copies "
                    f"({', '.join(map(expr_text, stmt.shape))})",
                    f"Write `Copy {stmt.name} ({listed})`",
                )
                break


def _used(kernel: RawKernel) -> tuple[Allocate, ...]:
    names = {n for s in walk(kernel.block) for n in _names_of(s)}
    return tuple(a for a in kernel.allocations if a.name in names)


def _names_of(stmt: object) -> Iterator[str]:
    if isinstance(stmt, Gemm):
        yield from (stmt.a.name, stmt.b.name, stmt.out)
    elif isinstance(stmt, Copy | Custom):
        yield stmt.name


def _clash(gemm: Gemm, kernel: RawKernel, subject: Subject, report: Report) -> None:
    """Say how the operands of one GEMM fail to meet, or how its output fails to fit."""
    kinds = row_kinds(kernel.block)
    numbers, allocations = subject.params.numbers, _used(kernel)

    def without_gemms(stmt: Stmt) -> Stmt | None:
        return None if isinstance(stmt, Gemm) else stmt

    sizes = infer(rewrite(kernel.block, without_gemms), allocations, numbers, kinds).sizes
    rows_a, inner_a = operand_axes(gemm.a)
    inner_b, columns_b = operand_axes(gemm.b)
    written = f"{to_text(gemm.a)} and {to_text(gemm.b)}"
    if sizes.meets(inner_a, inner_b):
        has = ", ".join(_axis_text(sizes.axis(gemm.out, n)) for n in (0, 1))
        wants = ", ".join(_axis_text(sizes.axis(*axis)) for axis in (rows_a, columns_b))
        message = f"{gemm.out} is ({has}) and the product of {written} is ({wants})"
        hint = f"Give {gemm.out} the shape of the product"
    else:
        words = " and ".join(_axis_text(sizes.axis(*axis)) for axis in (inner_a, inner_b))
        message = f"{written} do not meet: the inner axes are {words}"
        hint = "Columns of the first operand and rows of the second must be the same axis"
    for flip_a, flip_b in ((False, True), (True, False), (True, True)):
        a = replace(gemm.a, transposed=gemm.a.transposed != flip_a)
        b = replace(gemm.b, transposed=gemm.b.transposed != flip_b)
        new = replace(gemm, a=a, b=b)
        trial = rewrite(kernel.block, lambda s, n=new: n if s is gemm else s)  # type: ignore[misc]
        clashes = infer(trial, allocations, numbers, kinds).clashes
        if all(c.gemm is not new for c in clashes):
            verb = "accumulate" if gemm.accumulate else "get"
            hint = f"Write `Compute GEMM {to_text(a)}, {to_text(b)} and {verb} {gemm.out}`"
            break
    report.add(gemm.span, "gemm-shapes", message, hint)


def _axis_text(axis: object) -> str:
    kind = getattr(axis, "kind", None)
    size = getattr(axis, "size", None)
    symbol = getattr(axis, "symbol", None)
    label = str(symbol or size or "unknown")
    return f"{label} ({kind})" if isinstance(kind, Kind) else label


# ---- parameters ----------------------------------------------------------------------------------


def check_params(subject: Subject, report: Report) -> None:
    """Report undeclared parameters, sizes off the atom, and points off the sketch."""
    known = subject.params.declared | subject.lengths()
    for span, exprs in _tile_shapes(subject):
        for name in dict.fromkeys(n for e in exprs for n in names_in(e)):
            if name not in known:
                report.add(
                    span,
                    "undeclared",
                    f"{name} is used and declared nowhere",
                    f"Write `Param {name} in {{64, 128}}` or `Param {name} = 64`",
                )
        _atoms_of_shape(subject, span, exprs, report)
    for name in ("BM", "BN"):
        value = subject.point.as_dict().get(name) if subject.point else None
        if value is not None and (value % ATOM or value <= 0):
            _off_the_atom(Span(1), name, value, report)
    for param in (s for s in subject.sketch.statements if isinstance(s, Param)):
        _atoms_of_param(subject, param, report)
    _on_the_sketch(subject, report)


def _tile_shapes(subject: Subject) -> Iterator[tuple[Span, tuple[Expr, ...]]]:
    for stmt in walk(subject.sketch.statements):
        if (isinstance(stmt, Allocate) and stmt.memory is not Memory.GLOBAL) or (
            isinstance(stmt, Copy) and stmt.shape
        ):
            yield stmt.span, stmt.shape


def _atoms_of_param(subject: Subject, param: Param, report: Report) -> None:
    known = canonical_param(param.name)
    if known not in ("BM", "BN"):
        return
    values = param.choices
    if not values:
        value = subject.params.numbers.get(param.name)
        values = (value,) if isinstance(value, int) else ()
    for value in values:
        if value % ATOM or value <= 0:
            _off_the_atom(param.span, param.name, value, report)


def _off_the_atom(span: Span, name: str, value: int, report: Report) -> None:
    report.add(
        span,
        "atom",
        f"{name} = {value} does not divide into MMA atoms of {ATOM} rows",
        f"Use a multiple of {ATOM}, such as {max(ATOM, value // ATOM * ATOM)}",
    )


def _atoms_of_shape(subject: Subject, span: Span, exprs: tuple[Expr, ...], report: Report) -> None:
    if len(exprs) < 2:
        return
    for expr, step in zip(exprs[-2:], (ATOM, CHUNK), strict=True):
        names = list(names_in(expr))
        if any(canonical_param(n) in ("BM", "BN") for n in names):
            continue  # said at the Param
        value = evaluate(expr, subject.params.numbers)
        if isinstance(value, int) and value % step and value != 1:
            report.add(
                span,
                "atom",
                f"{expr_text(expr)} = {value} is not a multiple of {step}"
                if names
                else f"{value} is not a multiple of {step}",
                f"Use a multiple of {step}, such as {max(step, value // step * step)}",
            )


def _on_the_sketch(subject: Subject, report: Report) -> None:
    if subject.point is None:
        return
    chosen = subject.point.as_dict()
    for name in ("BM", "BN"):
        if name not in subject.params.tuned:
            report.add(Span(1), "no-size", f"no value for {name}", f"Write `Param {name} = 64`")
    for name, choices in subject.params.choices.items():
        if name in chosen and chosen[name] not in choices:
            span = next(
                (
                    s.span
                    for s in subject.sketch.statements
                    if isinstance(s, Param) and (canonical_param(s.name) or s.name) == name
                ),
                Span(1),
            )
            listed = ", ".join(map(str, choices))
            report.add(
                span,
                "not-a-choice",
                f"{name} = {chosen[name]} is asked for, and the sketch allows {listed}",
                f"Add {chosen[name]} to the choices of {name}, or choose one of them",
            )


# ---- claims about the problem --------------------------------------------------------------------


def check_claims(subject: Subject, report: Report) -> None:
    """Report head dims, masks and loop bounds that are not those of the problem."""
    if subject.problem is not None:
        _head_dims(subject, report)
    stored: set[str] = set()
    for kernel in prepare(subject.sketch, subject.params.declared):
        stored |= _workspaces(kernel.block, stored, report)
        masks = _masks(kernel.block)
        if subject.problem is not None and scores_of(kernel.block):
            _mask_of_problem(kernel.block, masks, subject, report)
        _bounds(kernel.block, masks, subject, report)


def _workspaces(block: Block, stored: set[str], report: Report) -> set[str]:
    """Report parts of a split result that no earlier kernel stores; return what this one stores."""
    own: set[str] = set()
    for stmt in walk(block):
        if not isinstance(stmt, Copy):
            continue
        if stmt.dst is Memory.GLOBAL:
            own.add(stmt.name)
            continue
        base = stmt.name.rsplit("_", 1)[0]
        if any(c.axis == "splits" for c in stmt.coords):
            if not {stmt.name, base} & stored:
                report.add(
                    stmt.span,
                    "never-stored",
                    f"{stmt.name} is read split by split, and no kernel before stores {base}",
                    f"Write `Copy {base} from register to global` at the end of the first kernel",
                )
        elif base in stored and base != stmt.name and stmt.src is Memory.GLOBAL:
            report.add(
                stmt.span,
                "missing-coordinate",
                f"Copy {stmt.name} does not say which split's {base} it reads",
                f"Copy it inside a loop over the splits: `for s = 0:num_splits`, `Copy {base}_s`",
            )
    return own


def _head_dims(subject: Subject, report: Report) -> None:
    assert subject.problem is not None
    wanted = {"Q": subject.problem.head_dim, "K": subject.problem.head_dim}
    wanted |= {"V": subject.problem.head_dim_v, "O": subject.problem.head_dim_v}
    for stmt in walk(subject.sketch.statements):
        if not isinstance(stmt, Allocate | Copy) or stmt.name not in wanted or not stmt.shape:
            continue
        value = evaluate(stmt.shape[-1], subject.params.numbers)
        if isinstance(value, int) and len(stmt.shape) > 1 and value != wanted[stmt.name]:
            report.add(
                stmt.span,
                "other-head-dim",
                f"{stmt.name} has {value} columns, and the problem's head dim is "
                f"{wanted[stmt.name]}",
                f"Write {wanted[stmt.name]}, or leave it open: `D`",
            )


def _masks(block: Block) -> list[tuple[Custom, str, Expr | None]]:
    """Return (statement, kind, right side of a window) of every mask."""
    found: list[tuple[Custom, str, Expr | None]] = []
    for stmt in walk(block):
        if not isinstance(stmt, Custom) or stmt.op != "Mask":
            continue
        if not stmt.args:
            found.append((stmt, "open", None))
        for kind in stmt.args:
            if isinstance(kind, Name):
                found.append((stmt, kind.id, None))
            elif isinstance(kind, Call):
                right = kind.args[1] if len(kind.args) >= 2 else None
                found.append((stmt, kind.function, right))
    return found


def _mask_of_problem(
    block: Block, masks: list[tuple[Custom, str, Expr | None]], subject: Subject, report: Report
) -> None:
    assert subject.problem is not None
    causal = [m for m in masks if m[1] == "causal"]
    covers = any(
        kind in ("causal", "open") or (kind == "window" and right in (None, Num(0)))
        for _, kind, right in masks
    )
    scores = scores_of(block)[0]
    if subject.problem.causal and not covers:
        gemm = next(s for s in walk(block) if isinstance(s, Gemm) and s.out == scores)
        report.add(
            gemm.span,
            "mask-missing",
            f"the problem is causal and nothing masks {scores}",
            f"Write `Compute Mask {scores}, causal` before the Softmax",
        )
    if causal and not subject.problem.causal:
        report.add(
            causal[0][0].span,
            "mask-not-asked",
            "the problem is not causal and this masks it",
            "Take the Mask out, or ask for a causal problem",
        )


def _bounds(
    block: Block, masks: list[tuple[Custom, str, Expr | None]], subject: Subject, report: Report
) -> None:
    kinds = loop_kinds(block)
    causal = any(kind in ("causal", "open") for _, kind, _ in masks)
    window = any(kind == "window" for _, kind, _ in masks)
    for stmt in walk(block):
        if not isinstance(stmt, For) or kinds.get(stmt.var) != "key":
            continue
        names = {*names_in(stmt.lo), *names_in(stmt.hi)}
        if names & set(SPLIT_BOUNDS):
            continue
        if not window and stmt.lo != Num(0) and evaluate(stmt.lo, subject.params.numbers) != 0:
            report.add(
                stmt.span,
                "bound-misses-keys",
                f"the loop starts at {expr_text(stmt.lo)}, so the keys before it are never read",
                f"Write `for {stmt.var} = 0:{expr_text(stmt.hi)}`",
            )
        if BLOCK_ROW not in names_in(stmt.hi):
            continue
        if not causal and not window:
            report.add(
                stmt.span,
                "bound-misses-keys",
                "the loop ends at the block's own rows, and nothing masks the keys behind them",
                f"Write `for {stmt.var} = 0:N / BN`, or `Compute Mask S, causal`",
            )
        elif not window:
            _causal_bound(stmt, subject, report)


def _causal_bound(stmt: For, subject: Subject, report: Report) -> None:
    """Report a causal bound that does not reach the last visible key at equal lengths."""
    tuned = subject.params.tuned
    bm, bn = (tuned.get(n, subject.params.numbers.get(n)) for n in ("BM", "BN"))
    if not isinstance(bm, int) or not isinstance(bn, int):
        return
    numbers = {n: _FAR for n in names_in(stmt.hi)} | dict(subject.params.numbers)
    for row in range(8):
        reach = evaluate(stmt.hi, {**numbers, BLOCK_ROW: row})
        needed = -(-(row + 1) * bm // bn)
        if reach is not None and reach < needed:
            report.add(
                stmt.span,
                "bound-misses-keys",
                f"with BM = {bm} and BN = {bn}, row block {row} sees {needed} key tiles and the "
                f"loop reads {int(reach)}",
                f"Write `for {stmt.var} = 0:(block_idx + 1) * BM / BN`, or `0:N / BN`",
            )
            return
