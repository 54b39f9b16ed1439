"""What a decode call's cache must satisfy: the keys of each sequence, the pages that hold them."""

from __future__ import annotations

import torch

INT32_MAX = 2**31 - 1


def check_key_counts(seqlens_k: torch.Tensor, batch: int, device: torch.device) -> None:
    """Raise ValueError unless this is the number of keys of each sequence: int32 [batch]."""
    _check_int32("seqlens_k", seqlens_k, device)
    if tuple(seqlens_k.shape) != (batch,):
        raise ValueError(
            f"seqlens_k is {list(seqlens_k.shape)}; one number for each sequence is wanted, "
            f"[{batch}]"
        )
    if batch > 1 and seqlens_k.stride(0) != 1:
        raise ValueError(f"seqlens_k has stride {seqlens_k.stride(0)}, 1 is needed")


def check_pages(block_table: torch.Tensor, batch: int, page: int, device: torch.device) -> None:
    """Raise ValueError unless this is a block table: int32 [batch, pages of a sequence]."""
    _check_int32("block_table", block_table, device)
    if block_table.dim() != 2 or block_table.shape[0] != batch:
        raise ValueError(
            f"block_table is {list(block_table.shape)}; a row of pages for each sequence is "
            f"wanted, [{batch}, pages]"
        )
    if (keys := block_table.shape[1] * page) > INT32_MAX:
        raise ValueError(
            f"block_table has {block_table.shape[1]} pages of {page} keys for a sequence: {keys} "
            f"keys, and at most {INT32_MAX} can be counted; pass fewer columns"
        )
    if block_table.shape[1] > 1 and block_table.stride(1) != 1:
        raise ValueError(f"block_table: a row has stride {block_table.stride(1)}, 1 is needed")


def _check_int32(name: str, t: torch.Tensor, device: torch.device) -> None:
    if not isinstance(t, torch.Tensor):
        raise ValueError(f"{name} is a {type(t).__name__}, not a tensor")
    if t.dtype != torch.int32:
        raise ValueError(f"{name} is {t.dtype}; int32 is wanted, pass {name}.int()")
    if t.device != device:
        raise ValueError(f"{name} is on {t.device} and q is on {device}")
    if t.is_neg():
        raise ValueError(f"{name} is negated by torch when it is read; pass {name}.resolve_neg()")


def check_latent(k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise ValueError unless V is the first columns of K, the same memory."""
    apart = v.data_ptr() != k.data_ptr() or any(
        n > 1 and s != t
        for n, s, t in zip(v.shape, v.stride(), k.stride(), strict=True)
    )  # fmt: skip
    if apart:
        columns = v.shape[3]
        raise ValueError(
            f"v is a tensor of its own, and this kernel reads V from the first {columns} columns "
            f"of K; pass v = k[..., :{columns}]"
        )


def check_contents(
    seqlens_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    capacity: int,
    page: int,
    num_pages: int,
) -> None:
    """Raise ValueError naming a sequence whose length or page is out of range.

    `capacity` is the number of keys that the cache, or a row of the table, has for a sequence. Of
    a table only the pages that a sequence's keys lie in are looked at. Waits for the device.
    """
    counts = None if seqlens_k is None else seqlens_k.tolist()
    for b, keys in enumerate(counts or ()):
        if not 0 <= keys <= capacity:
            room = f"has {capacity} rows"
            if block_table is not None:
                room = f"is {block_table.shape[1]} pages of {page} keys in block_table: {capacity}"
            raise ValueError(
                f"seqlens_k[{b}] is {keys}; 0 to {capacity} is possible, as its cache {room}"
            )
    if block_table is None:
        return
    for b, pages in enumerate(block_table.tolist()):
        used = pages if counts is None else pages[: -(-counts[b] // page)]
        for i, number in enumerate(used):
            if not 0 <= number < num_pages:
                raise ValueError(
                    f"block_table[{b}, {i}] is {number}; the cache has pages 0 to {num_pages - 1}"
                )
