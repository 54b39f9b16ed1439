"""Kernels without a product, such as the one that combines splits: a thread has 4 columns of a row.

The steps of a loop are shared by groups of threads. What the loop gathers, maxima and sums, the
groups join through shared memory behind it, always in the same order.

Rows are packed: row r of a plane (a KV head of one sequence) is query r / group and head
kv_head * group + r % group. Every tile of such a kernel has the same columns, every row vector is a
number that the threads of a row hold alike.
"""

from __future__ import annotations

from codegen.cute.expressions import Environment, cxx, float_text
from codegen.cute.pointwise_plan import (
    WIDTH,
    Ahead,
    PointwisePlan,
    gathered_by,
    launch_pointwise,
)
from codegen.cute.statements import ARITHMETIC, ELEMENTWISE, comment
from codegen.cute.writer import Writer
from codegen.errors import PlanError
from codegen.kernel import ArgKind
from codegen.tl import ast
from codegen.tl.printer import to_text

#: lets the kernel behind be scheduled; it waits itself for what this one stores. Not said at a
#: kernel's start: blocks of the next would go to the few SMs with room, and wait for each other
START_KERNEL_BEHIND = 'asm volatile("griddepcontrol.launch_dependents;" ::: "memory");'
#: waits until the kernel before has ended and its stores are visible
WAIT_FOR_KERNEL_BEFORE = 'asm volatile("griddepcontrol.wait;" ::: "memory");'


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
        out.parameters(parts)
        with out.block(")"):
            out.line("int const planes = kv_heads * batch;")
            if plan.groups > 1:
                out.line("int const plane = blockIdx.x / rows, row = blockIdx.x % rows;")
                out.line(f"int const group_at = threadIdx.x / {plan.lanes};")
            else:
                out.line(f"int const row_blocks = ceil_div(rows, {plan.rows});")
                out.line("int const plane = blockIdx.x / row_blocks;")
                at = f"blockIdx.x % row_blocks * {plan.rows}"
                out.line(f"int const row = {at} + threadIdx.x / {plan.lanes};")
            out.line(f"int const lane_at = threadIdx.x % {plan.lanes}, column = lane_at * {WIDTH};")
            self._starts()
            if plan.dependent:
                out.line(WAIT_FOR_KERNEL_BEFORE)
            if plan.groups == 1:
                out.line("if (row >= rows) return;")
            for tile in plan.kernel.tiles:
                size = "" if tile.columns == 1 else f"[{WIDTH}]"
                out.line(f"float {tile.name}{size};")
            self._body(plan.kernel.body)

    def _body(self, body: tuple[ast.Stmt, ...]) -> None:
        out = self.out
        loops = {id(s): Ahead.of(self.plan, s, n) for n, s in enumerate(body)
                 if isinstance(s, ast.For)}  # fmt: skip
        started = False
        for stmt in body:
            if isinstance(stmt, ast.For) and not started:
                started = True
                for ahead in loops.values():  # later loops' first loads wait for no earlier loop
                    self._start(ahead)
            comment(out, stmt)
            if isinstance(stmt, ast.For):
                self._loop(loops[id(stmt)])
            else:
                self._emit(stmt)

    def _start(self, ahead: Ahead) -> None:
        """Declare what a loop loads ahead, and load its first steps."""
        out = self.out
        for copy in ahead.loaded:
            comment(out, copy)
            wide = "" if self.plan.is_vector(copy.name) else f"[{WIDTH}]"
            out.line(f"float {ahead.name(copy)}[{ahead.steps}]{wide};")
        lo = cxx(ahead.loop.lo, {}, bound=True)
        own = " + group_at" if self.plan.groups > 1 else ""
        out.line(f"int {ahead.first} = {lo}{own};")
        self._load_ahead(ahead)

    def _load_ahead(self, ahead: Ahead) -> None:
        """Load the steps from `first` on that there are."""
        out, groups = self.out, self.plan.groups
        with out.block(""):
            for copy in ahead.loaded:
                at = self._element(copy, {ahead.loop.var: ahead.first})
                out.line(f"float const* {copy.name}_from = {at};")
            with out.unrolled("k", ahead.steps):
                for copy in ahead.loaded:
                    with out.block(f"if ({ahead.step(groups)} < {ahead.end})"):
                        self._load(copy, f"{ahead.name(copy)}[k]", f"{copy.name}_from")
                    step = f"{self._tensor(copy).name}_step"
                    stride = f"{groups} * {step}" if groups > 1 else step
                    out.line(f"{copy.name}_from += {stride};")

    def _loop(self, ahead: Ahead) -> None:
        """A loop whose loads are issued for several steps before the first is used."""
        out, groups, loop = self.out, self.plan.groups, ahead.loop
        gathered = gathered_by(self.plan.kernel, loop)
        out.line("#pragma unroll 1")
        with out.block(f"while ({ahead.first} < {ahead.end})"):
            there = f"if ({ahead.step(groups)} < {ahead.end})"
            with out.unrolled("k", ahead.steps), out.block(there):
                for copy in ahead.loaded:
                    self._each(copy.name, self._at(copy.name, f"{ahead.name(copy)}[k]"))
                self._body(tuple(s for s in loop.body if s not in ahead.loaded))
            out.line(f"{ahead.first} += {groups * ahead.steps};")
            with out.block(f"if ({ahead.first} < {ahead.end})"):
                self._load_ahead(ahead)
        if groups > 1:
            self._join(gathered)

    def _join(self, gathered: tuple[tuple[str, str], ...]) -> None:
        """Give every group what all of them gathered, in the groups' order."""
        out, plan = self.out, self.plan
        widths = [1 if plan.is_vector(name) else WIDTH for name, _ in gathered]
        if sum(widths) > WIDTH + 1:
            raise PlanError("a loop of a pointwise kernel gathers one tile and one row vector")
        names = ", ".join(name for name, _ in gathered)
        out.line(f"// what the groups gathered of {names}")
        with out.block(""):
            out.line("float* const parts = reinterpret_cast<float*>(smem);")
            out.line("__syncthreads();  // what was joined before is read no more")
            at = 0
            for (name, _), width in zip(gathered, widths, strict=True):
                with out.unrolled("c", width):
                    slot = self._slot(at, "group_at")
                    out.line(f"{slot} = {self._at(name)};")
                at += width
            out.line("__syncthreads();")
            at = 0
            for (name, _), width in zip(gathered, widths, strict=True):
                with out.unrolled("c", width):
                    out.line(f"{self._at(name)} = {self._slot(at, '0')};")
                at += width
            out.line("#pragma unroll 4")
            with out.block(f"for (int g = 1; g < {plan.groups}; ++g)"):
                at = 0
                for (name, op), width in zip(gathered, widths, strict=True):
                    with out.unrolled("c", width):
                        joined = ARITHMETIC[op].format(a=self._at(name), b=self._slot(at, "g"))
                        out.line(f"{self._at(name)} = {joined};")
                    at += width

    def _slot(self, first: int, group: str) -> str:
        """C++ for where a group's thread keeps element c of what is joined."""
        plan = self.plan
        plane = f"({first} + c)" if first else "c"
        return f"parts[({plane} * {plan.groups} + {group}) * {plan.lanes} + lane_at]"

    def _emit(self, stmt: ast.Stmt) -> None:
        match stmt:
            case ast.Copy(src=None, target=str(target)):
                self._each(target, self._at(stmt.name))
            case ast.Copy(src=ast.Memory.GLOBAL):
                self._load(stmt, stmt.name, self._element(stmt, {}))
            case ast.Copy(dst=ast.Memory.GLOBAL):
                self._store(stmt)
            case ast.Arith():
                second = self._at(stmt.b) if isinstance(stmt.b, str) else float_text(stmt.b)
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

    def _at(self, name: str, text: str = "") -> str:
        """C++ for the element of a tile in the loop over columns; a row vector is a number."""
        wide = any(t.name == name and t.columns > 1 for t in self.plan.kernel.tiles)
        return f"{text or name}[c]" if wide else text or name

    def _each(self, target: str, value: str) -> None:
        if self.plan.is_vector(target):
            if "[c]" in value:
                raise PlanError(f"{target} is a row vector and cannot hold a tile")
            self.out.line(f"{target} = {value};")
            return
        with self.out.unrolled("c", WIDTH):
            self.out.line(f"{target}[c] = {value};")

    def _tensor(self, stmt: ast.Copy) -> ast.Tensor:
        tensor = self.plan.kernel.tensor(stmt.target or stmt.name)
        if tensor is None:
            raise PlanError(f"{stmt.name} is not a tensor in global memory")
        if stmt.coords and stmt.coords[0].index != ast.Name("block_idx"):
            raise PlanError(f"a pointwise kernel reads its own rows of {stmt.name} only")
        return tensor

    def _starts(self) -> None:
        """Declare where this thread's element of each workspace starts, and a step along its axis.

        Worked out once: what is left in a loop is one product and one addition.
        """
        for t in self.plan.kernel.tensors:
            if t.workspace:
                columns = "" if t.columns == 1 else f" * {t.columns}"
                own = "" if t.columns == 1 else " + column"
                start = f"g{t.name} + (int64_t(plane) * rows + row){columns}{own}"
                self.out.line(f"float* const {t.name}_at = {start};")
                self.out.line(f"int64_t const {t.name}_step = int64_t(planes) * rows{columns};")

    def _element(self, stmt: ast.Copy, environment: Environment) -> str:
        """C++ for where this thread's element of a workspace is."""
        tensor = self._tensor(stmt)
        if not tensor.workspace or tensor.elem is not ast.Elem.F32:
            raise PlanError(f"a pointwise kernel reads workspaces, and {stmt.name} is not one")
        lead = next((cxx(c.index, environment) for c in stmt.coords if c.axis in tensor.axes), "0")
        return f"{tensor.name}_at + {lead} * {tensor.name}_step"

    def _load(self, stmt: ast.Copy, to: str, at: str) -> None:
        out = self.out
        if self.plan.is_vector(stmt.name):
            out.line(f"{to} = *({at});")
            return
        with out.block(""):
            out.line(f"float4 const x = *reinterpret_cast<float4 const*>({at});")
            out.line(f"{to}[0] = x.x; {to}[1] = x.y; {to}[2] = x.z; {to}[3] = x.w;")

    def _store(self, stmt: ast.Copy) -> None:
        tensor, out, x = self._tensor(stmt), self.out, stmt.name
        if tensor.workspace or tensor.elem is ast.Elem.F32:
            raise PlanError(f"a pointwise kernel writes the problem's output, and {x} is not it")
        at = f"g{tensor.name} + {packed_row(tensor.name, 'row')} + column"
        value = f"{{pack({x}[0], {x}[1]), pack({x}[2], {x}[3])}}"
        with out.block("if (group_at == 0)" if self.plan.groups > 1 else ""):
            out.line("int const batch_at = plane / kv_heads, kv_head = plane % kv_heads;")
            out.line(f"*reinterpret_cast<uint2*>({at}) = {value};")


def packed_row(tensor: str, row: str, batch: str = "batch_at") -> str:
    """C++ for the element offset of a packed row of Q or O; `kv_head` is in scope."""
    return (
        f"{batch} * {tensor}_stride_b + int64_t({row} / group) * {tensor}_stride_s + "
        f"int64_t(kv_head * group + {row} % group) * {tensor}_stride_h"
    )
