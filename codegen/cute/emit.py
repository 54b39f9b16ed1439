"""KernelPlan → CUDA C++ text: the frame of a kernel and its loops. Decides nothing."""

from __future__ import annotations

from codegen.cute.packing import plane_position
from codegen.cute.plan import Buffer, KernelPlan, LoopPlan
from codegen.cute.statements import Statements, comment
from codegen.cute.target import Target
from codegen.cute.writer import Writer
from codegen.kernel import ArgKind
from codegen.tl import ast

CXX_TYPES = {ArgKind.STRIDE: "int64_t", ArgKind.INT: "int", ArgKind.FLOAT: "float"}


def emit(plans: tuple[KernelPlan, ...], target: Target) -> str:
    """Return the source of all kernels of a program. Same plans, same bytes."""
    out = Writer()
    problem = plans[0].problem
    out.line(f"// {problem.key} for {target.arch}")
    out.line("// " + " ".join(f"{k}={v}" for k, v in plans[0].program.params))
    target.prelude(out, problem.dtype)
    for plan in plans:
        out.line()
        _kernel(plan, target, out)
    return out.text()


def _signature(plan: KernelPlan) -> list[str]:
    parts = []
    for arg in plan.args:
        if arg.kind is ArgKind.POINTER:
            tensor = plan.kernel.tensor(arg.name)
            assert tensor is not None
            element = "float" if tensor.elem is ast.Elem.F32 else "uint16_t"
            const = "" if tensor.output or tensor.workspace else " const"
            parts.append(f"{element}{const}* __restrict__ g{arg.name}")
        else:
            parts.append(f"{CXX_TYPES[arg.kind]} {arg.name.replace('.', '_stride_')}")
    return parts


def _kernel(plan: KernelPlan, target: Target, out: Writer) -> None:
    out.line(f'extern "C" __global__ void __launch_bounds__({plan.threads}, {plan.blocks_per_sm})')
    out.line(f"{plan.entry}(")
    out.parameters(_signature(plan))
    with out.block(")"):
        out.line("int const tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;")
        out.line("uint32_t const smem_at = cast_smem_ptr_to_uint(smem);")
        _block_position(plan, out)
        _tensor_bases(plan, out)
        statements = Statements(plan, target, out)
        statements.declare()
        statements.declare_diagonal()
        _body(plan, target, out, statements, plan.kernel.body)


def _block_position(plan: KernelPlan, out: Writer) -> None:
    """Decode the 1-D grid into block_idx, further block axes, head and batch."""
    out.line(f"int const row_blocks = ceil_div(M, {plan.rows});")
    inner = [a for a in plan.grid if a.length not in ("M", "heads", "batch")]
    counts = ["row_blocks"]
    for axis in inner:
        name = "column_blocks" if axis.length == "N" else "splits"
        blocks = f"ceil_div(N, {axis.tile})" if axis.length == "N" else axis.length
        out.line(f"int const {name} = {blocks};")
        counts.append(name)
    out.line(f"int const planes = gridDim.x / ({' * '.join(counts)});  // heads x batch")
    out.line("int rest = blockIdx.x;")
    for axis, count in zip(inner, counts[1:], strict=True):
        name = "block_n" if axis.length == "N" else "split"
        out.line(f"int const {name} = rest % {count};")
        out.line(f"rest /= {count};")
    tile_position(plan, out, "rest")
    out.line(f"int const row0 = block_idx * {plan.rows};")


def tile_position(plan: KernelPlan, out: Writer, tile: str, cluster: int = 1) -> None:
    """Decode a tile's number into block_idx, plane, head and batch.

    The blocks of a cluster have one number; theirs on the row axis follow one another.

    Planes (heads of all batches) are walked in groups, whose keys and values share the L2; within
    a group the plane changes fastest, so that row blocks of one length start together.
    """
    group = plan.head_group
    if group == 1:
        out.line(f"int const row = {tile} % row_blocks, plane = {tile} / row_blocks;")
    elif group == 0:
        out.line(f"int const row = {tile} / planes, plane = {tile} % planes;")
    else:
        out.line(f"int const first = {tile} / ({group} * row_blocks) * {group};")
        out.line(f"int const width = min({group}, planes - first);")
        out.line(f"int const within = {tile} - first * row_blocks;")
        out.line("int const row = within / width, plane = first + within % width;")
    block = "row_blocks - 1 - row" if plan.longest_first else "row"
    if cluster > 1:
        out.line(f"int const first_block = ({block}) * {cluster};")
        block = "first_block + cluster_rank"
    out.line(f"int const block_idx = {block};")
    plane_position(plan, out)


def _tensor_bases(plan: KernelPlan, out: Writer) -> None:
    for tensor in plan.kernel.tensors:
        if tensor.workspace or tensor.output:
            continue  # outputs are addressed where they are written: fewer live registers
        head = "head" if tensor.rows is ast.Rows.QUERY else "head / group"
        name = tensor.name
        out.line(f"g{name} += batch * {name}_stride_b + ({head}) * {name}_stride_h;")


