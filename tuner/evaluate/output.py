"""An output tensor that shows what a kernel did not write, and what it wrote besides."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field

import torch

GUARD = 4096  #: elements on each side of the output; a multiple of what alignment asks for
GAP_ROWS = 3  #: rows behind each sequence of an output with gaps
EDGE = 8  #: columns on each side of the rows of an output with edges: 16 bytes
#: NaN in both 16-bit types, with payloads that no arithmetic gives
POISONS = tuple(n for n in range(0x7F81, 0x7FFF) if n != 0x7FC0)
SPOILED_MOST = 4.0  #: a spoiled output holds one number up to this, of either sign


@dataclass(slots=True)
class Poison:
    """The bits that an output holds where nothing was written: others each time."""

    bits: int = POISONS[0]

    def renew(self) -> int:
        """Draw others and return them."""
        self.bits = secrets.choice(POISONS)
        return self.bits


@dataclass(frozen=True, slots=True)
class Output:
    """`tensor` is [B, S, H, Dv] in the middle of `buffer`; guard bands lie on both sides.

    An output with gaps has guarded rows behind each sequence too, one with edges guarded columns
    on each side of each head's.
    """

    tensor: torch.Tensor
    buffer: torch.Tensor  #: int16, flat
    gaps: tuple[torch.Tensor, ...] = ()
    poisoned: Poison = field(default_factory=Poison)

    def poison(self) -> None:
        """Fill the output and its guard bands with a poison that no launch before met."""
        self.buffer.fill_(self.poisoned.renew())

    def spoil(self) -> None:
        """Fill the output with a number that nobody foresees, and leave the guard bands.

        A launch that finds out by NaN whether it is judged, or by its own last result whether its
        work is needed, leaves this.
        """
        self.tensor.fill_((secrets.randbelow(1 << 16) / (1 << 15) - 1) * SPOILED_MOST)

    def unwritten(self) -> torch.Tensor:
        """Return where the output still holds the poison."""
        return bits(self.tensor) == self.poisoned.bits

    def guard_hits(self) -> torch.Tensor:
        """Return how many elements of the guard bands were written, as a 0-d tensor."""
        intact = self.poisoned.bits
        touched = (self.buffer[:GUARD] != intact).sum() + (self.buffer[-GUARD:] != intact).sum()
        return touched + sum((bits(gap) != intact).sum() for gap in self.gaps)

    def part(self, sizes: tuple[int, int, int, int]) -> Output:
        """Return a smaller output at the start of this one, its guard band right behind it."""
        numel = math.prod(sizes)
        buffer = self.buffer[: numel + 2 * GUARD]
        return Output(_between_guards(buffer, sizes, self.tensor.dtype), buffer)


def allocate(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device,
    heads_first: bool = False, gaps: bool = False, edges: bool = False,
) -> Output:  # fmt: skip
    """Allocate a poisoned output, packed as [B, S, H, Dv] or, `heads_first`, as [B, H, S, Dv].

    With `gaps` it is a view of a longer [B, S + 3, H, Dv], with `edges` of a wider
    [B, S, H, 8 + Dv + 8], whose addresses and strides are whole in 16 bytes and no more.
    """
    b, s, h, d = sizes
    edge = EDGE if edges else 0
    wide = d + 2 * edge
    stored = (b, h, s, wide) if heads_first else (b, s + GAP_ROWS * gaps, h, wide)
    buffer = torch.empty(math.prod(stored) + 2 * GUARD, dtype=torch.int16, device=device)
    whole = _between_guards(buffer, stored, dtype)
    whole = whole.transpose(1, 2) if heads_first else whole
    around = (whole[:, s:], whole[..., :edge], whole[..., edge + d :])
    output = Output(whole[:, :s, :, edge : edge + d], buffer, tuple(t for t in around if t.numel()))
    output.poison()
    return output


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
