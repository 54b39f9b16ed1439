"""What the translator hands over: source text, how to launch it, and the compiled form."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class ArgKind(StrEnum):
    """How one kernel argument is packed."""

    POINTER = "pointer"  # 8 bytes, a tensor's data pointer
    STRIDE = "stride"  # int64, elements
    INT = "int"  # int32: a length, a head count
    FLOAT = "float"  # float32: scale and other run-time scalars
    TENSOR_MAP = "tensor_map"  # 128 bytes: a TMA descriptor of a tensor, see Arg.box
    TICKETS = "tickets"  # pointer to one int32 that is 0 between launches: a tile scheduler's
    KEY_COUNTS = "key_counts"  # pointer to int32 [batch], each sequence's keys; null: N for all
    PAGES = "pages"  # pointer to int32 [batch, pages a sequence]: the block table of a paged cache
    PAGE_STRIDE = "page_stride"  # int64, elements from one sequence's pages to the next


@dataclass(frozen=True, slots=True)
class Arg:
    """One kernel argument.

    `name` says what to pass: a tensor's name for POINTER (`Q`); `Q.b`, `Q.s`, `Q.h` for the
    element strides of its batch, row and head axes; `M` or `N` (query and key length), `heads`
    (query heads), `group` (query heads per KV head), `kv_heads`, `splits` or any other scalar of
    the program for INT and FLOAT (`scale`). The pages of a paged K or V are its batch axis.
    """

    kind: ArgKind
    name: str
    #: TENSOR_MAP only: (columns, rows) of the box that one copy moves, swizzled by the bytes of its
    #: columns; the map has axes (columns, rows, heads, batch), elements outside it read as zero
    box: tuple[int, int] = (0, 0)
    #: TENSOR_MAP only: with more than 1 the box also holds so many heads of one KV head, of each
    #: row before the next one's; the map then has axes (columns, group, rows, KV heads, batch)
    pack: int = 1


@dataclass(frozen=True, slots=True)
class GridAxis:
    """One factor of the 1-D grid: ceil(length / tile), where `length` is an argument's name.

    `heads`, `kv_heads`, `batch` and `splits` are lengths too, with tile 1, and `group`, whose tile
    is the query heads packed into rows; `rows` is `M` times `group`: all heads of a KV head packed.
    """

    length: str
    tile: int


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start one `__global__` function. The grid is 1-D: the product of its axes.

    A cluster takes the place of a block where `cluster` is more than 1.
    """

    entry: str
    threads: int
    smem_bytes: int
    grid: tuple[GridAxis, ...]
    args: tuple[Arg, ...]
    #: blocks for each SM at most, 0 for no limit: a persistent kernel walks the rest of the grid
    persistent: int = 0
    #: only when the keys are in more than one split: with one, the kernel before wrote the output
    if_split: bool = False
    #: may be scheduled while the kernel before it ends, whose results it waits for itself
    dependent: bool = False
    #: blocks that start together for each element of the grid: the kernel's `__cluster_dims__`
    cluster: int = 1


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How many splits the keys of a decode problem get, from its lengths and the card.

    As many as give every SM `blocks_per_sm` blocks, none with fewer than `min_tiles` tiles of
    `keys` keys; then as few as leave none empty at the longest length.
    """

    rows: int  #: rows of a block, query heads packed
    keys: int  #: keys of a tile
    blocks_per_sm: int
    min_tiles: int


@dataclass(frozen=True, slots=True)
class Workspace:
    """A float32 tensor that one kernel of a program hands to the next.

    `shape` names each axis: `batch`, `heads`, `M`, `kv_heads`, `rows`, `splits`, a whole number, or
    a parameter of the program.
    """

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelSource:
    """Emitted CUDA C++ and everything needed to build and launch it."""

    text: str
    arch: str  #: the generation the text was written for: "sm_75", "sm_80", "sm_89", "sm_90a"
    launches: tuple[Launch, ...]
    #: global tensors in order: (name, "in" or "out")
    tensors: tuple[tuple[str, str], ...]
    workspaces: tuple[Workspace, ...] = ()
    splits: SplitRule | None = None  #: of a decode program

    @property
    def digest(self) -> str:
        """SHA-256 of the text, hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Resources:
    """What the compiler reported for one `__global__` function."""

    entry: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_smem_bytes: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """A built kernel: machine code for `arch`, with its log and resources."""

    image: bytes
    arch: str
    source_digest: str
    key: str  #: cache key: digest of everything that changes the image
    log: str
    resources: tuple[Resources, ...]
    compile_s: float
    nvrtc_version: str
