"""Plans of kernels without a product: threads, groups, what a loop loads ahead and gathers."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.cute.expressions import cxx
from codegen.cute.structure import loads
from codegen.errors import PlanError
from codegen.kernel import Arg, ArgKind, GridAxis, Launch
from codegen.tl import ast
from codegen.tl.flow import all_written, reads, written

WIDTH = 4  #: columns of a thread
THREADS = 128  #: of a block, unless its groups need more
#: registers for what a loop loads ahead, and the most steps that are
AHEAD_REGISTERS, AHEAD_STEPS = 20, 8
#: what a loop may gather in a tile, and the value from which every group of threads starts
GATHERED = {"Max": float("-inf"), "Add": 0.0}


@dataclass(frozen=True, slots=True)
class PointwisePlan:
    """One kernel: `groups` of `lanes` threads share a row, a block has `rows` rows.

    A block of several groups has one row.
    """

    kernel: ast.Kernel
    columns: int
    lanes: int
    groups: int
    rows: int
    scalars: tuple[str, ...]
    dependent: bool

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.groups * self.rows

    @property
    def smem_bytes(self) -> int:
        """Shared memory by which groups join a tile and a row vector."""
        return 4 * (WIDTH + 1) * self.threads if self.groups > 1 else 0

    def is_vector(self, name: str) -> bool:
        """Whether `name` is one number a row."""
        return any(t.name == name and t.columns == 1 for t in self.kernel.tiles)


def is_pointwise(kernel: ast.Kernel) -> bool:
    """Whether a kernel has no product and no tile in shared memory."""
    found = any(isinstance(s, ast.Gemm) for s in ast.walk(kernel.body))
    return not found and not loads(ast.walk(kernel.body))


def plan_pointwise(
    kernel: ast.Kernel, scalars: tuple[str, ...], dependent: bool, groups: int = 1
) -> PointwisePlan:
    """Plan a kernel; `dependent` says that it may be scheduled while the one before it ends.

    `groups` of threads share the steps of its loops, which pays where rows are few.

    Raises PlanError when its tiles have different columns, or columns no 4 of which lie together.
    """
    wide = {t.columns for t in kernel.tiles if t.columns > 1}
    if len(wide) != 1:
        raise PlanError(f"tiles of {kernel.name} have {sorted(wide)} columns, one number is wanted")
    (columns,) = wide
    if columns % WIDTH:
        raise PlanError(f"{columns} columns of {kernel.name} are not a multiple of {WIDTH}")
    lanes = columns // WIDTH
    rows = max(1, THREADS // lanes) if groups == 1 else 1
    return PointwisePlan(kernel, columns, lanes, groups, rows, scalars, dependent)


def launch_pointwise(plan: PointwisePlan, if_split: bool) -> Launch:
    """How the kernel is started: a block for each `rows` rows of a plane."""
    args = [Arg(ArgKind.POINTER, t.name) for t in plan.kernel.tensors]
    for t in plan.kernel.tensors:
        if not t.workspace:
            args += [Arg(ArgKind.STRIDE, f"{t.name}.{axis}") for axis in ("b", "s", "h")]
    args += [Arg(ArgKind.INT, n) for n in ("rows", "group", "kv_heads", "batch", "splits")]
    args += [Arg(ArgKind.FLOAT, s) for s in plan.scalars]
    grid = (GridAxis("rows", plan.rows), GridAxis("kv_heads", 1), GridAxis("batch", 1))
    return Launch(
        plan.kernel.name, plan.threads, plan.smem_bytes, grid, tuple(args), if_split=if_split,
        dependent=plan.dependent,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ahead:
    """A loop, what it loads, and for how many steps ahead."""

    loop: ast.For
    loaded: tuple[ast.Copy, ...]
    steps: int
    number: int  #: of the loop among the statements: its names end in it

    @classmethod
    def of(cls, plan: PointwisePlan, loop: ast.For, number: int) -> Ahead:
        """Plan a loop. Raises PlanError when a step may load what an earlier one stored."""
        copies = [s for s in loop.body if isinstance(s, ast.Copy) and s.src is not None]
        if any(s.dst is ast.Memory.GLOBAL for s in copies):
            raise PlanError(
                f"loop {loop.var} of a pointwise kernel stores what a later step may load"
            )
        loaded = tuple(s for s in copies if s.src is ast.Memory.GLOBAL)
        words = sum(1 if plan.is_vector(s.name) else WIDTH for s in loaded)
        return cls(loop, loaded, min(AHEAD_STEPS, AHEAD_REGISTERS // max(words, 1)), number)

    @property
    def first(self) -> str:
        """C++ name of the first step that is loaded."""
        return f"{self.loop.var}_first{self.number}"

    @property
    def end(self) -> str:
        """C++ for the end of the loop."""
        return cxx(self.loop.hi, {}, bound=True)

    def name(self, copy: ast.Copy) -> str:
        """C++ name of what is loaded of a tile."""
        return f"{copy.name}_next{self.number}"

    def step(self, groups: int) -> str:
        """C++ for the loop's step that is loaded k-th."""
        return f"{self.first} + k" + (f" * {groups}" if groups > 1 else "")


def gathered_by(kernel: ast.Kernel, loop: ast.For) -> tuple[tuple[str, str], ...]:
    """Return (tile, operator) of what the loop gathers over its steps.

    Raises PlanError when a step hands the next one anything else.
    """
    found: dict[str, str] = {}
    for s in loop.body:
        match s:
            case ast.Custom(op="Max", name=name) if (s.out or name) == name:
                found[name] = "Max"
            case ast.Arith(op="Add", a=a, out=out) if a == out:
                found[a] = "Add"
            case _:
                pass
    fresh = {s.name for s in loop.body if isinstance(s, ast.Copy) and s.src is not None}
    before = all_written(kernel.body[: kernel.body.index(loop)])
    for s in loop.body:
        written_here = written(s)
        if written_here and written_here not in found:
            fresh.add(written_here)
        for name in reads(s) - fresh - {written_here or ""}:
            if name in found or (name in all_written(loop.body) and name not in before):
                raise PlanError(f"{name} goes from one step of loop {loop.var} to the next")
    for name, op in found.items():
        fills = [
            s for s in kernel.body
            if isinstance(s, ast.Custom) and s.op == "Fill" and (s.out or s.name) == name
        ]  # fmt: skip
        if [s.args for s in fills] != [(ast.Num(GATHERED[op]),)]:
            raise PlanError(f"{name} is gathered and does not start at {GATHERED[op]}")
    return tuple(found.items())
