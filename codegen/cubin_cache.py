"""Cubins on disk by key: one file each, published by rename, checked when read."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from codegen.kernel import Cubin, Resources

_MAGIC = b"tltune-cubin-1\n"


def read_cubin(cache: Path, key: str) -> Cubin | None:
    """Return the cached cubin, or None when there is none that can be used."""
    try:
        data = _path(cache, key).read_bytes()
    except OSError:
        return None
    checksum, separator, body = data.removeprefix(_MAGIC).partition(b"\n")
    if not separator or hashlib.sha256(body).hexdigest().encode() != checksum:
        return None
    about, _, image = body.partition(b"\n")
    try:
        fields = json.loads(about)
        fields["resources"] = tuple(Resources(**r) for r in fields["resources"])
        cubin = Cubin(image=image, **fields)
    except (ValueError, TypeError, KeyError):  # whole, and not what this version writes
        return None
    return cubin if cubin.key == key else None


def write_cubin(cache: Path, cubin: Cubin) -> None:
    """Publish a cubin under its key; a damaged file is replaced. Raises OSError."""
    fields = asdict(replace(cubin, image=b""))
    del fields["image"]
    body = json.dumps(fields).encode() + b"\n" + cubin.image
    path = _path(cache, cubin.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, private = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        os.replace(private, path)
    except BaseException:
        Path(private).unlink(missing_ok=True)
        raise


def _path(cache: Path, key: str) -> Path:
    return cache / key[:2] / f"{key}.cubin"
