"""The same kernel with its warps held up at random wherever it touches what warps share.

A missing barrier shows only when a warp is late, and on an idle card none is: all run the same
instructions side by side. Here each warp sleeps now and then, for longer than a store by TMA takes
to begin, before every store to shared memory, arrival, barrier and asynchronous copy. A right
kernel stays right, since nothing that it waits for is taken away.
"""

from __future__ import annotations

import dataclasses
import re

from codegen.kernel import KernelSource

#: What begins a statement that other warps see, or that waits for them.
SHARED = re.compile(
    r"^(if \(leader[^)]*\) )?(SM90_U32x4_STSM|SM90_TMA_|tma_store|named_sync|named_arrive|arrive\("
    r"|expect\(|__syncthreads|chunk_at\(|cp_async|SM75_U32x4_LDSM|SM80_CP_ASYNC|warpgroup_fence)"
)
KERNEL = "__global__"
LATE = """
// one warp in four sleeps for up to 4 us; the clock is the same for all lanes of a warp
__device__ __forceinline__ void hold_up() {
  unsigned x = static_cast<unsigned>(clock()) + threadIdx.x / 32 * 0x9e3779b9u;
  x = (x ^ x >> 15) * 0x2c1b3c6du;
  x ^= x >> 13;
  if (x % 4 == 0) __nanosleep(x >> 20);
}
"""


def held_up(source: KernelSource) -> KernelSource:
    """Return the source with delays. Raises ValueError when there is no place for any."""
    lines = source.text.split("\n")
    start = next(i for i, line in enumerate(lines) if KERNEL in line)
    found = lines[:start]
    places = 0
    before = "{"
    for line in lines[start:]:
        text = line.strip()
        if SHARED.match(text) and before.endswith(("{", "}", ";")):
            found.append(f"{line[: len(line) - len(line.lstrip())]}hold_up();")
            places += 1
        found.append(line)
        if text and not text.startswith(("//", "#")):
            before = text
    if not places:
        raise ValueError("no statement of this kernel touches what warps share")
    return dataclasses.replace(source, text="\n".join((*found[:start], LATE, *found[start:])))
