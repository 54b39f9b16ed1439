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

__all__ = ["LaunchError", "ManifestError", "NoKernelError", "ShapeKey", "attention", "shapes"]

_attention = Attention(Path(__file__).parent)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    out: torch.Tensor | None = None,
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
    scale   is 1/sqrt(D) by default.
    out     takes the result, at its own strides; it must not overlap q, k or v.
    allow_untuned  runs the nearest kernel when none was checked on this very shape and GPU.

    Runs on torch's current stream and does not wait; can be captured in a CUDA graph after one
    call with the same shapes. Raises ValueError when arguments do not agree, NoKernelError (a
    ValueError) when no kernel was checked on the shape, ManifestError when the folder is damaged,
    LaunchError when CUDA refuses.
    """
    return _attention(q, k, v, causal=causal, scale=scale, out=out, allow_untuned=allow_untuned)


def shapes() -> tuple[ShapeKey, ...]:
    """Return the shapes that kernels of this folder were checked on."""
    return tuple(_attention.manifest.shapes)
