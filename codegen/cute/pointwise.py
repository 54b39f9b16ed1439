"""Kernels without a product, such as the one that combines splits: a thread has 4 columns of a row.

Rows are packed: row r of a plane (a KV head of one sequence) is query r / group and head
kv_head * group + r % group. Every tile of such a kernel has the same columns, every row vector is a
number that the threads of a row hold alike, so nothing is exchanged between threads.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.cute.expressions import cxx
from codegen.cute.statements import ARITHMETIC, ELEMENTWISE, comment
from codegen.cute.structure import loads
from codegen.cute.writer import Writer
from codegen.errors import PlanError
from codegen.kernel import Arg, ArgKind, GridAxis, Launch
from codegen.tl import ast
from codegen.tl.printer import to_text

WIDTH = 4  #: columns of a thread
THREADS = 128  #: of a block, unless a row takes more
UNROLL = 16  #: steps of a loop whose loads are in flight together

#: lets the kernel behind be scheduled; it waits itself for what this one stores
START_KERNEL_BEHIND = 'asm volatile("griddepcontrol.launch_dependents;" ::: "memory");'
#: waits until the kernel before has ended and its stores are visible
WAIT_FOR_KERNEL_BEFORE = 'asm volatile("griddepcontrol.wait;" ::: "memory");'


@dataclass(frozen=True, slots=True)
class PointwisePlan:
    """One kernel: `lanes` threads share a row, a block has `rows` rows."""

    kernel: ast.Kernel
    columns: int
    lanes: int
    rows: int
    scalars: tuple[str, ...]
    dependent: bool

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.rows

    def is_vector(self, name: str) -> bool:
        """Whether `name` is one number a row."""
        return any(t.name == name and t.columns == 1 for t in self.kernel.tiles)


def is_pointwise(kernel: ast.Kernel) -> bool:
    """Whether a kernel has no product and no tile in shared memory."""
    found = any(isinstance(s, ast.Gemm) for s in ast.walk(kernel.body))
    return not found and not loads(ast.walk(kernel.body))


def plan_pointwise(kernel: ast.Kernel, scalars: tuple[str, ...], dependent: bool) -> PointwisePlan:
    """Plan a kernel; `dependent` says that it may be scheduled while the one before it ends.

    Raises PlanError when its tiles have different columns, or columns no 4 of which lie together.
    """
    wide = {t.columns for t in kernel.tiles if t.columns > 1}
    if len(wide) != 1:
        raise PlanError(f"tiles of {kernel.name} have {sorted(wide)} columns, one number is wanted")
    (columns,) = wide
    if columns % WIDTH:
        raise PlanError(f"{columns} columns of {kernel.name} are not a multiple of {WIDTH}")
    lanes = columns // WIDTH
    return PointwisePlan(kernel, columns, lanes, max(1, THREADS // lanes), scalars, dependent)


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
        plan.kernel.name, plan.threads, 0, grid, tuple(args), if_split=if_split,
        dependent=plan.dependent,
    )  # fmt: skip


def emit_pointwise(plan: PointwisePlan, out: Writer) -> None:
    """Write the kernel. Same plan, same bytes."""
    _Emitter(plan, out).write()


class _Emitter:
    def __init__(self, plan: PointwisePlan, out: Writer) -> None:
        self.plan, self.out = plan, out

    def write(self) -> None:
        plan, out = self.plan, self.out
        out.line(f'extern "C" __global__ void __launch_bounds__({plan.threads})')
        out.line(f"{plan.kernel.name}(")
        parts = []
        for arg in launch_pointwise(plan, False).args:
            if arg.kind is ArgKind.POINTER:
                tensor = plan.kernel.tensor(arg.name)
                assert tensor is not None
                element = "float" if tensor.elem is ast.Elem.F32 else "uint16_t"
                parts.append(f"{element}* g{arg.name}")
            elif arg.kind is ArgKind.STRIDE:
                parts.append(f"int64_t {arg.name.replace('.', '_stride_')}")
            else:
                parts.append(f"{'float' if arg.kind is ArgKind.FLOAT else 'int'} {arg.name}")
        for k, part in enumerate(parts):
            out.line(f"    {part}{',' if k < len(parts) - 1 else ''}")
        with out.block(")"):
            out.line(f"int const row_blocks = ceil_div(rows, {plan.rows});")
            out.line("int const planes = kv_heads * batch;")
            out.line("int const plane = blockIdx.x / row_blocks;")
            out.line(
                f"int const row = blockIdx.x % row_blocks * {plan.rows} + "
                f"threadIdx.x / {plan.lanes};"
            )
            out.line(f"int const column = threadIdx.x % {plan.lanes} * {WIDTH};")
            if plan.dependent:
                out.line(WAIT_FOR_KERNEL_BEFORE)
            out.line("if (row >= rows) return;")
            for tile in plan.kernel.tiles:
                size = "" if tile.columns == 1 else f"[{WIDTH}]"
                out.line(f"float {tile.name}{size};")
            self._body(plan.kernel.body)

    def _body(self, body: tuple[ast.Stmt, ...]) -> None:
        out = self.out
        for stmt in body:
            if isinstance(stmt, ast.For):
                comment(out, stmt)
                lo, hi = cxx(stmt.lo, {}, bound=True), cxx(stmt.hi, {}, bound=True)
                out.line(f"#pragma unroll {UNROLL}")
                with out.block(f"for (int {stmt.var} = {lo}; {stmt.var} < {hi}; ++{stmt.var})"):
                    self._body(stmt.body)
            else:
                comment(out, stmt)
                self._emit(stmt)

    def _emit(self, stmt: ast.Stmt) -> None:
        match stmt:
            case ast.Copy(src=None, target=str(target)):
                self._each(target, self._at(stmt.name))
            case ast.Copy(src=ast.Memory.GLOBAL):
                self._load(stmt)
            case ast.Copy(dst=ast.Memory.GLOBAL):
                self._store(stmt)
            case ast.Arith():
                second = self._at(stmt.b) if isinstance(stmt.b, str) else f"{stmt.b:.9g}f"
                self._each(stmt.out, ARITHMETIC[stmt.op].format(a=self._at(stmt.a), b=second))
            case ast.Custom(op="Fill", args=(ast.Num(value=value),)):
                low = value == float("-inf")
                self._each(stmt.out or stmt.name, "-INFINITY" if low else f"{float(value)!r}f")
            case ast.Custom() if stmt.op in ARITHMETIC:
                second = self._at(cxx(stmt.args[0], {}))
                text = ARITHMETIC[stmt.op].format(a=self._at(stmt.name), b=second)
                self._each(stmt.out or stmt.name, text)
            case ast.Custom() if stmt.op in ELEMENTWISE:
                text = ELEMENTWISE[stmt.op].format(x=self._at(stmt.name))
                self._each(stmt.out or stmt.name, text)
            case _:
                raise PlanError(f"no pointwise lowering for {to_text(stmt).strip()}")

    def _at(self, name: str) -> str:
        """C++ for the element of a tile in the loop over columns; a row vector is a number."""
        wide = any(t.name == name and t.columns > 1 for t in self.plan.kernel.tiles)
        return f"{name}[c]" if wide else name

    def _each(self, target: str, value: str) -> None:
        if self.plan.is_vector(target):
            if "[c]" in value:
                raise PlanError(f"{target} is a row vector and cannot hold a tile")
            self.out.line(f"{target} = {value};")
            return
        with self.out.unrolled("c", WIDTH):
            self.out.line(f"{target}[c] = {value};")

    def _address(self, stmt: ast.Copy) -> tuple[ast.Tensor, str]:
        tensor = self.plan.kernel.tensor(stmt.target or stmt.name)
        if tensor is None:
            raise PlanError(f"{stmt.name} is not a tensor in global memory")
        if stmt.coords and stmt.coords[0].index != ast.Name("block_idx"):
            raise PlanError(f"a pointwise kernel reads its own rows of {stmt.name} only")
        if not tensor.workspace:
            return tensor, f"g{tensor.name} + {packed_row(tensor.name, 'row')} + column"
        lead = next((cxx(c.index, {}) for c in stmt.coords if c.axis in tensor.axes), "0")
        at = f"(int64_t({lead}) * planes + plane) * rows + row"
        if tensor.columns == 1:
            return tensor, f"g{tensor.name} + {at}"
        return tensor, f"g{tensor.name} + ({at}) * {tensor.columns} + column"

    def _load(self, stmt: ast.Copy) -> None:
        tensor, at = self._address(stmt)
        out, name = self.out, stmt.name
        if tensor.elem is not ast.Elem.F32:
            raise PlanError(f"a pointwise kernel reads float32, and {name} is not")
        if self.plan.is_vector(name):
            out.line(f"{name} = *({at});")
            return
        with out.block(""):
            out.line(f"float4 const x = *reinterpret_cast<float4 const*>({at});")
            out.line(f"{name}[0] = x.x; {name}[1] = x.y; {name}[2] = x.z; {name}[3] = x.w;")

    def _store(self, stmt: ast.Copy) -> None:
        tensor, at = self._address(stmt)
        out, x = self.out, stmt.name
        if tensor.elem is ast.Elem.F32:
            value, kind = f"{{{x}[0], {x}[1], {x}[2], {x}[3]}}", "float4"
        else:
            value, kind = f"{{pack({x}[0], {x}[1]), pack({x}[2], {x}[3])}}", "uint2"
        with out.block(""):
            out.line("int const batch_at = plane / kv_heads, kv_head = plane % kv_heads;")
            out.line(f"*reinterpret_cast<{kind}*>({at}) = {value};")


def packed_row(tensor: str, row: str, batch: str = "batch_at") -> str:
    """C++ for the element offset of a packed row of Q or O; `kv_head` is in scope."""
    return (
        f"{batch} * {tensor}_stride_b + int64_t({row} / group) * {tensor}_stride_s + "
        f"int64_t(kv_head * group + {row} % group) * {tensor}_stride_h"
    )
