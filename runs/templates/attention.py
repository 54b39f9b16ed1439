"""Chooses the kernel of a call, packs its launch once per shape and strides, and starts it."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import cache, checks, launch
from . import manifest as manifests
from .choice import Asked, NoKernelError, choose
from .manifest import KernelEntry, Manifest
from .workspace import Layout, Unplaced, address_of, layout

__all__ = ["Attention", "Cuda", "NoKernelError"]

MAX_PLANS = 4096  #: packed launches kept; a service with ever new lengths must not grow for ever


class Cuda:
    """The CUDA side of torch; tests put their own here."""

    def index(self, device: torch.device) -> int:
        """Return a device's number. Raises ValueError when it is no CUDA device."""
        if device.type != "cuda":
            raise ValueError(f"q is on {device}; these kernels run on CUDA devices")
        return torch.cuda.current_device() if device.index is None else int(device.index)

    def name(self, index: int) -> str:
        """Return what CUDA calls the device."""
        return str(torch.cuda.get_device_name(index))

    def capability(self, index: int) -> tuple[int, int]:
        """Return the compute capability."""
        major, minor = torch.cuda.get_device_capability(index)
        return int(major), int(minor)

    def current(self) -> int:
        """Return the current device's number."""
        return int(torch.cuda.current_device())

    def use(self, index: int) -> AbstractContextManager[Any]:
        """Make a device current for a while."""
        guard: AbstractContextManager[Any] = torch.cuda.device(index)
        return guard

    def stream(self, index: int) -> int:
        """Return the handle of torch's current stream on the device."""
        return int(torch.cuda.current_stream(index).cuda_stream)

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return bool(torch.cuda.is_current_stream_capturing())

    def load(self, image: bytes, index: int) -> launch.Module:
        """Load machine code on the device."""
        return launch.load(image, index)


