"""Where the tensors that one kernel hands to the next lie in one piece of device memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from .lengths import workspace_shape
from .manifest import Workspace

STEP_BYTES = 256  #: each tensor starts at a multiple of it
ALIGNMENT_BYTES = 16  #: of the piece: the widest access of a kernel
FLOAT_BYTES = 4


class Layout(NamedTuple):
    """Byte offsets of the tensors in the piece, by name, and how many bytes it has."""

    offsets: tuple[tuple[str, int], ...]
    total: int


def layout(workspaces: Iterable[Workspace], lengths: Mapping[str, int]) -> Layout:
    """Return where the workspaces of a launch with these lengths lie."""
    offsets, end = [], 0
    for w in workspaces:
        offsets.append((w.name, end))
        size = math.prod(workspace_shape(w.shape, lengths)) * FLOAT_BYTES
        end += -(-size // STEP_BYTES) * STEP_BYTES
    return Layout(tuple(offsets), end)


def address_of(workspace: torch.Tensor, wanted: int, device: torch.device) -> int:
    """Return where a caller's workspace lies. Raises ValueError when it cannot serve."""
    if not isinstance(workspace, torch.Tensor):
        raise ValueError(f"workspace is a {type(workspace).__name__}, not a tensor")
    if workspace.device != device:
        raise ValueError(f"workspace is on {workspace.device} and q is on {device}")
    size = workspace.numel() * workspace.element_size()
    if size < wanted:
        raise ValueError(
            f"workspace has {size} bytes and this call needs {wanted}; workspace_bytes says how "
            f"many"
        )
    address = int(workspace.data_ptr())
    if not workspace.is_contiguous() or address % ALIGNMENT_BYTES:
        raise ValueError(
            f"workspace must be contiguous and lie at a multiple of {ALIGNMENT_BYTES} bytes; "
            f"torch.empty(bytes, dtype=torch.uint8, device=q.device) does"
        )
    return address


class Unplaced:
    """Stands for a tensor whose address is bound at each launch."""

    shape: tuple[int, ...] = ()

    def data_ptr(self) -> int:
        """No address yet."""
        return 0

    def stride(self) -> tuple[int, ...]:
        """None: kernels know how a workspace lies."""
        return ()
