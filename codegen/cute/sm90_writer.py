"""What producer and consumers of a Hopper kernel share: the walk over tiles, and the rings."""

from __future__ import annotations

from collections.abc import Callable

from codegen.cute.emit import tile_position
from codegen.cute.sm90_plan import Ring, Sm90Plan
from codegen.cute.statements import Statements
from codegen.cute.writer import Writer
from codegen.tl import ast

STEP = 16  #: columns of one wgmma step


class Sm90Writer:
    """The plan, the writer and the names that both roles use."""

    def __init__(self, plan: Sm90Plan, out: Writer, statements: Statements) -> None:
        self.plan, self.out, self.statements = plan, out, statements
        self.row_ring = next(r for r in plan.rings if r.per_tile)
        gemms = [s for s in (*plan.front, *plan.back) if isinstance(s, ast.Gemm)]
        self.front_gemm, self.back_gemm = gemms
        self.k = plan.ring(self.front_gemm.b.name)
        self.v = plan.ring(self.back_gemm.b.name)
        self.var = plan.loop.var

    def tiles(self, body: Callable[[], None], following: Callable[[], None]) -> None:
        """Write the walk over tiles; `following` writes how the next one is found."""
        out, plan = self.out, self.plan
        cluster = plan.cluster
        clusters = f" / {cluster}" if cluster > 1 else ""
        out.line(f"int tile = blockIdx.x{clusters};")
        out.line("#pragma unroll 1")
        with out.block("while (tile < tiles)"):
            tile_position(plan.base, out, "tile", cluster)
            if cluster > 1:
                rows = plan.base.queries
                out.line("// all blocks of a cluster walk the keys that any of them sees")
                out.line(f"int const cluster_row0 = first_block * {rows};")
                out.line(f"int const row0 = block_idx * {rows};")
                self.statements.loop_bounds(plan.loop, "cluster_row0", cluster * rows)
            else:
                out.line(f"int const row0 = block_idx * {plan.base.queries};")
                self.statements.loop_bounds(plan.loop)
            body()
            if plan.scheduler == 2:
                following()
            else:
                step = "tiles" if plan.scheduler == 0 else f"gridDim.x{clusters}"
                out.line(f"tile += {step};")

    def row_coordinates(self, row: str) -> tuple[str, ...]:
        """C++ for where rows from query `row` on lie in the map of Q or O, behind the column."""
        if self.plan.base.pack_heads == 1:
            return row, "head", "batch"
        return "first_head", row, "kv_head", "batch"

    def draw_tile(self) -> None:
        """The producer draws the next tile's number and publishes it to the consumers."""
        out, first = self.out, self.plan.tile_barrier
        out.line("// each tile past the grid is drawn once, each block draws once in vain")
        with out.block(""):
            out.line("int const ticket = atomicAdd(tickets, 1);")
            out.line(
                "if (ticket == tiles - 1) *tickets = 0;  // the last: ready for the next launch"
            )
            out.line("tile = gridDim.x + ticket;")
            out.line("uint32_t const slot = drawn % 2;")
            out.line(f"wait({first + 2} + slot, (drawn / 2 & 1) ^ 1);")
            out.line("tile_slots()[slot] = tile;")
            out.line(f"arrive({first} + slot);")
            out.line("++drawn;")

    def read_tile(self) -> None:
        """A consumer reads the tile's number that the producer published."""
        out, first = self.out, self.plan.tile_barrier
        with out.block(""):
            out.line("uint32_t const slot = drawn % 2;")
            out.line(f"wait({first} + slot, drawn / 2 & 1);")
            out.line("tile = tile_slots()[slot];")
            out.line("__syncwarp();")
            out.line(f"if (lane == 0) arrive({first + 2} + slot);")
            out.line("++drawn;")

    def release(self, ring: Ring) -> None:
        """Give the slot in use back to the producer and step on."""
        out, name = self.out, ring.name
        slot = f"{ring.empty} + {name}_count % {ring.stages}"
        if ring.loaders > 1:
            out.line(f"if (tid % 128 < {ring.loaders}) arrive_in(tid % 128, {slot});")
        else:
            out.line(f"if (leader) arrive({slot});")
        out.line(f"++{name}_count;")

    def wait_full(self, ring: Ring) -> None:
        name, stages = ring.name, ring.stages
        self.out.line(
            f"wait({ring.barrier} + {name}_count % {stages}, {name}_count / {stages} & 1);"
        )

    def out_columns(self) -> int:
        fragment = self.plan.base.fragment(self.back_gemm.out)
        assert fragment is not None
        return fragment.columns
