"""Attention variants, the shapes they are tuned on, and their FLOP and byte counts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum


class DType(StrEnum):
    """Element type of Q, K, V and O."""

    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def bytes(self) -> int:
        """Bytes per element."""
        return 2


class Phase(StrEnum):
    """What a kernel is made for: many queries, or a few against a long cache of keys."""

    PREFILL = "prefill"
    DECODE = "decode"


class SpaceError(ValueError):
    """A name, shape or parameter the user gave is not one this package knows."""


@dataclass(frozen=True, slots=True)
class Variant:
    """An attention variant: how query heads share KV heads, and its usual head dims."""

    name: str
    description: str
    #: (heads, kv_heads, head_dim, head_dim_v) of the shapes that `--shapes paper` stands for
    paper_heads: tuple[tuple[int, int, int, int], ...]
    prefill: str = ""  #: what its prefill has of its own

    def described(self, phase: Phase) -> str:
        """Return the description, with what the phase has of its own."""
        own = self.prefill if phase is Phase.PREFILL else ""
        return f"{self.description}, prefill {own}" if own else self.description

    def admits(self, shape: Shape) -> str | None:
        """Return why `shape` is not of this variant, or None when it is."""
        ratio = shape.heads // max(shape.kv_heads, 1)
        if self.name == "mha" and shape.heads != shape.kv_heads:
            return f"mha needs Hq = Hkv, got {shape.heads} and {shape.kv_heads}; use gqa"
        if self.name == "mqa" and shape.kv_heads != 1:
            return f"mqa has one KV head, got {shape.kv_heads}; use gqa"
        if self.name == "gqa" and ratio < 1:
            return f"gqa needs Hq >= Hkv, got {shape.heads} and {shape.kv_heads}"
        return None


VARIANTS: dict[str, Variant] = {
    v.name: v
    for v in (
        Variant(
            "mha",
            "multi-head attention",
            ((32, 32, 64, 64), (16, 16, 128, 128), (8, 8, 256, 256)),
        ),
        Variant("gqa", "grouped-query attention, Hq a multiple of Hkv", ((32, 8, 128, 128),)),
        Variant("mqa", "multi-query attention, one KV head", ((32, 1, 128, 128),)),
        Variant("mla", "multi-head latent attention", ((16, 16, 192, 128),), "192/128"),
    )
}

PAPER_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PAPER_TOKENS = 16384
HEAD_DIM_MIN, HEAD_DIM_MAX, HEAD_DIM_STEP = 16, 256, 8
#: absorbed multi-head latent attention: K is the latent cache, V is its first 512 columns
LATENT_DIMS = (576, 512)
LATENT_SCALE_DIM = 192  #: head dim before absorption, which the default scale comes from
DECODE_QUERIES_MAX = 8  #: most queries of a decode problem (speculative decoding)
PAGE_SIZES = (16, 64, 128)  #: keys in a page of a paged cache
SIZE_MAX = 2**31 - 1  #: of a batch, a head count or a length: kernels take them as int32

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")


def variant_named(name: str) -> Variant:
    """Return the variant called `name`. Raises SpaceError naming the known ones."""
    try:
        return VARIANTS[name]
    except KeyError:
        known = ", ".join(VARIANTS)
        raise SpaceError(f"unknown variant {name!r}; known variants: {known}") from None


def dtype_named(name: str) -> DType:
    """Return the dtype called `name`. Raises SpaceError naming the known ones."""
    try:
        return DType(name)
    except ValueError:
        known = ", ".join(DType)
        raise SpaceError(f"unknown dtype {name!r}; known dtypes: {known}") from None


@dataclass(frozen=True, slots=True)
class Shape:
    """One attention problem: Q [B, Sq, Hq, D], K [B, Sk, Hkv, D], V [B, Sk, Hkv, Dv]."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def default_scale(self) -> float:
        """1/sqrt(D) of the caller's head dim, before any padding; of 192 where MLA is absorbed."""
        return default_scale(self.head_dim, self.head_dim_v)

    @property
    def latent(self) -> bool:
        """Whether V is the first columns of K: absorbed MLA."""
        return (self.head_dim, self.head_dim_v) == LATENT_DIMS

    @property
    def key(self) -> str:
        """Stable text form: B,Hq,Hkv,Sq,Sk,D,Dv with a trailing `c` when causal."""
        numbers = (self.batch, self.heads, self.kv_heads, self.seqlen_q, self.seqlen_k)
        text = ",".join(str(n) for n in (*numbers, self.head_dim, self.head_dim_v))
        return text + ("c" if self.causal else "")