def _body(
    plan: KernelPlan,
    target: Target,
    out: Writer,
    statements: Statements,
    body: tuple[ast.Stmt, ...],
) -> None:
    """Emit statements outside any loop, copies to shared first issued and then landed."""
    waiting: list[Buffer] = []
    for stmt in body:
        if isinstance(stmt, ast.Copy) and stmt.dst is ast.Memory.SHARED:
            buffer = plan.buffer(stmt.name)
            assert buffer is not None
            comment(out, stmt)
            statements.define_copy(stmt, buffer, None)
            out.line(target.issue(buffer, "0"))
            if target.asynchronous:
                out.line("cp_async_fence();")
            waiting.append(buffer)
            if buffer.name in plan.a_fragments and not _explicit_load(body, buffer.name):
                _land(target, out, waiting)
                statements.load_a_fragments(buffer.name)
        elif isinstance(stmt, ast.For):
            if waiting and not target.asynchronous:
                _land(target, out, waiting)
            loop = plan.loop(stmt)
            if loop.pipeline is None and waiting:
                _land(target, out, waiting)
            with out.block(""):
                _loop(plan, target, out, statements, stmt, loop)
            waiting.clear()  # groups end in order: the loop's first wait covers them
        else:
            if waiting and statements.reads_shared(stmt):
                _land(target, out, waiting)
            statements.emit(stmt, inside=None)


def _explicit_load(body: tuple[ast.Stmt, ...], name: str) -> bool:
    return any(
        isinstance(s, ast.Copy) and s.name == name and s.src is ast.Memory.SHARED for s in body
    )


def _land(target: Target, out: Writer, waiting: list[Buffer]) -> None:
    target.land(out, tuple(waiting), "0", 0)
    waiting.clear()


def _loop(
    plan: KernelPlan,
    target: Target,
    out: Writer,
    statements: Statements,
    stmt: ast.For,
    loop: LoopPlan,
) -> None:
    var = loop.var
    statements.loop_bounds(loop)
    pipeline = loop.pipeline
    if pipeline is not None:
        for use in pipeline.tiles:
            copy = loop.body[use.copy_at]
            assert isinstance(copy, ast.Copy)
            buffer = plan.buffer(use.name)
            assert buffer is not None
            statements.define_copy(copy, buffer, var)
        if plan.q_overlaps:
            out.line("__syncthreads();  // all warps hold their rows in registers")
        for group in pipeline.prologue:
            for name, ahead in group:
                _issue(
                    plan, target, out, name, f"{var}_lo + {ahead}" if ahead else f"{var}_lo", var
                )
            if target.asynchronous:
                out.line("cp_async_fence();")
    out.line(f"int {var} = {var}_lo;")
    if loop.peel and loop.masks:
        comment(out, stmt, "tiles that no mask touches")
        with out.block(f"for (; {var} < {var}_full; ++{var})"):
            _loop_body(plan, target, out, statements, loop, masked=False)
        comment(out, stmt, "tiles on the mask's edge")
        with out.block(f"for (; {var} < {var}_hi; ++{var})"):
            _loop_body(plan, target, out, statements, loop, masked=True)
    else:
        comment(out, stmt)
        with out.block(f"for (; {var} < {var}_hi; ++{var})"):
            _loop_body(plan, target, out, statements, loop, masked=None)


def _issue(plan: KernelPlan, target: Target, out: Writer, name: str, index: str, var: str) -> None:
    buffer = plan.buffer(name)
    assert buffer is not None
    out.line(f"if ({index} < {var}_hi) {target.issue(buffer, index)}")


def _loop_body(
    plan: KernelPlan,
    target: Target,
    out: Writer,
    statements: Statements,
    loop: LoopPlan,
    masked: bool | None,
) -> None:
    """Emit one iteration. `masked` None decides at run time whether the masks are applied."""
    points = {p.at: p for p in loop.pipeline.points} if loop.pipeline else {}
    masks = {m.at: m for m in loop.masks}
    for at in range(len(loop.body) + 1):
        if (point := points.get(at)) is not None:
            for name in point.ready:
                comment(out, loop.body[_copy_at(loop, name)])
            buffers = tuple(b for n in point.ready if (b := plan.buffer(n)) is not None)
            target.land(out, buffers, loop.var, point.pending)
            for issue in point.issues:
                ahead = f" + {issue.distance}" if issue.distance else ""
                _issue(plan, target, out, issue.name, f"{loop.var}{ahead}", loop.var)
            if point.issues and target.asynchronous:
                out.line("cp_async_fence();")
        if (mask := masks.get(at)) is not None and masked is not False:
            stated = at < len(loop.body) and statements.is_mask(loop.body[at], mask)
            statements.mask(loop, mask, loop.body[at] if stated else None, always=masked is True)
        if at == len(loop.body):
            continue
        stmt = loop.body[at]
        if isinstance(stmt, ast.For):
            with out.block(""):
                _loop(plan, target, out, statements, stmt, plan.loop(stmt))
        elif not (isinstance(stmt, ast.Copy) and stmt.dst is ast.Memory.SHARED):
            statements.emit(stmt, inside=loop)


def _copy_at(loop: LoopPlan, name: str) -> int:
    assert loop.pipeline is not None
    return next(t.copy_at for t in loop.pipeline.tiles if t.name == name)
