"""Blocks of one cluster that share key tiles: each loads a part of a tile into all of them.

A slot is filled anew when the consumers of every block have let go of it, so each of them arrives
on the `empty` barriers of all blocks. A block's own `full` barrier counts the bytes of the whole
tile, whoever brings them.
"""

from __future__ import annotations

PRELUDE = """
// arrives on a barrier of this or of another block of the cluster
__device__ __forceinline__ void arrive_in(int block, int number) {
  asm volatile(
      "{.reg .b32 at; mapa.shared::cluster.u32 at, %0, %1;"
      "mbarrier.arrive.shared::cluster.b64 _, [at];}"
      ::"r"(cast_smem_ptr_to_uint(barrier_at(number))), "r"(block) : "memory");
}
// no block's memory is written before its barriers are there, which a fence has made known
__device__ __forceinline__ void begin_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed; barrier.cluster.wait;" ::: "memory");
}
// no block ends while another may still write to its memory
__device__ __forceinline__ void end_cluster() {
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
}
"""


def everyone(blocks: int) -> str:
    """C++ for the blocks that a multicast copy reaches: all of the cluster."""
    return f"uint16_t({(1 << blocks) - 1:#x})"