def default_scale(head_dim: int, head_dim_v: int) -> float:
    """1/sqrt(D), or 1/sqrt(192) for the dims of absorbed MLA."""
    return 1.0 / math.sqrt(LATENT_SCALE_DIM if (head_dim, head_dim_v) == LATENT_DIMS else head_dim)


def visible_pairs(seqlen_q: int, seqlen_k: int, causal: bool) -> int:
    """Count (query, key) pairs that the mask lets through; causal is aligned bottom-right."""
    if not causal:
        return seqlen_q * seqlen_k
    shift = seqlen_k - seqlen_q
    first = max(0, -shift)  # rows before this one see nothing
    rows = seqlen_q - first
    if rows <= 0:
        return 0
    low, high = first + shift + 1, seqlen_q + shift
    return rows * (low + high) // 2


def flops(shape: Shape) -> int:
    """Floating-point operations of the two products over visible pairs only."""
    pairs = visible_pairs(shape.seqlen_q, shape.seqlen_k, shape.causal)
    return 2 * shape.batch * shape.heads * pairs * (shape.head_dim + shape.head_dim_v)


def io_bytes(shape: Shape, dtype: DType) -> int:
    """Fewest bytes through device memory: Q, K and V read once, O written once.

    Where V is part of K its bytes are K's.
    """
    q_and_o = shape.batch * shape.seqlen_q * shape.heads * (shape.head_dim + shape.head_dim_v)
    columns = shape.head_dim + (0 if shape.latent else shape.head_dim_v)
    k_and_v = shape.batch * shape.seqlen_k * shape.kv_heads * columns
    return (q_and_o + k_and_v) * dtype.bytes


def check_shape(shape: Shape) -> None:
    """Raise SpaceError, naming the number and the limit, when `shape` is not a legal problem."""
    if shape.kv_heads < 1 or shape.heads < 1:
        raise SpaceError(f"heads must be at least 1, got Hq={shape.heads} and Hkv={shape.kv_heads}")
    if shape.heads % shape.kv_heads:
        raise SpaceError(
            f"Hq={shape.heads} is not a multiple of Hkv={shape.kv_heads}; "
            f"each KV head must serve the same number of query heads"
        )
    if min(shape.batch, shape.seqlen_q, shape.seqlen_k) < 0:
        raise SpaceError(f"negative size in shape {shape.key}")
    if max(shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_k) > SIZE_MAX:
        raise SpaceError(f"shape {shape.key}: a size is past {SIZE_MAX}, the kernels' 32 bits")
    if shape.latent:
        if shape.kv_heads != 1 or shape.seqlen_q > DECODE_QUERIES_MAX:
            raise SpaceError(
                f"shape {shape.key}: head dims 576 and 512 are absorbed MLA, with 1 KV head and at "
                f"most {DECODE_QUERIES_MAX} queries; prefill has head dims 192 and 128"
            )
        return
    if shape.head_dim == LATENT_DIMS[0]:
        raise SpaceError(
            f"shape {shape.key}: head dim 576 is absorbed MLA's, whose Dv is 512; use 576,512"
        )
    for name, dim in (("D", shape.head_dim), ("Dv", shape.head_dim_v)):
        if dim < HEAD_DIM_MIN or dim > HEAD_DIM_MAX or dim % HEAD_DIM_STEP:
            raise SpaceError(
                f"head dim {name}={dim} is not a multiple of {HEAD_DIM_STEP} from "
                f"{HEAD_DIM_MIN} to {HEAD_DIM_MAX}"
            )


def parse_shape(text: str) -> Shape:
    """Parse `B,Hq,Hkv,Sq,Sk,D[,Dv]`. Raises SpaceError with what is wrong."""
    parts = [p.strip() for p in text.split(",")]
    if len(parts) not in (6, 7) or not all(_WHOLE.fullmatch(p) for p in parts):
        raise SpaceError(f"shape {text!r} is not B,Hq,Hkv,Sq,Sk,D[,Dv] with whole numbers")
    numbers = [int(p) for p in parts]
    if len(numbers) == 6:
        numbers.append(numbers[5])
    batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v = numbers
    shape = Shape(batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v)
    if min(numbers) < 1:
        raise SpaceError(f"shape {text!r}: every number must be at least 1")
    check_shape(shape)
    return shape


