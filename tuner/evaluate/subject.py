"""A kernel on disk as the judge calls it: from a run by its cubin, from a folder by its entry."""

from __future__ import annotations

from typing import TypeAlias

import torch

from runs.store import RunStore
from runs.templates.attention import Attention
from runs.templates.manifest import Manifest, ManifestError
from tuner.evaluate.launch import Launcher, LaunchError, LoadedKernel, Prepare
from tuner.subjects import Subject

T: TypeAlias = torch.Tensor


def loaded(subject: Subject, device: torch.device) -> Prepare:
    """Return the kernel, ready for tensors. Raises LaunchError when it cannot be loaded."""
    if subject.exported:
        return _exported(subject)
    stored = RunStore.open(subject.folder).kernel(subject.kernel)
    return LoadedKernel(stored.source, stored.cubin.image, device).prepare


def _exported(subject: Subject) -> Prepare:
    """The folder's own way to call it, with this one kernel in its manifest."""
    attention = Attention(subject.folder)
    whole = attention.manifest
    mine = {key: name for key, name in whole.shapes.items() if name == subject.kernel}
    kernels = {subject.kernel: whole.kernels[subject.kernel]}
    attention.manifest = Manifest(kernels, mine, whole.gpus)
    causal = subject.problem.causal

    def prepare(
        q: T, k: T, v: T, out: T, scale: float, key_counts: T | None = None,
        pages: T | None = None, splits: int | None = None,
    ) -> Launcher:  # fmt: skip
        # the folder has no way to ask for a number of splits: its own rule holds
        def launch() -> None:
            try:
                attention(
                    q, k, v, causal=causal, scale=scale, out=out, seqlens_k=key_counts,
                    block_table=pages, allow_untuned=True,
                )  # fmt: skip
            except (ValueError, ManifestError) as refused:
                raise LaunchError(str(refused)) from refused

        return launch

    return prepare
