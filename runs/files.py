"""Writing files and folders so that what exists is whole."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from runs.errors import StoreError
from runs.safe import is_safe_name


def safe_name(name: str, what: str) -> str:
    """Return `name` when it can be a file's name inside a run. Raises StoreError."""
    if not is_safe_name(name):
        raise StoreError(f"{what} {name!r} cannot be a file name: letters, digits, . _ - only")
    return name


def read_regular(path: Path) -> bytes:
    """Read a file. Raises OSError, also for a pipe or a device, which would be waited for."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on disk. Raises OSError."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def append_synced(path: Path, data: bytes) -> None:
    """Append to a file, whole or not at all, and wait until it is on disk. Raises OSError."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
    try:
        start = os.fstat(handle).st_size
        try:
            # unbuffered: what a full disk refused must not be written when the file is closed
            left = memoryview(data)
            while left:
                left = left[os.write(handle, left) :]
            os.fsync(handle)
        except OSError:
            os.ftruncate(handle, start)  # part of a line must not be glued to the next
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def private_folder(parent: Path) -> Iterator[Path]:
    """Give an empty hidden folder inside `parent`, removed at the end unless published."""
    folder = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(private: Path, final: Path) -> bool:
    """Rename a finished folder into place; False when `final` is already there.

    Raises OSError for any other reason.
    """
    if os.path.lexists(final):
        return False
    try:
        private.rename(final)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            return False
        raise
    sync_folder(final.parent)
    return True


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