def paper_shapes(variant: Variant, causal: bool) -> Iterator[Shape]:
    """Yield the shapes of `--shapes paper`: six lengths of 16k tokens in all per head layout."""
    for heads, kv_heads, head_dim, head_dim_v in variant.paper_heads:
        for length in PAPER_LENGTHS:
            batch = PAPER_TOKENS // length
            yield Shape(batch, heads, kv_heads, length, length, head_dim, head_dim_v, causal)


#: (batch, heads, kv_heads, keys) of the shapes that `--phase decode --shapes paper` stands for
_DECODE: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "mha": ((1, 32, 32, 4096), (16, 32, 32, 4096)),
    "gqa": (
        (1, 32, 8, 4096), (1, 32, 8, 32768), (16, 32, 8, 4096), (64, 32, 8, 4096),
        (128, 32, 8, 8192), (64, 28, 4, 4096), (1, 64, 8, 131072),
    ),
    "mqa": ((64, 32, 1, 4096),),
    "mla": tuple(
        (batch, 128, 1, keys)
        for batch, keys in (
            (1, 4096), (1, 32768), (1, 131072), (16, 4096), (16, 16384), (64, 4096), (128, 4096),
            (128, 8192),
        )
    ),
}  # fmt: skip


def decode_shapes(variant: Variant) -> Iterator[Shape]:
    """Yield the shapes of `--phase decode --shapes paper`: one query, caches of 4k to 128k keys."""
    dims = LATENT_DIMS if variant.name == "mla" else (128, 128)
    for batch, heads, kv_heads, keys in _DECODE[variant.name]:
        yield Shape(batch, heads, kv_heads, 1, keys, *dims)


@dataclass(frozen=True, slots=True)
class Problem:
    """What one compiled kernel serves: head dims, dtype and mask. Lengths and heads are run-time.

    A run has one search per problem; one kernel is timed on every shape of its problem. A decode
    kernel packs the query heads of a KV head into its rows, splits the keys, and takes a length
    for each sequence; `page` is the page size of its cache in keys, 0 for a cache in one piece.
    """

    variant: str
    dtype: DType
    head_dim: int
    head_dim_v: int
    causal: bool
    phase: Phase = Phase.PREFILL
    page: int = 0

    @property
    def latent(self) -> bool:
        """Whether V is the first columns of K: absorbed MLA."""
        return (self.head_dim, self.head_dim_v) == LATENT_DIMS

    @property
    def default_scale(self) -> float:
        """1/sqrt(D), or 1/sqrt(192) for absorbed MLA."""
        return default_scale(self.head_dim, self.head_dim_v)

    @property
    def key(self) -> str:
        """Stable text form, e.g. `mha-bf16-d128-causal` or `mla-bf16-d576x512-full-decode`.

        A paged cache adds `-page64`.
        """
        dims = f"d{self.head_dim}"
        if self.head_dim != self.head_dim_v:
            dims += f"x{self.head_dim_v}"
        text = f"{self.variant}-{self.dtype}-{dims}-{'causal' if self.causal else 'full'}"
        if self.phase is Phase.DECODE:
            text += "-decode" + (f"-page{self.page}" if self.page else "")
        return text

    def serves(self, shape: Shape) -> bool:
        """Whether a kernel of this problem computes `shape`."""
        if self.phase is Phase.DECODE and shape.seqlen_q > DECODE_QUERIES_MAX:
            return False
        return (shape.head_dim, shape.head_dim_v, shape.causal) == (
            self.head_dim,
            self.head_dim_v,
            self.causal,
        )


def problems_of(
    variant: str,
    dtype: DType,
    shapes: tuple[Shape, ...],
    phase: Phase = Phase.PREFILL,
    page: int = 0,
) -> tuple[Problem, ...]:
    """Return the distinct problems of `shapes`, in order of first appearance."""
    found = dict.fromkeys(
        Problem(variant, dtype, s.head_dim, s.head_dim_v, s.causal, phase, page) for s in shapes
    )
    return tuple(found)


def with_causal(shape: Shape, causal: bool) -> Shape:
    """Return `shape` with its mask replaced."""
    return replace(shape, causal=causal)
