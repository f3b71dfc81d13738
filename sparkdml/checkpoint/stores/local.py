"""A store in a folder that all hosts of the run share: NFS, Lustre, or the only host's own disk.

Runs in the workers and at the driver, on any thread. An object is written under a hidden name,
synced and renamed, so a reader sees it whole or sees the previous one. A writer that is killed
leaves its hidden file; removing the object removes that file too.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sparkdml.checkpoint.stores.base import (
    Buffer,
    check_name,
    folder_of_prefix,
    is_leftover_of,
    is_temporary,
    temporary_name,
)

# Small chunks are collected into writes of this size; larger ones bypass the buffer, uncopied.
_GATHER_BYTES = 1 << 20


@dataclass(frozen=True)
class LocalPlace:
    """An absolute path, given as a `file:` URL."""

    url: str

    def open(self) -> LocalStore:
        return LocalStore(self.url)


class LocalStore:
    """Objects are files below one folder, which is made by the first write."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._root = Path(path_of(url))

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        target = self._root / check_name(name)
        temporary = self._root / temporary_name(name)
        _make_folder(target.parent)
        try:
            with open(temporary, "xb", buffering=_GATHER_BYTES) as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)

    def read(self, name: str) -> bytes:
        path = self._root / check_name(name)
        try:
            return path.read_bytes()
        except (IsADirectoryError, NotADirectoryError) as error:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(path)) from error

    def names(self, prefix: str = "") -> list[str]:
        folder = folder_of_prefix(prefix)
        found = _files_below(str(self._root / folder), f"{folder}/" if folder else "")
        return sorted(name for name in found if name.startswith(prefix) and not is_temporary(name))

    def remove(self, name: str) -> None:
        path = self._root / check_name(name)
        try:
            path.unlink(missing_ok=True)
            for candidate in os.listdir(path.parent):
                if is_leftover_of(path.name, candidate):
                    (path.parent / candidate).unlink(missing_ok=True)
        except (FileNotFoundError, NotADirectoryError):
            return  # without the folder there is no object
        _sync_folder(path.parent)


def path_of(url: str) -> str:
    """The path of `file:/path`, `file:///path` and `file://localhost/path`, as it is written."""
    path = url.removeprefix("file:")
    if path.startswith("//"):
        host, slash, rest = path[2:].partition("/")
        if host not in ("", "localhost"):
            raise ValueError(f"a file: URL can't name another host, but got {url!r}")
        path = slash + rest
    return os.path.abspath(path)


def _files_below(folder: str, prefix: str) -> Iterator[str]:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return  # not there yet, or removed while we were listing
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(entry.path, f"{prefix}{entry.name}/")
        elif not entry.is_dir():  # what lies behind a link to a folder is not the store's
            yield prefix + entry.name


def _make_folder(folder: Path) -> None:
    """Like `mkdir -p`, but each new folder's own entry is on the disk afterwards."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Put a rename on the disk: without this, a power cut may undo it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise  # these errors: the file system keeps renames in order by itself
    finally:
        os.close(descriptor)
