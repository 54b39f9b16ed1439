"""Questions about a bound program's statements: sizes, copies, masks, run-time scalars."""

from __future__ import annotations

from collections.abc import Iterable

from codegen.errors import PlanError
from codegen.tl import ast


def number(expr: ast.Expr) -> int:
    """Return the value of a bound size. Raises PlanError when it is not a number."""
    if isinstance(expr, ast.Num):
        return int(expr.value)
    raise PlanError(f"size {expr!r} is not a number in a bound program")


def copies(
    statements: Iterable[ast.Stmt], src: ast.Memory, dst: ast.Memory
) -> tuple[ast.Copy, ...]:
    """Return the copies from `src` to `dst` among `statements`, in order."""
    return tuple(s for s in statements if isinstance(s, ast.Copy) and (s.src, s.dst) == (src, dst))


def loads(statements: Iterable[ast.Stmt]) -> tuple[ast.Copy, ...]:
    """Return the copies from global to shared memory."""
    return copies(statements, ast.Memory.GLOBAL, ast.Memory.SHARED)


def stores(statements: Iterable[ast.Stmt]) -> tuple[ast.Copy, ...]:
    """Return the copies from registers to global memory."""
    return copies(statements, ast.Memory.REGISTER, ast.Memory.GLOBAL)


def block_rows(kernel: ast.Kernel) -> int:
    """Rows of the block: those of the tiles indexed by block_idx."""
    for stmt in ast.walk(kernel.body):
        if isinstance(stmt, ast.Copy) and stmt.coords and stmt.shape:
            first = stmt.coords[0].index
            if isinstance(first, ast.Name) and first.id == "block_idx":
                return number(stmt.shape[0])
    raise PlanError(f"no tile of kernel {kernel.name} is indexed by block_idx")


def number_columns(kernel: ast.Kernel, name: str) -> int:
    """Columns of the register tile of `name`. Raises PlanError when it has none."""
    tile = kernel.tile(name, ast.Memory.REGISTER)
    if tile is None:
        raise PlanError(f"{name} has no register tile")
    return tile.columns


def mask_kind(stmt: ast.Custom) -> str:
    """The kind of a Mask statement: causal, window, alibi, bias or padding."""
    arg = stmt.args[0] if stmt.args else ast.Name("padding")
    if isinstance(arg, ast.Name):
        return arg.id
    if isinstance(arg, ast.Call):
        return arg.function
    raise PlanError(f"mask {arg!r} is not causal, window(l, r), alibi, bias(B) or padding")


def is_key_loop(loop: ast.For) -> bool:
    """Whether a loop runs over the tiles of the key rows: hi is N / BN."""
    hi = loop.hi
    if isinstance(hi, ast.Name) and hi.id == "split_end":
        return True
    return isinstance(hi, ast.BinOp) and hi.op == "/" and hi.left == ast.Name("N")


def reads(body: tuple[ast.Stmt, ...], name: str) -> bool:
    return any(isinstance(s, ast.Gemm) and name in (s.a.name, s.b.name) for s in ast.walk(body))


def uses_name(kernel: ast.Kernel, name: str) -> bool:
    return any(
        isinstance(s, ast.Copy) and any(c.index == ast.Name(name) for c in s.coords)
        for s in ast.walk(kernel.body)
    )


def used_scalars(program: ast.Program, kernel: ast.Kernel) -> tuple[str, ...]:
    """Run-time scalars this kernel reads, in the program's order."""
    used: set[str] = set()
    for stmt in ast.walk(kernel.body):
        if isinstance(stmt, ast.Custom):
            used |= {a.id for a in stmt.args if isinstance(a, ast.Name)}
            used |= set(window_names(stmt))
        elif isinstance(stmt, ast.Arith) and isinstance(stmt.b, str):
            used.add(stmt.b)
    return tuple(s for s in program.scalars if s in used)


def bias_names(body: tuple[ast.Stmt, ...]) -> frozenset[str]:
    """Return the tensors that `Mask S, bias(B)` adds to scores."""
    calls = [
        s.args[0] for s in ast.walk(body)
        if isinstance(s, ast.Custom) and s.op == "Mask" and mask_kind(s) == "bias"
    ]  # fmt: skip
    return frozenset(
        a.id for c in calls if isinstance(c, ast.Call) for a in c.args if isinstance(a, ast.Name)
    )


def window_names(stmt: ast.Custom) -> list[str]:
    """Run-time whole numbers of a window mask."""
    if stmt.op != "Mask" or mask_kind(stmt) != "window":
        return []
    assert isinstance(stmt.args[0], ast.Call)
    return [a.id for a in stmt.args[0].args if isinstance(a, ast.Name)]


def window_scalars(kernel: ast.Kernel) -> set[str]:
    """Names of the run-time whole numbers of all window masks."""
    return {
        name for s in ast.walk(kernel.body) if isinstance(s, ast.Custom) for name in window_names(s)
    }
