"""Reads manifest.json: which kernel serves which shape, every field checked, no path outside."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from . import launch
from .description import SPLIT_RULE_MAX, SplitRule

FORMAT, VERSION = "tltune-export", 2
FIRST_VERSION = 1  #: what is read; before 2 no kernel decoded
PREFILL, DECODE = "prefill", "decode"
PAGE_MAX = 1 << 16
_FILE = re.compile(r"kernels/[A-Za-z0-9_][A-Za-z0-9._-]*")
_HEX = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_ARG = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}(\.[bsh])?")
_LENGTH = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}|[0-9]{1,9}")
_ARCH = re.compile(r"sm_(\d+)(\d)([af]?)")


class ManifestError(RuntimeError):
    """The folder is not what was exported; says which file or field."""


class ShapeKey(NamedTuple):
    """What must be equal for a kernel to have been checked on a call."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool
    dtype: str
    gpu: str
    phase: str = PREFILL
    page: int = 0  #: keys in a page of the cache that is decoded from, 0: in one piece

    def __str__(self) -> str:
        b, hq, hkv, sq, sk, d, dv, causal, dtype, gpu, phase, page = self
        mask = "causal" if causal else "full"
        kind = f"{mask} {dtype}" + (" decode" if phase == DECODE else "")
        kind += f" in pages of {page}" if page else ""
        return f"B={b} Hq={hq} Hkv={hkv} Sq={sq} Sk={sk} D={d} Dv={dv} {kind} on {gpu}"


class Workspace(NamedTuple):
    """A float32 tensor that one kernel of a program hands to the next."""

    name: str
    shape: tuple[str, ...]


class KernelEntry(NamedTuple):
    """One program: its machine code and how its kernels are started."""

    name: str
    cubin: Path
    cubin_sha256: str
    arch: str
    launches: tuple[launch.Launch, ...]
    workspaces: tuple[Workspace, ...]
    parameters: dict[str, int]
    splits: SplitRule | None = None  #: of a kernel that decodes

    @property
    def uses_tensor_maps(self) -> bool:
        """Whether kernels read or write through TMA descriptors."""
        return any(arg.kind == "tensor_map" for x in self.launches for arg in x.args)

    @property
    def is_paged(self) -> bool:
        """Whether K and V are read through a block table."""
        return any(arg.kind == "pages" for x in self.launches for arg in x.args)

    @property
    def is_latent(self) -> bool:
        """Whether V is read as the first columns of K."""
        names = {arg.name.partition(".")[0] for x in self.launches for arg in x.args}
        return self.splits is not None and "V" not in names

    def image(self) -> bytes:
        """Return the machine code. Raises ManifestError when it is not what was exported."""
        try:
            if not self.cubin.is_file():  # a pipe would be waited for
                raise ManifestError(f"cannot read {self.cubin}: no such file")
            data = self.cubin.read_bytes()
        except OSError as error:
            raise ManifestError(f"cannot read {self.cubin}: {error.strerror}") from None
        if hashlib.sha256(data).hexdigest() != self.cubin_sha256:
            raise ManifestError(f"{self.cubin} is damaged: its digest differs; export again")
        return data

    def runs_on(self, major: int, minor: int) -> bool:
        """Whether a device of this compute capability can load the code."""
        found = _ARCH.fullmatch(self.arch)
        assert found is not None  # checked when read
        wanted = (int(found[1]), int(found[2]))
        return wanted == (major, minor) or (
            not found[3] and wanted[0] == major and wanted[1] <= minor
        )


class Manifest(NamedTuple):
    """An exported folder."""

    kernels: dict[str, KernelEntry]
    shapes: dict[ShapeKey, str]  #: the kernel's name
    gpus: dict[str, str]  #: name -> the words by which CUDA calls the device


def read(folder: Path) -> Manifest:
    """Read and check a folder's manifest. Raises ManifestError."""
    path = folder / "manifest.json"
    data = _load(path)
    try:
        manifest = _manifest(folder, data)
        _check_digest(data)
        return manifest
    except _Fault as fault:
        raise ManifestError(f"{path}: {fault}") from None


class Function(NamedTuple):
    """What kernels compute in place of attention; its text is not exported."""

    name: str  #: FILE.py:function
    file_sha256: str
    scalars: tuple[tuple[str, float], ...]


