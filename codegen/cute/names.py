"""Names of a program that would collide with the emitted C++, changed before planning.

Tensors keep their names, since launches pass them by name; tiles, row vectors and loop variables
that the frame of a kernel uses too get a trailing underscore.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from codegen.errors import PlanError
from codegen.tl import ast

#: identifiers of the emitted frame, of its device functions and of C++ that a tile may be called
_WORDS = """
    M N a alibi_slope and arrive arrive_in asm at at0 auto b batch begin_cluster bitand bitor
    blockDim blockIdx block_idx block_n bool break c case catch ceil_div char chunk class
    cluster_rank cluster_row0 column column_blocks compl const constexpr consumer continue count
    cute d default delete diagonal do double drawn e else end_cluster enum erff exp2_approx
    expect explicit export extern fabsf false first first_block first_head float fmaf fmaxf for
    friend from goto gridDim group grown h head heads high hold huge if index inline int int64_t
    inverse j k kept kind kv_head kv_heads kv_plane l lane last ldsm ldsm_t leader left limit
    long low m max min mma moved mutable n name namespace new noexcept not nullptr operator or
    out out_at out_row own own_row0 pack packed packs panel part pass pin plane planes private
    protected public quad_max quad_sum r register rest return ring row row0 row_blocks scale
    short signed sizeof smem smem_at source split splits stage static struct switch t template
    this threadIdx throw ticket tickets tid tile tiles tiles_per_split total true try typedef
    typename uint128_t uint16_t uint32_t uint64_t union unpack unsigned using valid values var
    virtual void volatile wait warp warpgroup while width within x xor y z
"""
RESERVED = frozenset(_WORDS.split())
#: what the emitter appends to a tile's name
_SUFFIXES = """
    max sum shift limit top log2 slack huge r r8 a to staged count lo hi full own stride_b
    stride_s stride_h sinks jump
"""
DERIVED = tuple(_SUFFIXES.split())


def safe(
    program: ast.Program, words: frozenset[str] = frozenset(), suffixes: tuple[str, ...] = ()
) -> ast.Program:
    """Return the program with colliding names changed.

    `words` and `suffixes` are those of a frame that uses more than the common ones. Raises
    PlanError where the name is a launch argument: a tensor's or a run-time scalar's.
    """
    reserved, derived = RESERVED | words, DERIVED + suffixes
    for scalar in program.scalars:
        if scalar in reserved and scalar != "scale":  # which is the kernel's own
            raise PlanError(f"a scalar cannot be called {scalar}: the kernel uses the name")
    kernels = tuple(_kernel(k, reserved, derived) for k in program.kernels)
    return replace(program, kernels=kernels)


def _kernel(kernel: ast.Kernel, reserved: frozenset[str], suffixes: tuple[str, ...]) -> ast.Kernel:
    tensors = {t.name for t in kernel.tensors}
    loops = {s.var for s in ast.walk(kernel.body) if isinstance(s, ast.For)}
    names = {t.name for t in kernel.tiles} | loops
    derived = {f"{n}_{suffix}" for n in names | tensors for suffix in suffixes}
    derived |= {f"g{t}" for t in tensors}
    for tensor in sorted(tensors):
        if tensor in reserved:
            raise PlanError(f"a tensor cannot be called {tensor}: the kernel uses the name")
    renamed = {name: f"{name}_" for name in sorted(names - tensors) if name in reserved | derived}
    if not renamed:
        return kernel
    tiles = tuple(replace(t, name=renamed.get(t.name, t.name)) for t in kernel.tiles)
    return replace(kernel, tiles=tiles, body=_renamed(kernel.body, renamed))


def _renamed(node: Any, names: dict[str, str]) -> Any:
    """Return a node with every reference to a renamed tile or loop variable changed."""
    if isinstance(node, tuple):
        return tuple(_renamed(x, names) for x in node)
    if not is_dataclass(node) or isinstance(node, type):
        return node
    changes: dict[str, Any] = {}
    for f in fields(node):
        value = getattr(node, f.name)
        if f.name in ("name", "out", "target", "a", "b", "var", "id") and isinstance(value, str):
            changes[f.name] = names.get(value, value)
        elif f.name != "span":
            changes[f.name] = _renamed(value, names)
    return replace(node, **changes)