class _Call(NamedTuple):
    """What was passed, as it stands at the folder's `attention`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    scale: float | None
    out: torch.Tensor | None
    seqlens_k: torch.Tensor | None
    block_table: torch.Tensor | None
    allow_untuned: bool


class _Plan(NamedTuple):
    """A packed launch: everything of a call but its addresses."""

    prepared: launch.Prepared
    device: int
    out_shape: tuple[int, int, int, int]
    workspace: Layout
    tickets: tuple[str, ...]
    decodes: bool
    is_latent: bool


class Attention:
    """The kernels of one exported folder."""

    def __init__(self, folder: Path, cuda: Cuda | None = None) -> None:
        self._folder = folder
        self._cuda = cuda or Cuda()
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._modules: dict[tuple[str, int], launch.Module] = {}
        self._tickets: dict[tuple[str, int, int], torch.Tensor] = {}
        self._lock = threading.Lock()

    @cached_property
    def manifest(self) -> Manifest:
        """The folder's manifest, read at the first call. Raises ManifestError."""
        return manifests.read(self._folder)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        out: torch.Tensor | None = None,
        seqlens_k: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        validate: bool = False,
        allow_untuned: bool = False,
    ) -> torch.Tensor:
        """Compute attention; what the arguments mean stands at the folder's `attention`."""
        try:
            key = _key(q, k, v, causal, scale, out, seqlens_k, block_table, allow_untuned)
            plan = self._plans.get(key)
        except (AttributeError, TypeError):  # not tensors: the checks say so
            plan = None
        if plan is None or validate:
            call = _Call(q, k, v, causal, scale, out, seqlens_k, block_table, allow_untuned)
            return self._first(call, workspace, validate)
        checks.check_no_grad(q, k, v)
        result = out
        if result is None:
            result = torch.empty(plan.out_shape, dtype=q.dtype, device=q.device)
        addresses = {
            "Q": q.data_ptr(), "K": k.data_ptr(), "V": v.data_ptr(), "O": result.data_ptr(),
        }  # fmt: skip
        misaligned = addresses["Q"] | addresses["K"] | addresses["V"] | addresses["O"]
        apart = plan.is_latent and addresses["K"] != addresses["V"]
        if misaligned % checks.ALIGNMENT_BYTES or apart:
            call = _Call(q, k, v, causal, scale, out, seqlens_k, block_table, allow_untuned)
            return self._first(call, workspace, validate)
        if plan.decodes:
            addresses |= _cache_addresses(seqlens_k, block_table)
        self._start(plan, addresses, q.device, workspace)
        return result

    def workspace_bytes(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        seqlens_k: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        allow_untuned: bool = False,
    ) -> int:
        """Return the bytes of workspace that a call wants, and load its kernel."""
        call = _Call(q, k, v, causal, None, None, seqlens_k, block_table, allow_untuned)
        sizes, device = self._checked(call)
        if not (sizes.batch * sizes.seqlen_q * sizes.heads and sizes.seqlen_k):
            return 0
        entry = self._choose(call, sizes, device)
        with self._cuda.use(device):
            self._module(entry, device)
            return layout(entry.workspaces, self._lengths(entry, sizes, device)).total

    def _start(
        self,
        plan: _Plan,
        addresses: dict[str, int],
        device: torch.device,
        workspace: torch.Tensor | None,
    ) -> None:
        """Bind what is not yet in `addresses` and launch.

        Memory taken here is held until then: the allocator may give it away only afterwards.
        """
        held = []
        wanted = plan.workspace.total
        if wanted and workspace is None:
            workspace = torch.empty(wanted, dtype=torch.uint8, device=device)
        base = 0 if workspace is None else address_of(workspace, wanted, device)
        for name, offset in plan.workspace.offsets:
            addresses[name] = base + offset
        stream = self._cuda.stream(plan.device)
        for name in plan.tickets:
            held.append(self._ticket(name, plan.device, stream, device))
            addresses[name] = held[-1].data_ptr()
        if plan.device == self._cuda.current():
            plan.prepared.launch(stream, addresses)
            return
        with self._cuda.use(plan.device):
            plan.prepared.launch(stream, addresses)

    def _ticket(self, name: str, index: int, stream: int, device: torch.device) -> torch.Tensor:
        """Return a counter that no launch on another stream uses at the same time.

        Kernels leave it at 0. A graph may be replayed on any stream, so it gets its own.
        """
        if self._cuda.is_capturing():
            return torch.zeros(1, dtype=torch.int32, device=device)
        key = (name, index, stream)
        if key not in self._tickets:
            self._tickets[key] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._tickets[key]

    def _checked(self, call: _Call) -> tuple[checks.Sizes, int]:
        """Check what every call must satisfy; return its sizes and its device's number."""
        sizes = checks.sizes_of(call.q, call.k, call.v, call.block_table)
        if not isinstance(call.causal, bool):
            raise ValueError(f"causal is {call.causal!r}; True or False is wanted")
        if call.seqlens_k is not None:
            cache.check_key_counts(call.seqlens_k, sizes.batch, call.q.device)
        return sizes, self._cuda.index(call.q.device)

    def _first(self, call: _Call, workspace: torch.Tensor | None, validate: bool) -> torch.Tensor:
        """Check a call, copy what kernels cannot read in place, and pack its launch."""
        q, out = call.q, call.out
        sizes, device = self._checked(call)
        scale = checks.check_scale(call.scale, sizes)
        if out is not None:
            checks.check_out(out, q, sizes)
        checks.check_no_grad(q, call.k, call.v)
        if validate:
            self._validate(call, sizes)
        result = out
        if result is None or not checks.is_readable(result):
            result = torch.empty(sizes.out_shape, dtype=q.dtype, device=q.device)
        if result.numel() and sizes.seqlen_k:
            entry = self._choose(call, sizes, device)
            call = _readable(call, entry)._replace(out=None if out is None else result)
            key = _key(*call)
            plan = self._plans.get(key)
            if plan is None:
                with self._cuda.use(device):
                    plan = self._plan(entry, call, result, sizes, scale, device)
                if len(self._plans) >= MAX_PLANS:
                    self._plans.clear()
                self._plans[key] = plan
            addresses = {
                "Q": call.q.data_ptr(), "K": call.k.data_ptr(), "V": call.v.data_ptr(),
                "O": result.data_ptr(), **_cache_addresses(call.seqlens_k, call.block_table),
            }  # fmt: skip
            self._start(plan, addresses, q.device, workspace)
        else:
            result.zero_()  # no keys: every row is 0; no rows: nothing to write
        if out is not None and result is not out:
            out.copy_(result)
            return out
        return result

    def _validate(self, call: _Call, sizes: checks.Sizes) -> None:
        if self._cuda.is_capturing():
            raise ValueError("validate=True waits for the device; leave it out of a CUDA graph")
        cache.check_contents(
            call.seqlens_k, call.block_table, sizes.seqlen_k, call.k.shape[1], call.k.shape[0]
        )

    def _plan(
        self,
        entry: KernelEntry,
        call: _Call,
        result: torch.Tensor,
        sizes: checks.Sizes,
        scale: float,
        device: int,
    ) -> _Plan:
        lengths = self._lengths(entry, sizes, device)
        tickets = launch.ticket_names(entry.launches)
        unplaced = (*tickets, *(w.name for w in entry.workspaces), "key_counts")
        tensors: dict[str, launch.TensorLike] = {name: Unplaced() for name in unplaced}
        tensors |= {"Q": call.q, "K": call.k, "V": call.v, "O": result}
        if call.block_table is not None:
            tensors["pages"] = call.block_table
        module = self._module(entry, device)
        prepared = launch.prepare(module, entry.launches, tensors, lengths, {"scale": scale})
        return _Plan(
            prepared, device, sizes.out_shape, layout(entry.workspaces, lengths), tickets,
            entry.splits is not None, entry.is_latent,
        )  # fmt: skip

    def _lengths(self, entry: KernelEntry, sizes: checks.Sizes, device: int) -> dict[str, int]:
        """Return the lengths of a launch by name, the number of key splits among them."""
        lengths = entry.parameters | launch.problem_lengths(
            sizes.batch, sizes.heads, sizes.kv_heads, sizes.seqlen_q, sizes.seqlen_k
        )
        if entry.splits is not None:
            num_sms = self._module(entry, device).num_sms
            lengths["splits"] = launch.split_count(entry.splits, lengths, num_sms)
        return lengths

    def _module(self, entry: KernelEntry, device: int) -> launch.Module:
        with self._lock:
            known = self._modules.get((entry.name, device))
            if known is None:
                if self._cuda.is_capturing():
                    raise launch.LaunchError(
                        f"kernel {entry.name} is not loaded yet; call it once with these shapes, "
                        f"or ask workspace_bytes of them, before capturing a CUDA graph"
                    )
                known = self._cuda.load(entry.image(), device)
                self._modules[entry.name, device] = known
            return known

    def _choose(self, call: _Call, sizes: checks.Sizes, device: int) -> KernelEntry:
        """Return the kernel for a call. Raises NoKernelError, or ValueError for a foreign V."""
        asked = Asked(
            sizes,
            call.causal,
            checks.DTYPES[call.q.dtype],
            0 if call.block_table is None else int(call.k.shape[1]),
            call.seqlens_k is not None,
            call.allow_untuned,
        )
        name, capability = self._cuda.name(device), self._cuda.capability(device)
        entry = choose(self.manifest, asked, name, capability)
        if entry.is_latent:
            cache.check_latent(call.k, call.v)
        return entry


