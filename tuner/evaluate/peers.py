"""Attention kernels of others that are found on this machine, each named for what really runs.

A peer that cannot run a shape raises here and is reported absent with that reason; nothing falls
back to another kernel in silence.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from tuner.evaluate.cache import counts_of
from tuner.evaluate.inputs import Inputs

Run = Callable[[], torch.Tensor]
Make = Callable[[Inputs], Run]

SHORT_QUERIES = 8  #: with at most so many, a peer that has a decode kernel is asked for that one
PACKAGES = ("fa3-fwd", "flash-attn-3", "flash-attn-4", "flash-attn")


class PeerAbsent(Exception):
    """This peer has no kernel for the problem, or is not installed."""


def peers() -> dict[str, Make]:
    """Return every peer by name; whether it runs a problem shows when it is made."""
    return {
        "fa2": _sdpa("FLASH_ATTENTION"),
        "cudnn": _sdpa("CUDNN_ATTENTION"),
        "efficient": _sdpa("EFFICIENT_ATTENTION"),
        "fa3": _package("fa3_fwd_interface"),
        "fa4": _package("flash_attn.cute"),
    }


def sees_all(inputs: Inputs) -> bool:
    """Whether the mask hides nothing; a single query aligned bottom-right sees every key."""
    return not inputs.causal or inputs.q.shape[1] == 1


def _sdpa(backend_name: str) -> Make:
    def make(inputs: Inputs) -> Run:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        if inputs.cache is not None:
            raise PeerAbsent("it reads no paged cache")
        q, k, v = (t.transpose(1, 2) for t in inputs.tensors)
        causal = not sees_all(inputs)
        if causal and q.shape[2] != k.shape[2]:
            raise PeerAbsent("its causal mask is aligned top-left, ours bottom-right")
        backend = getattr(SDPBackend, backend_name)
        grouped = q.shape[1] != k.shape[1]

        def run() -> torch.Tensor:
            with sdpa_kernel(backend):
                out: torch.Tensor = scaled_dot_product_attention(
                    q, k, v, is_causal=causal, scale=inputs.scale, enable_gqa=grouped
                )
            return out.transpose(1, 2)

        return run

    return make


def _package(module_name: str) -> Make:
    def make(inputs: Inputs) -> Run:
        try:
            module = importlib.import_module(module_name)
        except (ImportError, OSError) as error:  # OSError: a library built for another CUDA
            raise PeerAbsent(f"not installed ({error})") from error
        q, k, v = inputs.tensors
        causal = not sees_all(inputs)
        if q.shape[1] <= SHORT_QUERIES and hasattr(module, "flash_attn_with_kvcache"):
            return _from_cache(module.flash_attn_with_kvcache, inputs, causal)
        if inputs.cache is not None:
            raise PeerAbsent("it reads no paged cache")

        def run() -> torch.Tensor:
            found: Any = module.flash_attn_func(q, k, v, softmax_scale=inputs.scale, causal=causal)
            out: torch.Tensor = found[0] if isinstance(found, tuple) else found
            return out

        return run

    return make


def _from_cache(attend: Callable[..., Any], inputs: Inputs, causal: bool) -> Run:
    """FlashAttention's decode kernel, which splits the keys; absorbed MLA by its argument `qv`."""
    q, k, v = inputs.tensors
    more: dict[str, Any] = {"softmax_scale": inputs.scale, "causal": causal}
    if inputs.cache is not None:
        lengths = inputs.cache.lengths(k)
        more["cache_seqlens"] = counts_of(lengths, q.device)
        more["page_table"] = inputs.cache.pages
    if inputs.latent:
        columns = v.shape[3]
        more["qv"] = q[..., :columns]
        q, k = q[..., columns:], k[..., columns:]

    def run() -> torch.Tensor:
        found: Any = attend(q, k, v, **more)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out

    return run


def start(make: Make, inputs: Inputs) -> tuple[Run, torch.Tensor]:
    """Return a peer's call with its first output. Raises PeerAbsent with the reason."""
    try:
        run = make(inputs)
        out = run()
    except PeerAbsent:
        raise
    except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise PeerAbsent(lines[0][:200]) from error
    if inputs.q.is_cuda:
        torch.cuda.synchronize(inputs.q.device)
    return run, out


def kernel_names(inputs: Inputs) -> tuple[tuple[str, str], ...]:
    """Return each peer that runs these inputs with the device kernel behind its name."""
    found = []
    for name, make in peers().items():
        try:
            run, _ = start(make, inputs)
        except PeerAbsent:
            continue
        found.append((name, kernel_name(run)))
    return tuple(found)


def kernel_name(run: Run) -> str:
    """Return the device kernel that takes most of a call, as the profiler names it; may be ""."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
    except RuntimeError:  # no right to the profiler in this container
        return ""
    events = [e for e in profiler.key_averages() if e.device_time_total > 0]
    if not events:
        return ""
    return str(max(events, key=lambda e: float(e.device_time_total)).key)


def versions() -> dict[str, str]:
    """Return the versions of torch, cuDNN and the attention packages that are installed."""
    found = {"torch": str(torch.__version__), "torch_cuda": str(torch.version.cuda)}
    if torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
