"""Sketch × Problem × Point → `Program`: every hole filled, every size a number.

What a bound program guarantees to the interpreter and the translator:

1. `Kernel.body` holds Copy, Gemm, Arith, Custom, Reshape, For and If only.
2. Every global Copy has a shape of numbers and coordinates: axis "L" (the row tile) first, "D" (the
   column tile) where columns are tiled too, then the tensor's own axes. Row t of the tile at
   L = i is row i * rows + t of the tensor; reads past the end give 0.
3. `block_idx`, `block_n`, `split`, `M`, `N`, `scale` mean the same in every program. The problem's
   tensors are Q, K, V and O. Other run-time numbers are `Program.scalars`.
4. A loop over key tiles is always `0:N / BN`; the masks, not the bounds, say what is visible. The
   columns of a plain GEMM go `0:head_dim / BK`. A split's loop is `split_start:split_end`: with
   T = ceil(N / BN) tiles and t = ceil(T / num_splits), split s has tiles min(s * t, T) to
   min(s * t + t, T). What a later kernel reads as `X_s` is a float32 workspace of that name with
   the axis "splits", written at `splits = split` and read at `splits = s`.
5. Each scores tile of an attention program has one `Scale S, scale`, right behind the GEMMs that
   give it, or where it stands when something between does not commute with it.
6. An online softmax is `Softmax S` where it is provably the same, and every accumulator behind a
   Softmax has one `Normalize O, S` behind its loop.
7. `Fill` stands before the outermost loop for every accumulator and running row vector.
8. Each Mask has one kind: causal, window(l, r), bias(B), padding. A masked element contributes
   nothing, whatever stands between the mask and its use: -inf before an exponential or a row
   maximum, 0 in a sum or a GEMM. So does the tail of a key tile past N, stated or not.
9. In explicit statements, -inf - (-inf) is -inf and x / 0 is 0, so rows that see nothing give 0.
   `RowMax S and get m`, `Max m, x`, `Rescale O, alpha` and `Normalize O, l` take row vectors, which
   are tiles of one column and broadcast over columns.
"""

from __future__ import annotations

from codegen.errors import TLError
from codegen.tl.ast import Program, Sketch
from codegen.tl.binding import assemble
from codegen.tl.checker import check
from codegen.tl.evaluate import read_params
from codegen.tl.recognise import recognised
from space.params import Point
from space.variant import Problem


def sketch_choices(sketch: Sketch) -> dict[str, tuple[int, ...]]:
    """Return what the sketch's own Params restrict the search to, by the search's names."""
    return dict(read_params(sketch, None, None).choices)


def bind(sketch: Sketch, problem: Problem, point: Point) -> Program:
    """Fill every hole of `sketch` at `point`. Raises TLError with all diagnostics."""
    if diagnostics := check(sketch, problem, None, point):
        raise TLError(diagnostics)
    return recognised(assemble(sketch, problem, point))
