"""Chooses the kernel of a call, packs its launch once per shape and strides, and starts it."""

from __future__ import annotations

import math
import re
import threading
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import checks, launch
from . import manifest as manifests
from .manifest import KernelEntry, Manifest, ShapeKey

MAX_PLANS = 4096  #: packed launches kept; a service with ever new lengths must not grow for ever


class NoKernelError(ValueError):
    """No kernel of the folder was checked on what was asked."""


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


class _Plan(NamedTuple):
    """A packed launch: everything of a call but its addresses."""

    prepared: launch.Prepared
    device: int
    out_shape: tuple[int, int, int, int]
    workspaces: tuple[tuple[str, tuple[int, ...]], ...]
    tickets: tuple[str, ...]


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
        allow_untuned: bool = False,
    ) -> torch.Tensor:
        """Compute attention; what the arguments mean stands at the folder's `attention`."""
        try:
            key = _key(q, k, v, causal, scale, out, allow_untuned)
            plan = self._plans.get(key)
        except (AttributeError, TypeError):  # not tensors: the checks say so
            plan = None
        if plan is None:
            return self._first(q, k, v, causal, scale, out, allow_untuned)
        checks.check_no_grad(q, k, v)
        result = out
        if result is None:
            result = torch.empty(plan.out_shape, dtype=q.dtype, device=q.device)
        addresses = {
            "Q": q.data_ptr(), "K": k.data_ptr(), "V": v.data_ptr(), "O": result.data_ptr(),
        }  # fmt: skip
        misaligned = addresses["Q"] | addresses["K"] | addresses["V"] | addresses["O"]
        if misaligned % checks.ALIGNMENT_BYTES:
            return self._first(q, k, v, causal, scale, out, allow_untuned)
        self._start(plan, addresses, q.device)
        return result

    def _start(self, plan: _Plan, addresses: dict[str, int], device: torch.device) -> None:
        held = []  # the allocator may give a workspace away only after the launch
        for name, shape in plan.workspaces:
            held.append(torch.empty(shape, dtype=torch.float32, device=device))
            addresses[name] = held[-1].data_ptr()
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

    def _first(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        scale: float | None,
        out: torch.Tensor | None,
        allow_untuned: bool,
    ) -> torch.Tensor:
        """Check a call, copy what kernels cannot read in place, and pack its launch."""
        sizes = checks.sizes_of(q, k, v)
        if not isinstance(causal, bool):
            raise ValueError(f"causal is {causal!r}; True or False is wanted")
        number = checks.check_scale(scale, sizes.head_dim)
        if out is not None:
            checks.check_out(out, q, sizes)
        checks.check_no_grad(q, k, v)
        device = self._cuda.index(q.device)
        result = out
        if result is None or not checks.is_readable(result):
            result = torch.empty(sizes.out_shape, dtype=q.dtype, device=q.device)
        if result.numel() and sizes.seqlen_k:
            dtype = checks.DTYPES[q.dtype]
            entry = self.choose(sizes, causal, dtype, device, allow_untuned)
            broadcast = not entry.uses_tensor_maps
            q, k, v = (checks.readable(t, broadcast) for t in (q, k, v))
            given = None if out is None else result
            key = _key(q, k, v, causal, scale, given, allow_untuned)
            plan = self._plans.get(key)
            if plan is None:
                tensors = {"Q": q, "K": k, "V": v, "O": result}
                with self._cuda.use(device):
                    plan = self._plan(entry, tensors, sizes, number, device)
                if len(self._plans) >= MAX_PLANS:
                    self._plans.clear()
                self._plans[key] = plan
            addresses = {
                "Q": q.data_ptr(), "K": k.data_ptr(), "V": v.data_ptr(), "O": result.data_ptr(),
            }  # fmt: skip
            self._start(plan, addresses, q.device)
        else:
            result.zero_()  # no keys: every row is 0; no rows: nothing to write
        if out is not None and result is not out:
            out.copy_(result)
            return out
        return result

    def _plan(
        self,
        entry: KernelEntry,
        tensors: dict[str, torch.Tensor],
        sizes: checks.Sizes,
        scale: float,
        device: int,
    ) -> _Plan:
        module = self._module(entry, device)
        lengths = entry.parameters | launch.problem_lengths(
            sizes.batch, sizes.heads, sizes.kv_heads, sizes.seqlen_q, sizes.seqlen_k
        )
        workspaces = tuple(
            (w.name, launch.workspace_shape(w.shape, lengths)) for w in entry.workspaces
        )
        spaces = {
            name: torch.empty(shape, dtype=torch.float32, device=tensors["Q"].device)
            for name, shape in workspaces
        }
        tickets = launch.ticket_names(entry.launches)
        spaces |= {
            name: torch.zeros(1, dtype=torch.int32, device=tensors["Q"].device) for name in tickets
        }
        prepared = launch.prepare(
            module, entry.launches, tensors | spaces, lengths, {"scale": scale}
        )
        return _Plan(prepared, device, sizes.out_shape, workspaces, tickets)

    def _module(self, entry: KernelEntry, device: int) -> launch.Module:
        with self._lock:
            known = self._modules.get((entry.name, device))
            if known is None:
                if self._cuda.is_capturing():
                    raise launch.LaunchError(
                        f"kernel {entry.name} is not loaded yet; call it once with these shapes "
                        f"before capturing a CUDA graph"
                    )
                known = self._cuda.load(entry.image(), device)
                self._modules[entry.name, device] = known
            return known

    def choose(
        self, sizes: checks.Sizes, causal: bool, dtype: str, device: int, allow_untuned: bool
    ) -> KernelEntry:
        """Return the kernel for a call. Raises NoKernelError saying what is there instead."""
        name, capability = self._cuda.name(device), self._cuda.capability(device)
        gpus = [gpu for gpu, title in self.manifest.gpus.items() if _is_called(name, title)]
        for gpu in gpus:
            asked = ShapeKey(*sizes, causal, dtype, gpu)
            found = self.manifest.shapes.get(asked)
            if found is not None and self.manifest.kernels[found].runs_on(*capability):
                return self.manifest.kernels[found]
        asked = ShapeKey(*sizes, causal, dtype, gpus[0] if gpus else name)
        legal = [
            (key, entry)
            for key, kernel in self.manifest.shapes.items()
            if (entry := self.manifest.kernels[kernel]).runs_on(*capability)
            and key[5:9] == asked[5:9]  # head dims, mask and dtype are compiled in
        ]
        nearest = min(
            legal, key=lambda f: (f[0].gpu not in gpus, _distance(f[0], asked)), default=None
        )
        if nearest is not None and allow_untuned:
            return nearest[1]
        raise NoKernelError(self._nothing_for(asked, capability, nearest))

    def _nothing_for(
        self,
        asked: ShapeKey,
        capability: tuple[int, int],
        nearest: tuple[ShapeKey, KernelEntry] | None,
    ) -> str:
        """Say what was asked, what is there, and what to do."""
        text = f"no kernel here was checked on {asked}"
        if nearest is not None:
            return (
                f"{text}; the nearest is {nearest[0]}. Pass allow_untuned=True to run that one, "
                f"or tune and export this shape"
            )
        arch = f"sm_{capability[0]}{capability[1]}"
        if not any(e.runs_on(*capability) for e in self.manifest.kernels.values()):
            built = sorted({e.arch for e in self.manifest.kernels.values()})
            titles = ", ".join(sorted(self.manifest.gpus.values()))
            return (
                f"{text}: the kernels are built for {titles} ({', '.join(built)}), and this "
                f"device is {arch}; tune and export on it"
            )
        kinds = sorted({_kind(key) for key in self.manifest.shapes})
        return f"{text}; compiled in are {'; '.join(kinds)}. Tune and export this one"


def _key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    out: torch.Tensor | None,
    allow_untuned: bool,
) -> tuple[Any, ...]:
    """Everything of a call that its packed launch depends on."""
    target = None if out is None else (out.shape, out.stride(), out.dtype, out.device)
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        causal, scale, allow_untuned, target,
    )  # fmt: skip


def _is_called(device_name: str, title: str) -> bool:
    """Whether a GPU's title stands in a device name as words of its own."""
    return re.search(rf"(?<!\w){re.escape(title)}(?!\w)", device_name, re.IGNORECASE) is not None


def _distance(have: ShapeKey, asked: ShapeKey) -> tuple[float, float]:
    """How far two shapes are apart: first by lengths, then by the number of heads in all."""
    lengths = abs(math.log(have.seqlen_q / asked.seqlen_q))
    lengths += abs(math.log(have.seqlen_k / asked.seqlen_k))
    return lengths, abs(math.log(have.batch * have.heads / (asked.batch * asked.heads)))


def _kind(key: ShapeKey) -> str:
    mask = "causal" if key.causal else "full"
    return f"D={key.head_dim} Dv={key.head_dim_v} {mask} {key.dtype}"