def _readable(call: _Call, entry: KernelEntry) -> _Call:
    """Return the call with copies of what the kernel cannot read in place.

    Raises ValueError where that is a paged cache, which is never copied.
    """
    broadcast = not entry.uses_tensor_maps
    q, k, v = call.q, call.k, call.v
    if entry.is_paged:
        checks.check_readable("k", k, broadcast)
        checks.check_readable("v", v, broadcast)
    k = checks.readable(k, broadcast)
    v = k[..., : v.shape[3]] if entry.is_latent else checks.readable(v, broadcast)
    return call._replace(q=checks.readable(q, broadcast), k=k, v=v)


def _cache_addresses(
    seqlens_k: torch.Tensor | None, block_table: torch.Tensor | None
) -> dict[str, int]:
    """Return the addresses of what only kernels that decode read; 0 where there is none."""
    return {
        "key_counts": 0 if seqlens_k is None else seqlens_k.data_ptr(),
        "pages": 0 if block_table is None else block_table.data_ptr(),
    }


def _key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    out: torch.Tensor | None,
    seqlens_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    allow_untuned: bool,
) -> tuple[Any, ...]:
    """Everything of a call that its packed launch depends on."""
    target = None if out is None else _layout_of(out)
    counts = None if seqlens_k is None else _layout_of(seqlens_k)
    pages = None if block_table is None else _layout_of(block_table)
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        q.is_neg(), k.is_neg(), v.is_neg(), causal, scale, allow_untuned, target, counts, pages,
    )  # fmt: skip


def _layout_of(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device, t.is_neg()
