"""DecodePlan → CUDA C++ text: the frame of a decode kernel and its loop. Decides nothing."""

from __future__ import annotations

from codegen.cute.decode_plan import DecodePlan
from codegen.cute.decode_softmax import VOTE
from codegen.cute.decode_statements import DecodeStatements
from codegen.cute.emit import CXX_TYPES
from codegen.cute.pipeline import Point
from codegen.cute.plan import Buffer
from codegen.cute.pointwise import START_KERNEL_BEHIND
from codegen.cute.statements import comment
from codegen.cute.target import BARRIER, Target
from codegen.cute.writer import Writer
from codegen.kernel import Arg, ArgKind
from codegen.tl import ast

#: words of the frame beside those of the others, which no tile may be called
_WORDS = """
    batches column_warp diagonal grown key key_counts keys kv_head kv_heads moved of_row own_row0
    packed page pages pages_stride part query rows share table tiles_per_split to
"""
DECODE_WORDS = frozenset(_WORDS.split())
DECODE_SUFFIXES = ("chain", "part", "total")


def emit_partial(plan: DecodePlan, target: Target, out: Writer) -> None:
    """Write the kernel of one split."""
    base, kernel = plan.base, plan.base.kernel
    out.line(f'extern "C" __global__ void __launch_bounds__({plan.threads}, {base.blocks_per_sm})')
    out.line(f"{base.entry}(")
    out.parameters([_parameter(kernel, arg) for arg in base.args])
    with out.block(")"):
        _position(plan, out)
        statements = DecodeStatements(plan, target, out)
        statements.declare()
        statements.declare_diagonal()
        statements.bounds()
        _Loop(plan, target, out, statements).emit()
        # tiles of a latent cache fill an SM
        start_at_end = base.problem.latent
        if base.sm >= 90 and not start_at_end:
            out.line(START_KERNEL_BEHIND)
        for stmt in plan.after:
            if isinstance(stmt, ast.Copy) and stmt.dst is ast.Memory.GLOBAL:
                statements.store(stmt)
            else:
                statements.emit(stmt, inside=None)
        if base.sm >= 90 and start_at_end:
            out.line(START_KERNEL_BEHIND)


def _parameter(kernel: ast.Kernel, arg: Arg) -> str:
    match arg.kind:
        case ArgKind.POINTER:
            tensor = kernel.tensor(arg.name)
            if tensor is None:  # the output, which only a launch with one split writes
                return f"uint16_t* __restrict__ g{arg.name}"
            element = "float" if tensor.elem is ast.Elem.F32 else "uint16_t"
            return f"{element}{'' if tensor.workspace else ' const'}* __restrict__ g{arg.name}"
        case ArgKind.KEY_COUNTS | ArgKind.PAGES:
            return f"int const* __restrict__ {arg.name}"
        case ArgKind.PAGE_STRIDE:
            return f"int64_t {arg.name}_stride"
        case ArgKind.INT if arg.name == "batch":
            return "int batches"
    return f"{CXX_TYPES[arg.kind]} {arg.name.replace('.', '_stride_')}"


def _position(plan: DecodePlan, out: Writer) -> None:
    """Decode the 1-D grid, and find the block's sequence: its keys, its pages, its tensors."""
    base, columns = plan.base, plan.column_warps
    out.line("int const tid = threadIdx.x, lane = tid & 31;")
    if plan.shared:
        out.line("// a warp's rows, and its share of the keys in Q.K^T and of the columns in P.V")
        out.line(f"int const warp = (tid >> 5) / {columns}, column_warp = (tid >> 5) % {columns};")
    else:
        out.line("int const warp = tid >> 5;")
    out.line("uint32_t const smem_at = cast_smem_ptr_to_uint(smem);")
    out.line(f"int const row_blocks = ceil_div(rows, {base.rows});")
    out.line("int rest = blockIdx.x;")
    for name, count in (("block_idx", "row_blocks"), ("kv_head", "kv_heads"), ("split", "splits")):
        out.line(f"int const {name} = rest % {count};")
        out.line(f"rest /= {count};")
    out.line("int const batch = rest;")
    out.line(f"int const row0 = block_idx * {base.rows};  // row r is query r / group")
    out.line("int const keys = key_counts == nullptr ? N : min(key_counts[batch], N);")
    if base.problem.page:
        out.line("auto const table = pages + batch * pages_stride;")
    out.line("// this split's rows in the workspaces")
    out.line(
        "int64_t const own_row0 = ((int64_t(split) * batches + batch) * kv_heads + kv_head) * rows;"
    )
    for tensor in base.kernel.tensors:
        name = tensor.name
        if tensor.rows is ast.Rows.KEY:
            sequence = "" if base.problem.page else f"batch * {name}_stride_b + "
            out.line(f"g{name} += {sequence}kv_head * {name}_stride_h;")


