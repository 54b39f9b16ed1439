"""Bias tensors of a program: read in place, so their copies go before a kernel is planned.

A bias tile is read once and by one statement; it takes neither shared memory nor registers.
"""

from __future__ import annotations

from dataclasses import replace

from codegen.cute.structure import bias_names, mask_kind
from codegen.errors import PlanError
from codegen.tl import ast
from codegen.tl.flow import reads, rewrite


def without_bias_copies(kernel: ast.Kernel) -> ast.Kernel:
    """Return a kernel without the copies of its bias tensors: `Mask` reads them in place.

    Raises PlanError when a bias tile is not the scores' own, or is read by something else too.
    """
    names = bias_names(kernel.body)
    if not names:
        return kernel
    for loop in (s for s in ast.walk(kernel.body) if isinstance(s, ast.For)):
        for stmt in loop.body:
            if isinstance(stmt, ast.Copy) and stmt.name in names:
                _check_place(stmt, loop.var)
    for stmt in ast.walk(kernel.body):
        used = reads(stmt) & names
        if used and not isinstance(stmt, ast.Copy | ast.For) and not _is_bias(stmt):
            raise PlanError(
                f"the bias {min(used)} is read by another statement than its Mask; this back end "
                f"adds it to the scores and keeps no tile of it"
            )

    def change(stmt: ast.Stmt) -> ast.Stmt | None:
        return None if isinstance(stmt, ast.Copy) and stmt.name in names else stmt

    tiles = tuple(t for t in kernel.tiles if t.name not in names)
    return replace(kernel, tiles=tiles, body=rewrite(kernel.body, change))


def _is_bias(stmt: ast.Stmt) -> bool:
    return isinstance(stmt, ast.Custom) and stmt.op == "Mask" and mask_kind(stmt) == "bias"


def _check_place(stmt: ast.Copy, var: str) -> None:
    if stmt.src is not ast.Memory.GLOBAL:
        return
    places = {c.axis: c.index for c in stmt.coords}
    if places != {"L": ast.Name("block_idx"), "D": ast.Name(var)}:
        raise PlanError(
            f"the bias {stmt.name} is not copied where its scores are; write "
            f"`Copy {stmt.name} (BM, BN) in coordinate [L = block_idx, D = {var}] from global to "
            f"shared`"
        )


def uses_distance(kernel: ast.Kernel) -> bool:
    """Whether a statement needs how far a row is from the diagonal."""
    return any(
        isinstance(s, ast.Custom) and s.op == "Mask" and mask_kind(s) == "alibi"
        for s in ast.walk(kernel.body)
    )
