"""An output tensor that shows what a kernel did not write, and what it wrote besides."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

GUARD = 4096  #: elements on each side of the output; a multiple of what alignment asks for
#: A NaN in both 16-bit types, with a payload that no arithmetic gives.
POISON = 0x7FD5


@dataclass(frozen=True, slots=True)
class Output:
    """`tensor` is [B, S, H, Dv] in the middle of `buffer`; guard bands lie on both sides."""

    tensor: torch.Tensor
    buffer: torch.Tensor  #: int16, flat

    def poison(self) -> None:
        """Fill the output and its guard bands with the poison."""
        self.buffer.fill_(POISON)

    def unwritten(self) -> torch.Tensor:
        """Return where the output still holds the poison."""
        return bits(self.tensor) == POISON

    def guard_hits(self) -> torch.Tensor:
        """Return how many elements of the guard bands were written, as a 0-d tensor."""
        end = GUARD + self.tensor.numel()
        touched = (self.buffer[:GUARD] != POISON).sum()
        return touched + (self.buffer[end:] != POISON).sum()

    def part(self, sizes: tuple[int, int, int, int]) -> Output:
        """Return a smaller output at the start of this one, its guard band right behind it."""
        numel = math.prod(sizes)
        buffer = self.buffer[: numel + 2 * GUARD]
        return Output(_between_guards(buffer, sizes, self.tensor.dtype), buffer)


def allocate(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device,
    heads_first: bool = False,
) -> Output:  # fmt: skip
    """Allocate a poisoned output, packed as [B, S, H, Dv] or, `heads_first`, as [B, H, S, Dv]."""
    numel = math.prod(sizes)
    buffer = torch.full((numel + 2 * GUARD,), POISON, dtype=torch.int16, device=device)
    if heads_first:
        b, s, h, d = sizes
        return Output(_between_guards(buffer, (b, h, s, d), dtype).transpose(1, 2), buffer)
    return Output(_between_guards(buffer, sizes, dtype), buffer)


def _between_guards(
    buffer: torch.Tensor, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> torch.Tensor:
    return buffer[GUARD : GUARD + math.prod(sizes)].view(dtype).view(sizes)


def bits(t: torch.Tensor) -> torch.Tensor:
    """Return a 16-bit tensor's bits, so that NaN equals itself."""
    return t.view(torch.int16)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return whether two 16-bit tensors have the same bits, as a 0-d tensor on their device."""
    return (bits(a) == bits(b)).all()


def flip_signs(t: torch.Tensor, where: torch.Tensor | None = None) -> torch.Tensor:
    """Flip the sign bits of a 16-bit tensor in place, all or those `where` says, and return it.

    Arithmetic would not do: it may give a NaN other bits, and flipping twice must give the first.
    """
    sign = torch.tensor(-0x8000, dtype=torch.int16, device=t.device)
    bits(t).bitwise_xor_(sign if where is None else torch.where(where, sign, 0).to(torch.int16))
    return t
