"""NVRTC's precompiled headers: they save the parsing of CuTe from the second compile on.

A precompiled header serves only the process that made it and is large (about 110 MB), so it lies
in a folder named after the process, removed at exit; what killed processes left is removed by the
next one.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from pathlib import Path

_NAME = re.compile(r"tltune-pch-(\d+)-.*")
_ROOM_BYTES = 2 << 30  #: free disk below which headers are parsed again instead

_compiles = 0
_folder: Path | None = None


def options() -> tuple[str, ...]:
    """Return the NVRTC options of this compile: none for a process's first one."""
    folder = _private_folder() if _compiles else None
    return () if folder is None else ("-pch", f"-pch-dir={folder}", "-pch-messages=false")


def compiled() -> None:
    """Note that a compile went well, so that the next one is worth a precompiled header."""
    global _compiles
    _compiles += 1


def _private_folder() -> Path | None:
    global _folder
    if _folder is None or not _folder.name.startswith(f"tltune-pch-{os.getpid()}-"):
        root = Path(tempfile.gettempdir())
        _remove_stale(root)
        if shutil.disk_usage(root).free < _ROOM_BYTES:
            return None
        _folder = Path(tempfile.mkdtemp(prefix=f"tltune-pch-{os.getpid()}-", dir=root))
        atexit.register(shutil.rmtree, _folder, ignore_errors=True)
    return _folder


def _remove_stale(root: Path) -> None:
    for folder in root.glob("tltune-pch-*"):
        found = _NAME.fullmatch(folder.name)
        if found and not _is_alive(int(found[1])):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
