"""The emitted kernel as a function of tensors; how it is packed and started is `runs`' business."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from codegen.kernel import ArgKind, KernelSource
from runs.templates import cache
from runs.templates import launch as driver

Launcher = Callable[[], None]
#: prepare(q, k, v, out, scale) packs the arguments once; the result starts the kernel, no wait.
#: That of a decode kernel takes key_counts, pages and splits by name (`LoadedKernel.prepare`).
Prepare = Callable[..., Launcher]

LaunchError = driver.LaunchError

ALIGNMENT_BYTES = 16  #: what one lane's copy moves


class Start:
    """A packed launch. The tensors live as long as it does."""

    def __init__(
        self, call: driver.Prepared, workspaces: tuple[torch.Tensor, ...],
        held: tuple[torch.Tensor, ...],
    ) -> None:  # fmt: skip
        self._call, self._workspaces, self._held = call, workspaces, held
        self.stream: Callable[[], int] = _current_stream

    def __call__(self) -> None:
        """Start the kernels on the current stream; does not wait."""
        self._call.launch(self.stream())

    def forget(self) -> None:
        """Fill what one kernel hands to the next with NaN: no launch may live on an earlier one."""
        for tensor in self._workspaces:
            tensor.fill_(math.nan)


class LoadedKernel:
    """A cubin on a device, ready to be bound to tensors."""

    def __init__(self, source: KernelSource, image: bytes, device: torch.device) -> None:
        """Load the cubin. Raises LaunchError when the device refuses it."""
        torch.zeros(1, device=device)  # torch makes the context that the module is loaded into
        self._source = source
        self._module = driver.load(image, device.index or 0)

    def unload(self) -> None:
        """Free the code; nothing prepared may run afterwards."""
        self._module.unload()

    def prepare(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        key_counts: torch.Tensor | None = None,
        pages: torch.Tensor | None = None,
        splits: int | None = None,
    ) -> Launcher:
        """Pack a launch on these tensors. Raises LaunchError when it cannot be made as asked.

        A decode kernel takes `key_counts`, int32 [B], the keys of each sequence, and a paged one
        `pages`, int32 [B, P], the block table of K and V, which are then [pages, rows, Hkv, D].
        Without `key_counts` every sequence is as long as its cache; without `splits` the keys are
        in as many as the kernel's rule says.
        """
        if out.numel() == 0:
            return _nothing  # a grid of 0 blocks is an error, an empty output is not
        self._check_cache(q, k, v, key_counts, pages)
        check_sizes(q, k, v, out, paged=pages is not None)
        tensors = {"Q": q, "K": k, "V": v, "O": out}
        for name, tensor in tensors.items():
            check_alignment(name, tensor)
        if key_counts is not None:
            tensors["key_counts"] = key_counts
        if pages is not None:
            tensors["pages"] = pages
        lengths = self.lengths(q, k, pages)
        if splits is not None:
            if self._source.splits is None or splits < 1:
                raise LaunchError(f"the keys cannot be in {splits} splits")
            lengths["splits"] = splits
        for w in self._source.workspaces:
            sizes = driver.workspace_shape(w.shape, lengths)
            tensors[w.name] = torch.full(sizes, math.nan, dtype=torch.float32, device=q.device)
        for name in driver.ticket_names(self._source.launches):
            tensors[name] = torch.zeros(1, dtype=torch.int32, device=q.device)
        call = driver.prepare(
            self._module, self._source.launches, tensors, lengths, {"scale": scale}
        )

        workspaces = tuple(tensors[w.name] for w in self._source.workspaces)
        return Start(call, workspaces, tuple(tensors.values()))

    def lengths(
        self, q: torch.Tensor, k: torch.Tensor, pages: torch.Tensor | None = None
    ) -> dict[str, int]:
        """Return the lengths of a launch by name; those of a decode kernel have `splits`."""
        keys = k.shape[1] if pages is None else pages.shape[1] * k.shape[1]
        found = driver.problem_lengths(q.shape[0], q.shape[2], k.shape[2], q.shape[1], keys)
        if self._source.splits is not None:
            found["splits"] = driver.split_count(self._source.splits, found, self._module.num_sms)
        return found

    def _check_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        key_counts: torch.Tensor | None,
        pages: torch.Tensor | None,
    ) -> None:
        """Raise LaunchError when the kernel and the tensors differ about what the cache is."""
        kinds = {arg.kind for x in self._source.launches for arg in x.args}
        if key_counts is not None and ArgKind.KEY_COUNTS not in kinds:
            raise LaunchError("the kernel takes no length for each sequence; key_counts were given")
        if pages is None and ArgKind.PAGES in kinds:
            raise LaunchError("the kernel reads a paged cache; pages are wanted")
        if pages is not None and ArgKind.PAGES not in kinds:
            raise LaunchError("the kernel reads no paged cache; pages were given")
        try:
            if key_counts is not None:
                cache.check_key_counts(key_counts, q.shape[0], q.device)
            if pages is not None:
                cache.check_pages(pages, q.shape[0], k.shape[1], q.device)
            if self._source.splits is not None and "V" not in dict(self._source.tensors):
                cache.check_latent(k, v)
        except ValueError as fault:
            raise LaunchError(str(fault)) from None


def _nothing() -> None:
    return None


def _current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def check_sizes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, paged: bool = False
) -> None:
    """Raise LaunchError, naming the sizes, unless the four tensors are one attention problem.

    The first axis of a paged K and V is that of pages, any number of them.
    """
    if k.shape[:3] != v.shape[:3]:
        raise LaunchError(
            f"K has [batch, rows, heads] {list(k.shape[:3])} and V {list(v.shape[:3])}; "
            f"they must agree"
        )
    if (q.shape[0] != k.shape[0] and not paged) or q.shape[3] != k.shape[3]:
        raise LaunchError(
            f"Q is {list(q.shape)} and K {list(k.shape)}; batch and head dim must agree"
        )
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise LaunchError(f"{q.shape[2]} query heads are no multiple of {k.shape[2]} KV heads")
    if out.shape != (*q.shape[:3], v.shape[3]):
        raise LaunchError(f"O is {list(out.shape)}, {[*q.shape[:3], v.shape[3]]} is right")


def check_alignment(name: str, t: torch.Tensor) -> None:
    """Raise LaunchError, naming the remedy, unless 16-byte copies can read every row of `t`."""
    if t.numel() == 0:
        return
    if t.shape[3] > 1 and t.stride(3) != 1:
        raise LaunchError(
            f"{name}: last dimension has stride {t.stride(3)}, 1 is needed; call .contiguous()"
        )
    if t.data_ptr() % ALIGNMENT_BYTES:
        raise LaunchError(
            f"{name}: address {t.data_ptr():#x} is not a multiple of {ALIGNMENT_BYTES} bytes; "
            f"copy it with .clone()"
        )
    elements = ALIGNMENT_BYTES // t.element_size()
    for axis, what in enumerate(("batch", "row", "head")):
        if t.shape[axis] > 1 and t.stride(axis) % elements:
            raise LaunchError(
                f"{name}: {what} stride {t.stride(axis)} is not a multiple of {elements} elements; "
                f"call .contiguous()"
            )
