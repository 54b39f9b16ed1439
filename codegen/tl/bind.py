"""Sketch × Problem × Point → `Program`: every hole filled, every size a number.

What a bound program guarantees to the interpreter and the translator:

1. `Kernel.body` holds Copy, Gemm, Arith, Custom, Reshape, For and If only.
2. Every global Copy has a shape of numbers and coordinates: axis "L" (the row tile) first, "D" (the
   column tile) where columns are tiled too, then the tensor's own axes. Row t of the tile at
   L = i is row i * rows + t of the tensor; reads past the end give 0.
3. `block_idx`, `block_n`, `split`, `M`, `N`, `scale` mean the same in every program.
4. A loop over key tiles is always `0:N / BN`; the masks, not the bounds, say what is visible. A
   split's loop runs over `split_start:split_end`.
5. Each scores tile of an attention program has one `Scale S, scale`.
6. An online softmax is `Softmax S` where it is provably the same, and every accumulator behind a
   Softmax has one `Normalize O, S`.
7. `Fill` stands before the outermost loop for every accumulator and running row vector.
8. Each Mask has one kind. A masked element contributes nothing, whatever stands between the mask
   and its use: -inf before an exponential or a row maximum, 0 in a sum or a GEMM. So does the tail
   of a key tile past N, stated or not.
9. In explicit statements, -inf - (-inf) is -inf and x / 0 is 0, so rows that see nothing give 0.
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
