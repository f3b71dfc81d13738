"""A store for any URL that fsspec can open, used directly by each worker: s3, gs, abfs, ftp, sftp.

Runs in the workers and at the driver, on any thread. fsspec has two kinds of file system. In an
object store an object appears when its upload is completed, so a failed upload is aborted, never
closed. In the others an object is written under a hidden name and then renamed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkdml.checkpoint.stores.base import (
    Buffer,
    check_name,
    folder_of_prefix,
    is_leftover_of,
    is_temporary,
    temporary_name,
)
from sparkdml.checkpoint.stores.urls import scheme_of

logger = logging.getLogger(__name__)

# A part of a multipart upload. S3 takes 10,000 parts: objects of up to 320 GB.
BLOCK_BYTES = 32 << 20

_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
_RENAMES_OVER = frozenset({"file", "local", "sftp", "ssh"})
_RACE_ATTEMPTS = 10


@dataclass(frozen=True)
class FsspecPlace:
    """A URL as the user wrote it, and how fsspec is to open it."""

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def open(self) -> FsspecStore:
        return FsspecStore(self.url, self.storage_options)


class FsspecStore:
    """Safe to use from several threads: file systems that aren't are protected by a lock."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self.url = url
        self._storage_options = dict(storage_options)
        self._connecting = threading.Lock()
        self._turn = threading.RLock()
        self._connected: tuple[Any, str] | None = None

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        check_name(name)
        with self._session() as (fs, root):
            if _is_object_store(fs):
                self._upload(fs, f"{root}/{name}", chunks)
            else:
                self._write_and_rename(fs, root, name, chunks)

    def read(self, name: str) -> bytes:
        check_name(name)
        with self._session() as (fs, root):
            fs.invalidate_cache()  # it would read as many bytes as the object had when last listed
            try:
                content: bytes = fs.cat_file(f"{root}/{name}")
            except Exception as error:
                if not isinstance(error, FileNotFoundError) and _has_file(fs, f"{root}/{name}"):
                    raise
                raise FileNotFoundError(f"{self.url} has no object {name}") from error
            return content

    def names(self, prefix: str = "") -> list[str]:
        with self._session() as (fs, root):
            found = self._find(fs, root, folder_of_prefix(prefix))
        return sorted(name for name in found if name.startswith(prefix) and not is_temporary(name))

    def remove(self, name: str) -> None:
        check_name(name)
        with self._session() as (fs, root):
            _remove(fs, f"{root}/{name}")
            if not _is_object_store(fs):
                for leftover in self._find(fs, root, folder_of_prefix(name)):
                    if is_leftover_of(name, leftover):
                        _remove(fs, f"{root}/{leftover}")

    def _upload(self, fs: Any, path: str, chunks: Iterable[Buffer]) -> None:
        file = fs.open(path, "wb", block_size=BLOCK_BYTES)
        try:
            for piece in _pieces(chunks):
                file.write(piece)
            file.close()
        except BaseException:
            file.closed = True  # or its finalizer would complete the upload
            try:
                file.discard()
            except Exception as error:
                # The error being raised matters more; the parts only take up space.
                logger.warning("an unfinished upload of %s could not be aborted: %s", path, error)
            raise

    def _write_and_rename(self, fs: Any, root: str, name: str, chunks: Iterable[Buffer]) -> None:
        target, temporary = f"{root}/{name}", f"{root}/{temporary_name(name)}"
        _make_folder(fs, target.rpartition("/")[0])
        try:
            with fs.open(temporary, "wb") as file:
                for piece in _pieces(chunks):
                    file.write(piece)
            _rename_over(fs, temporary, target)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error counts; `remove` tries again
                fs.rm_file(temporary)
            raise

    def _find(self, fs: Any, root: str, folder: str) -> list[str]:
        fs.invalidate_cache()  # others write here too
        top = f"{root}/{folder}".rstrip("/")
        try:
            paths = fs.find(top) if _is_object_store(fs) else list(_walk(fs, top))
        except FileNotFoundError:
            return []
        root = root.strip("/")
        return [path.strip("/").removeprefix(root).strip("/") for path in paths]

    @contextlib.contextmanager
    def _session(self) -> Iterator[tuple[Any, str]]:
        with self._connecting:
            if self._connected is None:
                self._connected = self._connect()
            fs, root = self._connected
        if fs.async_impl:
            yield fs, root
            return
        with self._turn:
            try:
                yield fs, root
            except FileNotFoundError:
                raise
            except Exception:
                # Most of these never renew their one connection: the next attempt needs a new one.
                self._connected = None
                raise

    def _connect(self) -> tuple[Any, str]:
        from fsspec import get_filesystem_class
        from fsspec.core import url_to_fs

        # For those with one connection each: a cached instance may be another thread's, or broken.
        is_new = not get_filesystem_class(scheme_of(self.url)).async_impl
        fs, root = url_to_fs(self.url, **self._storage_options, skip_instance_cache=is_new)
        return fs, str(root).rstrip("/")


def _protocols(fs: Any) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _is_object_store(fs: Any) -> bool:
    """Whether this is an object store: without a rename, fsspec would copy and delete."""
    from fsspec import AbstractFileSystem

    return bool(_OBJECT_STORES & _protocols(fs)) or type(fs).mv is AbstractFileSystem.mv


def _has_file(fs: Any, path: str) -> bool:
    fs.invalidate_cache()
    try:
        return bool(fs.info(path)["type"] == "file")
    except FileNotFoundError:
        return False


def _rename_over(fs: Any, temporary: str, target: str) -> None:
    if _RENAMES_OVER & _protocols(fs):
        fs.mv(temporary, target)
        return
    # Some refuse to rename over a file, some do nothing and say nothing. A reader may find no
    # object for a moment, and never half of one.
    for attempt in range(_RACE_ATTEMPTS):
        _remove(fs, target)
        try:
            fs.mv(temporary, target)
            return
        except Exception:
            # Another writer may have put its own there since.
            if attempt == _RACE_ATTEMPTS - 1 or not _has_file(fs, temporary):
                raise


def _walk(fs: Any, folder: str) -> Iterator[str]:
    """List all objects. fsspec's own `find` omits folders that it fails to list."""
    if folder and fs.info(folder)["type"] != "directory":
        return
    for entry in fs.ls(folder, detail=True):
        if entry["type"] == "directory":
            with contextlib.suppress(FileNotFoundError):  # removed while we were listing
                yield from _walk(fs, entry["name"])
        else:
            yield entry["name"]


def _make_folder(fs: Any, folder: str) -> None:
    for attempt in range(_RACE_ATTEMPTS):
        try:
            fs.makedirs(folder, exist_ok=True)
            return
        except Exception:
            # Another writer may just have created one of the folders.
            fs.invalidate_cache()
            if attempt == _RACE_ATTEMPTS - 1:
                raise


def _remove(fs: Any, path: str) -> None:
    for attempt in range(_RACE_ATTEMPTS):
        try:
            fs.rm_file(path)
            return
        except Exception:
            # ftp, for one, has errors of its own for a missing file. If there is one after all,
            # another writer may have put it there just now.
            if not _has_file(fs, path):
                return
            if attempt == _RACE_ATTEMPTS - 1:
                raise


def _pieces(chunks: Iterable[Buffer]) -> Iterator[memoryview]:
    """Write large chunks in pieces: fsspec's files buffer them, which would double the memory."""
    for chunk in chunks:
        view = memoryview(chunk)
        if view.nbytes:
            flat = view.cast("B")
            for start in range(0, len(flat), BLOCK_BYTES):
                yield flat[start : start + BLOCK_BYTES]
