"""How many splits of the keys a timed kernel ran with: part of the record of its time."""

from __future__ import annotations

from dataclasses import replace

import torch

from codegen.kernel import KernelSource
from runs.record import Timing
from runs.templates.lengths import problem_lengths, split_count
from space.gpu import GpuSpec


def multiprocessors(device: torch.device, gpu: GpuSpec | None) -> int:
    """Return the multiprocessors of a device, by its card's data where torch cannot ask it.

    0 when that is not known either.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 0 if gpu is None else gpu.num_sms


def with_splits(timing: Timing, source: KernelSource, num_sms: int, page: int = 0) -> Timing:
    """Return the timing of a kernel with the splits that its rule gave the keys of the shape.

    A cache in pages of `page` keys has room for whole pages.
    """
    if source.splits is None or not num_sms:
        return timing
    s = timing.shape
    keys = -(-s.seqlen_k // page) * page if page else s.seqlen_k
    lengths = problem_lengths(s.batch, s.heads, s.kv_heads, s.seqlen_q, keys)
    return replace(timing, splits=split_count(source.splits, lengths, num_sms))
