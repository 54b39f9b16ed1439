"""What a call must satisfy before any kernel is chosen, and copies of what kernels cannot read."""

from __future__ import annotations

import math
from numbers import Real
from typing import NamedTuple

import torch

from .cache import check_pages

FLOAT32_MAX = torch.finfo(torch.float32).max
ALIGNMENT_BYTES = 16  #: of addresses and of row, head and batch strides
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
#: head dims of absorbed MLA, and the head dim before absorption, which its default scale is of
LATENT_DIMS, LATENT_SCALE_DIM = (576, 512), 192


class Sizes(NamedTuple):
    """The numbers of one call."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """[B, Sq, Hq, Dv]."""
        return self.batch, self.seqlen_q, self.heads, self.head_dim_v


def sizes_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor | None = None
) -> Sizes:
    """Return the sizes of a call. Raises ValueError naming the two things that do not agree.

    With a block table the first axis of k and v is that of pages, the second that of the keys in
    one, and a sequence has as many keys as its row of the table has room for.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            raise ValueError(f"{name} is a {type(t).__name__}, not a tensor")
        if t.dim() != 4:
            raise ValueError(f"{name} has {t.dim()} axes, not the 4 of [B, S, H, D]")
        if t.dtype not in DTYPES:
            raise ValueError(f"{name} is {t.dtype}; float16 and bfloat16 are taken")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise ValueError(f"q is {q.dtype} and {name} is {t.dtype}; they must be the same")
        if t.device != q.device:
            raise ValueError(f"q is on {q.device} and {name} is on {t.device}")
        if t.shape[0] != q.shape[0] and block_table is None:
            raise ValueError(f"q has batch {q.shape[0]} and {name} has batch {t.shape[0]}")
    batch, seqlen_q, heads, head_dim = q.shape
    _, seqlen_k, kv_heads, head_dim_k = k.shape
    if block_table is not None:
        if v.shape[0] != k.shape[0]:
            raise ValueError(f"k has {k.shape[0]} pages and v has {v.shape[0]}")
        check_pages(block_table, batch, seqlen_k, q.device)
    if v.shape[1] != seqlen_k:
        raise ValueError(f"k has {seqlen_k} rows and v has {v.shape[1]}")
    if v.shape[2] != kv_heads:
        raise ValueError(f"k has {kv_heads} heads and v has {v.shape[2]}")
    if head_dim_k != head_dim:
        raise ValueError(f"q has head dim {head_dim} and k has {head_dim_k}")
    if kv_heads == 0:
        raise ValueError(f"q has {heads} heads and k has 0")
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, which is not a multiple of the {kv_heads} of k")
    if head_dim == 0:
        raise ValueError("q has head dim 0")
    keys = seqlen_k if block_table is None else seqlen_k * block_table.shape[1]
    return Sizes(batch, heads, kv_heads, seqlen_q, keys, head_dim, int(v.shape[3]))


def check_scale(scale: float | None, sizes: Sizes) -> float:
    """Return the scale, by default 1/sqrt(D), or 1/sqrt(192) where MLA is absorbed.

    Raises ValueError when it is no number that is finite in float32, as kernels take it.
    """
    if scale is None:
        latent = (sizes.head_dim, sizes.head_dim_v) == LATENT_DIMS
        return 1.0 / math.sqrt(LATENT_SCALE_DIM if latent else sizes.head_dim)
    if not isinstance(scale, Real) or not abs(scale) <= FLOAT32_MAX:
        raise ValueError(f"scale is {scale!r}; a finite number is wanted")
    return float(scale)


def check_out(out: torch.Tensor, q: torch.Tensor, sizes: Sizes) -> None:
    """Raise ValueError when `out` cannot take the result of a call."""
    if not isinstance(out, torch.Tensor):
        raise ValueError(f"out is a {type(out).__name__}, not a tensor")
    if tuple(out.shape) != sizes.out_shape:
        raise ValueError(f"out is {list(out.shape)}; the result is {list(sizes.out_shape)}")
    if out.dtype != q.dtype:
        raise ValueError(f"out is {out.dtype} and q is {q.dtype}; they must be the same")
    if out.device != q.device:
        raise ValueError(f"out is on {out.device} and q is on {q.device}")
    if any(n > 1 and s == 0 for n, s in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"out has stride 0 (an expanded tensor): strides {out.stride()}")
    reach = 0
    for stride, n in sorted(zip(out.stride(), out.shape, strict=True)):
        if n > 1 and stride <= reach:
            raise ValueError(f"elements of out may lie on one another: strides {out.stride()}")
        reach += stride * (n - 1)


def check_no_grad(*tensors: torch.Tensor) -> None:
    """Raise ValueError when autograd would need a backward pass; there is none."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise ValueError("these kernels have no backward pass; call under torch.no_grad()")


def is_readable(t: torch.Tensor, broadcast: bool = True) -> bool:
    """Whether kernels can use the tensor in place: inner stride 1, all else 16-byte aligned.

    `broadcast` says whether an axis may have stride 0. What torch negates when it is read cannot.
    """
    if t.is_neg():
        return False
    *outer, inner = zip(t.shape, t.stride(), strict=True)
    if inner[1] != 1 and inner[0] > 1:
        return False
    size = t.element_size()
    wide = [stride * size for n, stride in outer if n > 1]
    aligned = all(step % ALIGNMENT_BYTES == 0 and (step or broadcast) for step in wide)
    return aligned and t.data_ptr() % ALIGNMENT_BYTES == 0


def readable(t: torch.Tensor, broadcast: bool = True) -> torch.Tensor:
    """Return the tensor, or a contiguous copy when kernels cannot read it in place."""
    # not contiguous(): that returns the same storage when only the address is misaligned
    return t if is_readable(t, broadcast) else t.clone(memory_format=torch.contiguous_format)


def check_readable(name: str, t: torch.Tensor, broadcast: bool) -> None:
    """Raise ValueError when kernels cannot read a paged cache in place: it is never copied."""
    if not is_readable(t, broadcast):
        least = "multiples" if broadcast else "positive multiples"
        raise ValueError(
            f"{name} of shape {list(t.shape)}, strides {list(t.stride())} is a paged cache that "
            f"kernels cannot read in place: the last stride must be 1, the others {least} of "
            f"{ALIGNMENT_BYTES} bytes, and the address a multiple too"
        )
