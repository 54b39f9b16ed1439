"""Prefill and decode: what `--phase` and `--page-size` ask for, and which shapes a phase takes."""

from __future__ import annotations

from collections.abc import Iterable

from space.variant import (
    DECODE_QUERIES_MAX,
    LATENT_DIMS,
    PAGE_SIZES,
    Phase,
    Shape,
    Variant,
    decode_shapes,
    paper_shapes,
    with_causal,
)
from tuner.errors import UsageError


def phase_named(name: str | None) -> Phase:
    """Return the phase called `name`, prefill for None. Raises UsageError."""
    if name is None:
        return Phase.PREFILL
    if name not in tuple(Phase):
        raise UsageError(f"--phase: unknown phase {name!r}; known phases: {', '.join(Phase)}")
    return Phase(name)


def page_size(phase: Phase, asked: int | None) -> int:
    """Return the page size of a phase's cache in keys, 0 for a cache in one piece.

    Raises UsageError on a size that is not offered, or with a phase that has no cache.
    """
    if asked is None:
        return 0
    if phase is not Phase.DECODE:
        raise UsageError("--page-size is of a cache; add --phase decode or leave it out")
    if asked and asked not in PAGE_SIZES:
        offered = ", ".join(str(p) for p in PAGE_SIZES)
        raise UsageError(f"--page-size {asked} is not offered; use 0 (not paged), {offered}")
    return asked


def usual_shapes(variant: Variant, phase: Phase) -> Iterable[Shape]:
    """Return the shapes that `paper` stands for, without a mask."""
    return decode_shapes(variant) if phase is Phase.DECODE else paper_shapes(variant, causal=False)


def usual_head_dims(variant: Variant, phase: Phase) -> tuple[tuple[int, int], ...]:
    """Return the pairs of head dims that `paper` has, each once."""
    pairs = ((s.head_dim, s.head_dim_v) for s in usual_shapes(variant, phase))
    return tuple(dict.fromkeys(pairs))


def check_phase(variant: Variant, shape: Shape, phase: Phase) -> None:
    """Raise UsageError, with a remedy, when kernels of `phase` do not compute `shape`."""
    if shape.latent and variant.name != "mla":
        raise UsageError(
            f"shape {shape.key}: head dims 576 and 512 are absorbed MLA; use --variant mla"
        )
    if phase is Phase.PREFILL:
        if shape.latent:
            raise UsageError(f"shape {shape.key} is absorbed MLA; use --phase decode")
        return
    if variant.name == "mla" and not shape.latent:
        columns, values = LATENT_DIMS
        raise UsageError(
            f"shape {shape.key}: decode of mla is absorbed, with 1 KV head and head dims "
            f"{columns},{values}; use those, or --phase prefill"
        )
    if shape.seqlen_q > DECODE_QUERIES_MAX:
        raise UsageError(
            f"shape {shape.key}: {shape.seqlen_q} queries, decode has at most "
            f"{DECODE_QUERIES_MAX}; use --phase prefill"
        )


def masked(shape: Shape, phase: Phase, causal: bool | None) -> tuple[Shape, ...]:
    """Return `shape` under the mask asked for, or under both.

    One query of a decode sees every key under either mask: it is tuned once, without.
    """
    if phase is Phase.DECODE and shape.seqlen_q == 1:
        return (with_causal(shape, False),)
    masks = (False, True) if causal is None else (causal,)
    return tuple(with_causal(shape, mask) for mask in masks)
