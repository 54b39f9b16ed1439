"""Which kernel of the folder serves a call."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from .checks import Sizes
from .manifest import DECODE, KernelEntry, Manifest, ShapeKey

QUERIES_MAX = 8  #: that kernels which decode are checked on


class NoKernelError(ValueError):
    """No kernel of the folder was checked on what was asked."""


class Asked(NamedTuple):
    """A call as far as the choice of its kernel goes."""

    sizes: Sizes
    causal: bool
    dtype: str
    page: int  #: keys in a page of the cache, 0 without a block table
    counted: bool  #: whether each sequence has its own number of keys
    allow_untuned: bool

    @property
    def has_cache(self) -> bool:
        """Whether only a kernel that decodes can take the call."""
        return self.counted or self.page > 0

    def keys(self, gpu: str) -> Iterator[ShapeKey]:
        """Yield the call as shapes that kernels are filed under, the one to prefer first."""
        if self.sizes.seqlen_q <= QUERIES_MAX:
            causal = self.causal and self.sizes.seqlen_q > 1  # one query sees every key
            yield ShapeKey(*self.sizes, causal, self.dtype, gpu, DECODE, self.page)
        if not self.has_cache:
            yield ShapeKey(*self.sizes, self.causal, self.dtype, gpu)


def choose(
    manifest: Manifest, asked: Asked, device: str, capability: tuple[int, int]
) -> KernelEntry:
    """Return the kernel for a call. Raises NoKernelError saying what is there instead.

    A shape that was tuned has its own kernel. One that can be decoded and was not tuned has that
    of the nearest decode shape tuned on this GPU; one that cannot, only with `allow_untuned`.
    """
    gpus = [gpu for gpu, title in manifest.gpus.items() if _is_called(device, title)]
    for gpu in gpus:
        for key in asked.keys(gpu):
            found = manifest.shapes.get(key)
            if found is not None and manifest.kernels[found].runs_on(*capability):
                return manifest.kernels[found]
    nearest = None
    for key in asked.keys(gpus[0] if gpus else device):
        near = _nearest(manifest, key, gpus, capability)
        if near is None:
            continue
        if asked.allow_untuned or (key.phase == DECODE and near[0].gpu in gpus):
            return near[1]
        nearest = nearest or near
    raise NoKernelError(_nothing_for(manifest, asked, device, gpus, capability, nearest))


def _nearest(
    manifest: Manifest, asked: ShapeKey, gpus: list[str], capability: tuple[int, int]
) -> tuple[ShapeKey, KernelEntry] | None:
    """Return the nearest tuned shape whose kernel computes the asked one, and that kernel."""
    legal = [
        (key, entry)
        for key, kernel in manifest.shapes.items()
        if (entry := manifest.kernels[kernel]).runs_on(*capability)
        and _compiled_in(key) == _compiled_in(asked)
    ]
    distance = _decode_distance if asked.phase == DECODE else _distance
    return min(legal, key=lambda f: (f[0].gpu not in gpus, distance(f[0], asked)), default=None)


def _compiled_in(key: ShapeKey) -> tuple[object, ...]:
    """What no kernel takes at run time."""
    return key.head_dim, key.head_dim_v, key.causal, key.dtype, key.phase, key.page


def _distance(have: ShapeKey, asked: ShapeKey) -> tuple[float, float]:
    """How far two shapes are apart: first by lengths, then by the number of heads in all."""
    lengths = abs(math.log(have.seqlen_q / asked.seqlen_q))
    lengths += abs(math.log(have.seqlen_k / asked.seqlen_k))
    return lengths, abs(math.log(have.batch * have.heads / (asked.batch * asked.heads)))


def _decode_distance(have: ShapeKey, asked: ShapeKey) -> tuple[float, float]:
    """How far two decode shapes are apart: first whether as many heads share a KV head.

    Then by the three numbers that blocks and splits come of: caches in all, keys, and rows of a
    cache (queries of the heads that share it).
    """
    group, other = have.heads // have.kv_heads, asked.heads // asked.kv_heads
    apart = abs(math.log(have.batch * have.kv_heads / (asked.batch * asked.kv_heads)))
    apart += abs(math.log(have.seqlen_k / asked.seqlen_k))
    apart += abs(math.log(have.seqlen_q * group / (asked.seqlen_q * other)))
    return float(group != other), apart


def _is_called(device_name: str, title: str) -> bool:
    """Whether a GPU's title stands in a device name as words of its own."""
    return re.search(rf"(?<!\w){re.escape(title)}(?!\w)", device_name, re.IGNORECASE) is not None


# ---- what is said when there is none -------------------------------------------------------------


def _nothing_for(
    manifest: Manifest,
    asked: Asked,
    device: str,
    gpus: list[str],
    capability: tuple[int, int],
    nearest: tuple[ShapeKey, KernelEntry] | None,
) -> str:
    """Say what was asked, what is there, and what to do."""
    keys = list(asked.keys(gpus[0] if gpus else device))
    if not keys:
        what = "block_table" if asked.page else "seqlens_k"
        return (
            f"{what} is taken with at most {QUERIES_MAX} queries, and q has "
            f"{asked.sizes.seqlen_q}; leave it out, or pass the queries in parts"
        )
    # a few queries may be what decoding is for, or not: the folder's own phase is meant
    phases = {k.phase for k in manifest.shapes} if nearest is None else {nearest[0].phase}
    key = next((k for k in keys if k.phase in phases), keys[0])
    text = f"no kernel here was checked on {key}"
    if nearest is not None:
        return (
            f"{text}; the nearest is {nearest[0]}. Pass allow_untuned=True to run that one, "
            f"or tune and export this shape"
        )
    arch = f"sm_{capability[0]}{capability[1]}"
    if not any(e.runs_on(*capability) for e in manifest.kernels.values()):
        built = sorted({e.arch for e in manifest.kernels.values()})
        titles = ", ".join(sorted(manifest.gpus.values()))
        return (
            f"{text}: the kernels are built for {titles} ({', '.join(built)}), and this "
            f"device is {arch}; tune and export on it"
        )
    if other := _other_caches(manifest, key):
        return f"{text}: {other}"
    kinds = sorted({_kind(k) for k in manifest.shapes})
    return f"{text}; compiled in are {'; '.join(kinds)}. Tune and export this one"


def _other_caches(manifest: Manifest, asked: ShapeKey) -> str | None:
    """Return what kernels that only the cache keeps from this call read, or None."""
    here = {
        k.page
        for k in manifest.shapes
        if _compiled_in(k._replace(page=asked.page)) == _compiled_in(asked)
    }
    pages = ", ".join(str(n) for n in sorted(here - {0}))
    if asked.phase != DECODE or not here - {asked.page}:
        return None
    if not asked.page:
        return f"they read pages of {pages} keys; pass block_table, and pages as k and v"
    if pages:
        return f"k has pages of {asked.page} keys, and paged kernels here read pages of {pages}"
    return "no kernel here reads pages; leave out block_table, and pass k as [B, Sk, Hkv, D]"


def _kind(key: ShapeKey) -> str:
    mask = "causal" if key.causal else "full"
    text = f"D={key.head_dim} Dv={key.head_dim_v} {mask} {key.dtype}"
    if key.phase == DECODE:
        text += f" decode in pages of {key.page}" if key.page else " decode"
    return text
