"""A search for tests: fixed spaces that later choices do not change, trials of every kind."""

from __future__ import annotations

from llm_proposer.describe import Subject
from runs.record import (
    Basis,
    Broken,
    Finalist,
    History,
    Measured,
    Outcome,
    Rejected,
    Stage,
    Timing,
    TrialClass,
    TrialRecord,
)
from space.gpu import GPUS
from space.params import Param, Point, Space
from space.variant import DType, Problem, Shape

SKETCH = """\
Copy Q from global to shared
for i = 0:N
  Copy K from global to shared
  Compute GEMM Q, K.T and get S
  Compute Scale S, scale
  Compute Mask S, causal
  Compute Softmax S
  Copy V from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
end
Copy O from register to global
"""

GQA = Problem("gqa", DType.BF16, 128, 128, True)
MLA = Problem("mla", DType.BF16, 192, 128, True)
SHAPES = (
    Shape(4, 32, 8, 4096, 4096, 128, 128, True),
    Shape(1, 32, 8, 16384, 16384, 128, 128, True),
)

SYNC_SPACE = Space(
    (
        Param("BM", (64, 128), "query rows of a tile"),
        Param("BN", (32, 64, 128), "key rows of a tile"),
        Param("warps", (4, 8), "warps of a block, each with BM/warps rows"),
        Param("stages", (1, 2, 3), "K and V tiles in shared memory at once"),
        Param("swizzle", (128, 0), "shared-memory layout: bytes of the swizzle, 0 = padded"),
        Param("q_in_registers", (0, 1), "Q read from shared memory once, or at every step"),
        Param("p_in_registers", (1, 0), "P handed on in registers or through shared memory"),
        Param("rescale_threshold", (8, 0), "log2 growth of the maximum before O is rescaled"),
        Param("peel", (0, 1), "masked blocks in a loop of their own"),
        Param("blocks_per_sm", (1, 2), "resident blocks the compiler aims at"),
        Param("head_group", (1, 0), "heads walked together, for the L2; 0 = all"),
        Param("epilogue_smem", (1, 0), "O written through shared memory, or directly"),
        Param("causal_longest_first", (1, 0), "row blocks with most keys start first"),
    )
)
BASE = Point.of(
    {
        "BM": 128, "BN": 64, "warps": 8, "stages": 1, "swizzle": 128, "q_in_registers": 0,
        "p_in_registers": 1, "rescale_threshold": 8, "peel": 0, "blocks_per_sm": 1,
        "head_group": 1, "epilogue_smem": 1, "causal_longest_first": 1,
    }
)  # fmt: skip
SUBJECT = Subject("forward", SKETCH, GQA, GPUS["l40s"], SYNC_SPACE, SHAPES)

HOPPER_SPACE = Space(
    (
        Param("BM", (64, 128, 192, 256), "query rows of a tile, 64 a consumer warpgroup"),
        Param("BN", (32, 48, 64, 80, 96, 112, 128), "key rows of a tile"),
        Param("consumer_warpgroups", (1, 2, 3, 4), "warpgroups that compute"),
        Param("stages", (1, 2, 3, 4), "K and V tiles in shared memory at once"),
        Param("q_stages", (1, 2), "Q tiles in shared memory at once"),
        Param("out_buffer", (1, 0), "O is staged in a buffer of its own, or over Q"),
        Param("overlap", (1, 0), "next scores issued before this tile's softmax"),
        Param("pingpong", (0, 1), "consumer warpgroups take turns at the tensor cores"),
        Param("rescale_threshold", (8, 0), "log2 growth of the maximum before O is rescaled"),
        Param("integer_max", (0, 1), "maxima of three by integer comparison"),
        Param("persistent", (1, 0, 2), "0 a tile a block, 1 static, 2 dynamic tile scheduler"),
        Param("head_group", (0, 1, 8), "heads walked together, for the L2; 0 = all"),
        Param("skip", (0, 1), "a warpgroup passes over key tiles that none of its rows sees"),
        Param("causal_longest_first", (1, 0), "row blocks with most keys start first"),
    )
)
HOPPER_BASE = Point.of(
    {
        "BM": 128, "BN": 80, "consumer_warpgroups": 2, "stages": 2, "q_stages": 1,
        "out_buffer": 1, "overlap": 0, "pingpong": 0, "rescale_threshold": 0, "integer_max": 0,
        "persistent": 0, "head_group": 1, "skip": 0, "causal_longest_first": 0,
    }
)  # fmt: skip


def timing(shape: Shape, us: float, basis: Basis = Basis.MEASURED) -> Timing:
    return Timing(shape, us, us * 0.99, us * 1.01, 25, basis)


def trial(index: int, outcome: Outcome, **changes: int) -> TrialRecord:
    return TrialRecord(index, GQA, "forward", BASE.replace(**changes), "sampler", outcome)


def right(*times: float) -> Measured:
    return Measured(tuple(timing(s, t) for s, t in zip(SHAPES, times, strict=True)), 1.1)


def wrong(kind: TrialClass, stage: Stage, reason: str) -> Rejected:
    return Rejected(kind, stage, reason)


HISTORY = History(
    (
        trial(0, right(2100.0, 7600.0), rescale_threshold=0),
        trial(1, right(1900.0, 7000.0)),
        trial(2, right(1850.0, 7400.0), BN=32),
        trial(
            3,
            wrong(TrialClass.COMPILE_ERROR, Stage.COMPILE, "272 bytes of spills\nptxas: ..."),
            BN=128,
            q_in_registers=1,
        ),
        trial(
            4,
            wrong(TrialClass.COMPILE_ERROR, Stage.COMPILE, "272 bytes of spills"),
            BN=128,
            peel=1,
            q_in_registers=1,
        ),
        trial(5, wrong(TrialClass.WRONG_OUTPUT, Stage.VERIFY, "row 17 differs by 0.3"), stages=2),
        trial(6, Broken(Stage.LAUNCH, "the driver died"), stages=3),
    )
)
PEERS = (
    Finalist(SHAPES[0], None, "fa2", timing(SHAPES[0], 1880.0)),
    Finalist(SHAPES[0], None, "cudnn", timing(SHAPES[0], 1990.0)),
    Finalist(SHAPES[1], None, "fa2", timing(SHAPES[1], 6900.0)),
)