class _Loop:
    """The loop over a split's key tiles, with what is loaded before it."""

    def __init__(
        self, plan: DecodePlan, target: Target, out: Writer, statements: DecodeStatements
    ) -> None:
        self.plan, self.target, self.out, self.statements = plan, target, out, statements
        self.loop = plan.loop
        assert plan.loop.pipeline is not None
        self.pipeline = plan.loop.pipeline
        self.voting = False  #: P is written, and its barrier still to come

    def emit(self) -> None:
        """Write the loads before the loop, and the loop."""
        out, loop = self.out, self.loop
        base = self.plan.base
        rows = self._buffer(self.plan.rows_tile)
        for stmt in self.plan.before:
            if isinstance(stmt, ast.Copy):
                comment(out, stmt)
                self.statements.define_copy(stmt, rows, None)
                out.line(self.target.issue(rows, "0"))
                self._fence()
            else:
                self.statements.emit(stmt, inside=None)
        if base.q_overlaps:
            self._hold_rows(rows, 0)
            out.line("__syncthreads();  // all warps hold their rows in registers")
        for use in self.pipeline.tiles:
            copy = loop.body[use.copy_at]
            assert isinstance(copy, ast.Copy)
            self.statements.define_copy(copy, self._buffer(use.name), loop.var)
        for group in self.pipeline.prologue:
            for name, ahead in group:
                self._issue(name, f"{loop.var}_lo + {ahead}" if ahead else f"{loop.var}_lo")
            self._fence()
        if base.a_fragments and not base.q_overlaps:
            self._hold_rows(rows, len(self.pipeline.prologue))
        elif not self.target.asynchronous and not base.q_overlaps:
            self.target.land(out, (rows,), "0", 0)
        comment(out, ast.For(loop.var, loop.lo, loop.hi, loop.body))
        var = loop.var
        with out.block(f"for (int {var} = {var}_lo; {var} < {var}_hi; ++{var})"):
            self._body()

    def _hold_rows(self, rows: Buffer, pending: int) -> None:
        """Read the rows into registers; `pending` younger groups may still be in flight."""
        self.target.land(self.out, (rows,), "0", pending)
        self.statements.load_a_fragments(rows.name)

    def _body(self) -> None:
        """Write one iteration."""
        loop, statements = self.loop, self.statements
        points = {p.at: p for p in self.pipeline.points}
        masks = {m.at: m for m in loop.masks}
        for at in range(len(loop.body) + 1):
            if (point := points.get(at)) is not None:
                self._meet(point)
            if (mask := masks.get(at)) is not None:
                stated = at < len(loop.body) and statements.is_mask(loop.body[at], mask)
                statements.mask(loop, mask, loop.body[at] if stated else None, always=False)
            if at == len(loop.body):
                continue
            stmt = loop.body[at]
            if isinstance(stmt, ast.Copy) and stmt.dst is ast.Memory.SHARED:
                continue
            if self._exchange(stmt):
                continue
            statements.emit(stmt, inside=loop)
        assert not self.voting

    def _exchange(self, stmt: ast.Stmt) -> bool:
        """Write a statement in which warps of the same rows agree; False for the others."""
        shared = self.statements.shared
        if shared is None:
            return False
        if isinstance(stmt, ast.Custom) and stmt.op == "Softmax":
            comment(self.out, stmt)
            shared.weigh(self.plan.base.softmax(stmt.name))
            self.voting = True
            return True
        if isinstance(stmt, ast.Reshape):
            comment(self.out, stmt)
            if self.voting:
                self.out.line(VOTE)
                self.voting = False
            shared.settle(self.plan.base.softmax(stmt.name))
            return True
        return False

    def _meet(self, point: Point) -> None:
        """Wait for the tiles of a barrier, and start the copies that it makes room for."""
        out, var = self.out, self.loop.var
        copies = {u.name: self.loop.body[u.copy_at] for u in self.pipeline.tiles}
        for name in point.ready:
            comment(out, copies[name])
        ready = tuple(self._buffer(n) for n in point.ready)
        self.target.land(out, ready, var, point.pending, VOTE if self.voting else BARRIER)
        self.voting = False
        for issue in point.issues:
            ahead = f" + {issue.distance}" if issue.distance else ""
            self._issue(issue.name, f"{var}{ahead}")
        if point.issues:
            self._fence()

    def _issue(self, name: str, index: str) -> None:
        call = self.target.issue(self._buffer(name), index)
        self.out.line(f"if ({index} < {self.loop.var}_hi) {call}")

    def _fence(self) -> None:
        if self.target.asynchronous:
            self.out.line("cp_async_fence();")

    def _buffer(self, name: str) -> Buffer:
        buffer = self.plan.base.buffer(name)
        assert buffer is not None
        return buffer
