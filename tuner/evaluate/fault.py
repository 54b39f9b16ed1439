"""Whether a device still answers."""

from __future__ import annotations

import torch


def device_fault(device: torch.device) -> str | None:
    """Return what a device says when it no longer answers, or None when it is well."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return None
