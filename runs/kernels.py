"""Kernels on disk: source, machine code and log of one build, checked when read back."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from codegen.kernel import Cubin, KernelSource, Launch, Resources, SplitRule, Workspace
from runs import codec
from runs.errors import CodecError, StoreError
from runs.files import private_folder, publish, read_regular, write_synced

SOURCE, IMAGE, LOG, ABOUT = "source.cu", "image.cubin", "log.txt", "kernel.json"


@dataclass(frozen=True, slots=True)
class StoredKernel:
    """A kernel as it was built: its source with the launch description, and its machine code."""

    source: KernelSource
    cubin: Cubin


@dataclass(frozen=True, slots=True)
class _About:
    """What kernel.json holds: all of a StoredKernel but the text, the image and the log."""

    v: int
    source_arch: str
    launches: tuple[Launch, ...]
    tensors: tuple[tuple[str, str], ...]
    workspaces: tuple[Workspace, ...]
    source_digest: str
    arch: str
    key: str
    resources: tuple[Resources, ...]
    compile_s: float
    nvrtc_version: str
    image_sha256: str
    splits: SplitRule | None = None
    #: of everything else here: grids and arguments stand in no text and no image; "" before it was
    sha256: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 of the other fields, hex."""
        return hashlib.sha256(codec.to_text(replace(self, sha256="")).encode()).hexdigest()


def write_kernel(folder: Path, source: KernelSource, cubin: Cubin) -> None:
    """Write a kernel as `folder`, whole or not at all; one that is there is kept.

    Raises StoreError when the disk refuses.
    """
    if folder.is_dir():
        return
    about = _About(
        codec.SCHEMA, source.arch, source.launches, source.tensors, source.workspaces,
        source.digest, cubin.arch, cubin.key, cubin.resources, cubin.compile_s,
        cubin.nvrtc_version, hashlib.sha256(cubin.image).hexdigest(), source.splits,
    )  # fmt: skip
    about = replace(about, sha256=about.digest)
    try:
        with private_folder(folder.parent) as private:
            write_synced(private / SOURCE, source.text.encode())
            write_synced(private / IMAGE, cubin.image)
            write_synced(private / LOG, cubin.log.encode())
            write_synced(private / ABOUT, codec.to_text(about).encode() + b"\n")
            publish(private, folder)
    except OSError as error:
        raise StoreError(f"cannot write {folder}: {error.strerror}") from None


def read_kernel(folder: Path) -> StoredKernel:
    """Read a kernel back. Raises StoreError when it is absent or not what was written."""
    try:
        body = codec.parse(read_regular(folder / ABOUT).decode())
        codec.check_schema(body.get("v") if isinstance(body, dict) else None)
        about = codec.from_json(_About, body)
        text = read_regular(folder / SOURCE).decode()
        image = read_regular(folder / IMAGE)
        log = read_regular(folder / LOG).decode()
    except OSError as error:
        raise StoreError(f"cannot read kernel {folder}: {error.strerror}") from None
    except (CodecError, UnicodeDecodeError) as error:
        raise StoreError(f"{folder / ABOUT} is damaged: {error}") from None
    if about.key != folder.name:
        raise StoreError(f"{folder / ABOUT} is damaged: it describes kernel {about.key[:80]!a}")
    if about.sha256 and about.sha256 != about.digest:
        raise StoreError(f"{folder / ABOUT} is damaged: its digest differs")
    if hashlib.sha256(image).hexdigest() != about.image_sha256:
        raise StoreError(f"{folder / IMAGE} is damaged: it is not the code that was judged")
    source = KernelSource(
        text, about.source_arch, about.launches, about.tensors, about.workspaces, about.splits
    )
    if source.digest != about.source_digest:
        raise StoreError(f"{folder / SOURCE} is damaged: it is not the text that was compiled")
    cubin = Cubin(
        image, about.arch, about.source_digest, about.key, log, about.resources,
        about.compile_s, about.nvrtc_version,
    )  # fmt: skip
    return StoredKernel(source, cubin)
