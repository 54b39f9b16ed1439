"""Attention kernels, each chosen by measurement (or prediction) for its shape.

`manifest.json` says which shapes were checked, on which GPU, how fast and how exact each kernel
is, and how that was measured. Needs torch and cuda-bindings; no compiler.
"""

from __future__ import annotations

from pathlib import Path

import torch

from .attention import Attention, NoKernelError
from .launch import LaunchError
from .manifest import ManifestError, ShapeKey

__all__ = [
    "LaunchError", "ManifestError", "NoKernelError", "ShapeKey", "attention", "shapes",
    "workspace_bytes",
]  # fmt: skip

_attention = Attention(Path(__file__).parent)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    validate: bool = False,
    allow_untuned: bool = False,
) -> torch.Tensor:
    """Return softmax(scale * q @ k.T + mask) @ v, forward only.

    Where a kernel in manifest.json has `computes`, it is that function of q, k and v instead, with
    the numbers that stand beside it.

    q is [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv], float16 or bfloat16 on one CUDA
    device; the result is [B, Sq, Hq, Dv]. Hq is a multiple of Hkv, query head h reads KV head
    h // (Hq // Hkv). Any strides are taken; a tensor whose inner stride is not 1, or whose address
    or other strides are not multiples of 16 bytes, is copied first.

    causal  is aligned bottom-right: query i sees keys up to i + Sk - Sq. A row that sees no key
            is 0.
    scale   is 1/sqrt(D) by default, and 1/sqrt(192) for head dims 576 and 512 (absorbed MLA).
    out     takes the result, at its own strides; it must not overlap q, k or v.
    allow_untuned  runs the nearest kernel when none was checked on this very shape and GPU.

    Decoding, with at most 8 queries for each sequence and a kernel that was tuned for it:

    seqlens_k    int32 [B]: the keys of each sequence, 0 to Sk; what lies behind them is not looked
                 at, and `causal` is aligned by them. All Sk keys by default. A sequence without
                 keys gives zeros.
    block_table  int32 [B, P]: k and v are then a paged cache, [pages, page size, Hkv, D or Dv],
                 and key j of sequence b is row j % page size of page block_table[b, j // page
                 size]. Sk is P times the page size. Such a cache is never copied.
    workspace    contiguous device memory of any dtype with `workspace_bytes`, which no other
                 stream uses meanwhile. With it and `out` a call takes no memory.
    validate     looks at seqlens_k and block_table and raises ValueError naming the sequence, the
                 value and its limit; waits for the device. Otherwise they are believed: a length
                 or page out of range reads memory that is not the cache's.

    With head dims 576 and 512, v is the first 512 columns of k: pass v = k[..., :512].

    A decode shape that was not tuned runs the kernel of the nearest one that was, as these take
    any batch, heads and lengths and are checked on many: the shape with the same Hq / Hkv whose
    B * Hkv, Sk and Sq * Hq / Hkv differ least, by logarithm. How many splits the keys get is that
    kernel's rule, from the shape and the number of multiprocessors: the same on every call, so
    that the same call gives the same bits. One query is served alike with and without `causal`.

    Runs on torch's current stream and does not wait; can be captured in a CUDA graph after one
    call with the same shapes, or after `workspace_bytes` of them. A graph reads seqlens_k and
    block_table anew at each replay. Raises ValueError when arguments do not agree, NoKernelError
    (a ValueError) when no kernel was checked on the shape, ManifestError when the folder is
    damaged, LaunchError when CUDA refuses.
    """
    return _attention(
        q, k, v, causal=causal, scale=scale, out=out, seqlens_k=seqlens_k, block_table=block_table,
        workspace=workspace, validate=validate, allow_untuned=allow_untuned,
    )  # fmt: skip


def workspace_bytes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    seqlens_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    allow_untuned: bool = False,
) -> int:
    """Return the bytes of workspace that `attention` of these arguments wants; 0 is possible.

    Depends on shapes, not on what the tensors hold. Loads the kernel, so that the call can be
    captured in a CUDA graph. Raises as `attention` does.
    """
    return _attention.workspace_bytes(
        q, k, v, causal=causal, seqlens_k=seqlens_k, block_table=block_table,
        allow_untuned=allow_untuned,
    )  # fmt: skip


def shapes() -> tuple[ShapeKey, ...]:
    """Return the shapes that kernels of this folder were checked on."""
    return tuple(_attention.manifest.shapes)
