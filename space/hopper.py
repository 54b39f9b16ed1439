"""Parameters and predicates of the Hopper back end: TMA, wgmma and warp specialisation."""

from __future__ import annotations

from space.params import Param

WARPGROUP_ROWS = 64  #: rows of one wgmma, and of one consumer warpgroup
PANEL_COLUMNS = 64  #: columns of a 128-byte swizzled row
ROW_BYTES = 128

#: consumer warpgroups -> registers a thread of (consumer, producer); the pool is what the launch
#: gives, 65536 / threads rounded down to 8
REGISTERS_BY_ROLE = {1: (240, 24), 2: (240, 24), 3: (160, 32), 4: (112, 24)}

HOPPER_PARAMS = (
    Param("BM", (64, 128, 192, 256), "query rows of a tile, 64 for each consumer warpgroup"),
    Param("BN", (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192), "key rows of a tile"),
    Param("consumer_warpgroups", (1, 2, 3, 4), "warpgroups that compute"),
    Param("stages", (1, 2, 3, 4), "K and V tiles in shared memory at once"),
    Param("overlap", (1, 0), "next scores issued before this tile's softmax"),
    Param("pingpong", (0, 1), "consumer warpgroups take turns at the tensor cores"),
    Param("rescale_threshold", (8, 0), "log2 growth of the maximum before O is rescaled"),
    Param("integer_max", (0, 1), "maxima of three by integer comparison"),
    Param("persistent", (1, 0, 2), "0 a tile a block, 1 static, 2 dynamic tile scheduler"),
    Param("head_group", (0, 1, 8, 32), "heads walked together, for the L2; 0 = all"),
    Param("skip", (0, 1), "a warpgroup passes over key tiles that none of its rows sees"),
    Param("causal_longest_first", (1, 0), "row blocks with most keys start first"),
)


def panels(columns: int) -> int:
    """Panels of 64 columns that hold `columns`."""
    return -(-columns // PANEL_COLUMNS)


def hopper_smem_bytes(rows: int, keys: int, head_dim: int, head_dim_v: int, stages: int) -> int:
    """Exact dynamic shared memory: Q, the K and V rings, O's own buffer, barriers."""
    q = rows * panels(head_dim) * ROW_BYTES
    kv = stages * keys * (panels(head_dim) + panels(head_dim_v)) * ROW_BYTES
    o = rows * panels(head_dim_v) * ROW_BYTES
    barriers = 8 * 2 * (1 + 2 * stages)
    return q + kv + o + barriers + 64