def functions(folder: Path) -> tuple[Function, ...]:
    """Return the functions that kernels compute in place of attention.

    Raises ManifestError when the manifest cannot be read or is not what was exported.
    """
    path = folder / "manifest.json"
    data = _load(path)
    try:
        _check_digest(data)
        said = [k.get("computes") for k in data["kernels"].values()]
        return tuple(dict.fromkeys(_function(f) for f in said if f is not None))
    except (_Fault, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ManifestError(f"cannot read {path}: {error}") from None


def _function(said: Any) -> Function:
    scalars = tuple(sorted((str(n), float(v)) for n, v in said["scalars"].items()))
    return Function(str(said["function"]), str(said["file_sha256"]), scalars)


def _load(path: Path) -> Any:
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ManifestError(f"cannot read {path}: it is no regular file")
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"cannot read {path}: {error}") from None


def digest_of(data: dict[str, Any]) -> str:
    """Return the digest of everything else that a manifest says. Raises ValueError on NaN, inf.

    What a kernel is compiled for (head dims, mask, dtype, tiles) stands in the manifest alone: one
    changed number would start it on tensors it was never judged on.
    """
    rest = {name: value for name, value in data.items() if name != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_digest(data: dict[str, Any]) -> None:
    try:
        same = digest_of(data) == _get(data, "sha256", str)
    except (ValueError, RecursionError):
        same = False
    if not same:
        raise _Fault("it is not what was exported: its digest differs; export again")


class _Fault(Exception):
    """A field that is not what it should be."""


def _manifest(folder: Path, data: Any) -> Manifest:
    head = _fields(data, "manifest")
    version = _get(head, "version", int)
    if _get(head, "format", str) != FORMAT or not FIRST_VERSION <= version <= VERSION:
        raise _Fault(f"not a {FORMAT} of version {FIRST_VERSION} to {VERSION}")
    gpus = {
        name: _get(_fields(gpu, f"gpu {name}"), "title", str)
        for name, gpu in _fields(head.get("gpus"), "gpus").items()
    }
    kernels = {
        name: _kernel(folder, name, _fields(body, f"kernel {name}"))
        for name, body in _fields(head.get("kernels"), "kernels").items()
    }
    shapes: dict[ShapeKey, str] = {}
    for entry in _list(head.get("shapes"), "shapes"):
        key, name = _shape(_fields(entry, "shape"))
        if name not in kernels:
            raise _Fault(f"shape {key}: no kernel {name!r}")
        if key.gpu not in gpus:
            raise _Fault(f"shape {key}: no gpu {key.gpu!r}")
        if key in shapes:
            raise _Fault(f"shape {key} is there twice")
        if fault := _misfit(key, kernels[name]):
            raise _Fault(f"shape {key}: kernel {name!r} {fault}")
        shapes[key] = name
    return Manifest(kernels, shapes, gpus)


def _shape(entry: dict[str, Any]) -> tuple[ShapeKey, str]:
    b, hq, hkv, sq, sk, d, dv = (_get(entry, name, int, 1) for name in ShapeKey._fields[:7])
    causal, dtype = _get(entry, "causal", bool), _get(entry, "dtype", str)
    phase, page = entry.get("phase", PREFILL), 0
    if phase == DECODE:
        page = _get(entry, "page", int, 0, PAGE_MAX)
    elif phase != PREFILL or entry.get("page", 0) != 0:
        raise _Fault(f"phase {phase!a}, page {entry.get('page')!a}")
    gpu = _get(entry, "gpu", str)
    key = ShapeKey(b, hq, hkv, sq, sk, d, dv, causal, dtype, gpu, phase, page)
    return key, _get(entry, "kernel", str)


def _misfit(key: ShapeKey, kernel: KernelEntry) -> str | None:
    """Return how a kernel's launches contradict the shape that it is said to serve, or None."""
    if (key.phase == DECODE) != (kernel.splits is not None):
        return "has a split rule" if kernel.splits is not None else "has no split rule"
    if bool(key.page) != kernel.is_paged:
        return "reads pages" if kernel.is_paged else "reads no pages"
    return None


def _kernel(folder: Path, name: str, body: dict[str, Any]) -> KernelEntry:
    arch, digest = _get(body, "arch", str), _get(body, "cubin_sha256", str)
    if not _ARCH.fullmatch(arch):
        raise _Fault(f"kernel {name}: arch {arch!r}")
    if not _HEX.fullmatch(digest):
        raise _Fault(f"kernel {name}: cubin_sha256 {digest!r}")
    parameters = _fields(body.get("parameters"), f"parameters of {name}")
    launches = _list(body.get("launches"), f"launches of {name}")
    workspaces = _list(body.get("workspaces"), f"workspaces of {name}")
    return KernelEntry(
        name,
        _file(folder, _get(body, "cubin", str)),
        digest,
        arch,
        tuple(_launch(_fields(x, f"launch of {name}")) for x in launches),
        tuple(_workspace(_fields(x, f"workspace of {name}")) for x in workspaces),
        {p: _get(parameters, p, int) for p in parameters},
        _split_rule(_fields(body["splits"], f"splits of {name}")) if "splits" in body else None,
    )


def _split_rule(body: dict[str, Any]) -> SplitRule:
    return SplitRule(*(_get(body, f, int, 1, SPLIT_RULE_MAX[f]) for f in SplitRule._fields))


def _file(folder: Path, name: str) -> Path:
    """Return a file of kernels/: neither the name nor a link may lead out of the folder."""
    outside = _Fault(f"file {name[:80]!a} is not in the folder's kernels/")
    if not _FILE.fullmatch(name):
        raise outside
    path = folder / name
    try:
        if path.resolve().parent == folder.resolve() / "kernels":
            return path
    except (OSError, RuntimeError):  # a name too long, links that go round
        pass
    raise outside


def _launch(body: dict[str, Any]) -> launch.Launch:
    grid = [_fields(x, "grid axis") for x in _list(body.get("grid"), "grid")]
    args = [_fields(x, "argument") for x in _list(body.get("args"), "args")]
    return launch.Launch(
        _word(body, "entry", _NAME),
        _get(body, "threads", int, 1, 1024),
        _get(body, "smem_bytes", int, 0, 1 << 20),
        tuple(launch.Axis(_word(x, "length", _LENGTH), _get(x, "tile", int, 1)) for x in grid),
        tuple(_argument(x) for x in args),
        _get(body, "persistent", int, 0, 64),
        # exports from before there were these lack them
        _get({"if_split": False} | body, "if_split", bool),
        _get({"dependent": False} | body, "dependent", bool),
        _get({"cluster": 1} | body, "cluster", int, 1, 8),
    )


def _argument(body: dict[str, Any]) -> launch.Arg:
    pack = _get({"pack": 1} | body, "pack", int, 1, 64)  # not written where it is 1
    return launch.Arg(_word(body, "kind", _NAME), _word(body, "name", _ARG), _box(body), pack)


def _box(argument: dict[str, Any]) -> tuple[int, int]:
    box = _list(argument.get("box"), "box")
    if len(box) != 2 or not all(type(n) is int and 0 <= n <= 256 for n in box):
        raise _Fault(f"box {box!r}")
    return box[0], box[1]


def _workspace(body: dict[str, Any]) -> Workspace:
    axes = _list(body.get("shape"), "workspace shape")
    if not all(isinstance(a, str) and _LENGTH.fullmatch(a) for a in axes):
        raise _Fault(f"workspace shape {axes!a}")
    return Workspace(_word(body, "name", _NAME), tuple(axes))


def _fields(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Fault(f"{what} is not an object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Fault(f"{what} is not a list")
    return value


def _word(body: dict[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    """Return a field that is a name of the given form."""
    value: str = _get(body, name, str)
    if not pattern.fullmatch(value):
        raise _Fault(f"{name}: {value[:80]!a} is not a name")
    return value


def _get(body: dict[str, Any], name: str, kind: type[Any], low: int = -1, high: int = 0) -> Any:
    """Return a field of exactly this type; whole numbers lie in low..high (0: 31 bits)."""
    value = body.get(name)
    if type(value) is not kind:  # exact: True is no number
        raise _Fault(f"{name}: {value!r} is not of type {kind.__name__}")
    if isinstance(value, int) and not low <= value <= (high or launch.INT32_MAX):
        raise _Fault(f"{name}: {value} is out of range")
    return value
