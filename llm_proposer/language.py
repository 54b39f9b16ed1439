"""TL explained to a model: compact, true to the parser and the checker, with examples."""

from __future__ import annotations

SKETCH_EXAMPLE = """\
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

CODE_EXAMPLE = """\
Param BM in {64, 128}
Param BN in {32, 64, 128}
Allocate Q in global (M, D) with offset q_offset
Allocate K in global (N, D) with offset k_offset
Allocate V in global (N, DV) with offset v_offset
Allocate O in global (M, DV) with offset o_offset
Allocate S in register (BM, BN) as f32
Allocate O in register (BM, DV) as f32
Copy Q (BM, D) in coordinate [L = block_idx] from global to shared
for i = 0:N / BN
  Copy K (BN, D) in coordinate [L = i] from global to shared
  Compute GEMM Q, K.T and get S
  Compute Scale S, scale
  Compute Mask S, causal
  Compute Softmax S
  Copy V (BN, DV) in coordinate [L = i] from global to shared
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V and accumulate O
end
Copy O (BM, DV) in coordinate [L = block_idx] from register to global
"""

_STATEMENTS = """\
TL describes the dataflow of one thread block, which owns one tile of BM query rows of one head. \
One statement a line; `#` starts a comment. These statements exist and no others:

Copy NAME from LEVEL to LEVEL          LEVEL is global, shared or register
Compute GEMM A, B.T and get S          tensor-core product, f32 sums; `.T` is the mathematical \
transpose
Compute GEMM S, V and accumulate O     O += S V; an accumulator starts at 0
Compute Add|Subtract|Multiply|Divide A, B and get new A
                                       A a tile; B a tile, a row vector, a scalar name or a number
Compute Scale S, scale                 the softmax scale, exactly once
Compute Softcap S, c                   c tanh(S / c)
Compute Mask S, causal                 also window(l, r): l keys to the left, r to the right; \
window(l, r, k): the first k keys stay visible too; bias(B): a tensor added to the scores; \
alibi: head h of H adds -2^(-8 (h + 1) / H) times the distance; padding. All before the Softmax
Compute Softmax S                      one online step: running maximum and sum, S becomes \
exp(S - m), and every accumulator that depends on S is rescaled; the final Copy of that \
accumulator divides by the sum. Never write that arithmetic yourself as well
Compute OP A [and get B]               OP: Relu, Sigmoid, Tanh, Gelu, Exp, Exp2, Log, Neg; \
RowMax, RowSum (give a row vector)
Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
                                       right before a GEMM whose first operand is the output of \
an earlier GEMM, even with a Softmax between
for i = 0:N ... end                    over the tiles of key rows
if CONDITION ... else ... end

Copy a tensor from global before it is computed on; copy the output from register to global after \
the loop. Causal masks are aligned bottom-right. Rows past the end read as zero and are masked for \
you. Heads, batches and grouped K/V heads are the launch's: they appear nowhere.

Pipelines, stages, barriers, TMA, waits, warps and warp roles are NOT written: the translator \
makes them, and a search chooses them. There is no load_tile, no mma_op, no Python and no CUDA.
"""

_CODE_RULES = """\
TL code is the same program with every size filled in:

Param BM in {64, 128}                  a tile size with the values worth searching; \
`Param c = 30` is a number. Every name that is used and is no tile, length (M, N), head dim (D, \
DV), loop variable, block_idx or scale needs a Param
Allocate K in global (N, D) with offset k_offset
                                       needed for every tensor that is copied from or to global, \
the output too: rows M for query-like tensors, N for key-like ones
Allocate S in register (BM, BN) as f32
                                       needed for every tile that a Compute writes
Copy K (BN, D) in coordinate [L = i] from global to shared
                                       the i-th tile of BN rows; [L = block_idx] is the block's own
for i = 0:N / BN                       division rounds up

An extra input such as a bias over (query, key) pairs is `Allocate B in global (M, N) with offset \
b_offset`, `Copy B (BM, BN) in coordinate [L = block_idx, D = i] from global to shared`, \
`Compute Mask S, bias(B)`.
"""


def guide(sizes: bool) -> str:
    """Return the language as a model needs it: sketches, and with `sizes` TL code as well."""
    if not sizes:
        return f"{_STATEMENTS}\nExample, causal attention as a sketch:\n\n{SKETCH_EXAMPLE}"
    return (
        f"{_STATEMENTS}\n{_CODE_RULES}\nExample, causal attention as TL code "
        f"(head dims D and DV):\n\n{CODE_EXAMPLE}"
    )
