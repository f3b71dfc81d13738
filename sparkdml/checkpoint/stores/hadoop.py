"""A Hadoop file system, through the driver's JVM: hdfs, viewfs, and what else Spark can reach.

Only the driver has a JVM; its workers come here through the relay. Py4J carries bytes as text, so
objects pass through a local file, which the JVM copies at its own speed: the temporary folder must
have room for the largest object, once for each writer and reader at work.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sparkdml.checkpoint.stores.base import Buffer
from sparkdml.checkpoint.stores.jvm import Jvm, java_errors
from sparkdml.checkpoint.stores.names import (
    check_name,
    folder_of_prefix,
    is_leftover_of,
    is_temporary,
    temporary_name,
)
from sparkdml.checkpoint.stores.urls import split_password

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_RACE_ATTEMPTS = 10


class HadoopStore:
    """Renames atomically over an older object where the file system can, as hdfs does.

    Where it can't (ftp), the older object is deleted first: a reader may find none for a moment,
    and never half of one.
    """

    def __init__(self, spark: SparkSession, url: str) -> None:
        self.url = split_password(url)[0]
        self._jvm = Jvm(spark)
        with java_errors():
            path = self._jvm.path(url)
            self._fs = path.getFileSystem(self._jvm.conf)
            self._root = self._fs.makeQualified(path)
            self._context = self._file_context()

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        target = self._path(check_name(name))
        temporary = self._path(temporary_name(name))
        with _spool() as spool:
            with open(spool, "xb", opener=_private) as file:
                for chunk in chunks:
                    file.write(chunk)
            with java_errors():
                self._make_folder(target.getParent())
                try:
                    self._fs.copyFromLocalFile(False, True, self._local(spool), temporary)
                    self._rename_over(temporary, target)
                except BaseException:
                    with contextlib.suppress(Exception):  # the first error counts
                        self._fs.delete(temporary, False)
                    raise

    def read(self, name: str) -> bytes:
        with self.as_local_file(name) as file:
            return file.read()

    @contextlib.contextmanager
    def as_local_file(self, name: str) -> Iterator[BinaryIO]:
        """The object as a file of this host, for whoever passes it on without holding it."""
        path = self._path(check_name(name))
        with _spool() as spool:
            with java_errors():
                if self._fs.getFileStatus(path).isDirectory():
                    raise FileNotFoundError(f"{self.url} has no object {name}")
                self._fs.copyToLocalFile(False, path, self._local(spool), True)
            with open(spool, "rb") as file:
                yield file

    def names(self, prefix: str = "") -> list[str]:
        folder = self._path(folder_of_prefix(prefix))
        try:
            with java_errors():
                files = self._fs.listFiles(folder, True)
                found = [self._name(path) for path in _paths(files)]
        except FileNotFoundError as error:
            with java_errors():
                if self._fs.exists(folder):  # so it was a folder below, that someone else removed
                    raise OSError(f"{self.url} changed while it was listed") from error
            return []
        except RuntimeError as error:
            # How Hadoop's local file system says that a file went away while it was looked at.
            raise OSError(f"{self.url} changed while it was listed: {error}") from error
        return sorted(name for name in found if name.startswith(prefix) and not is_temporary(name))

    def remove(self, name: str) -> None:
        path = self._path(check_name(name))
        base = name.rpartition("/")[2]
        try:
            with java_errors():
                self._fs.delete(path, False)
                for status in self._fs.listStatus(path.getParent()):
                    if is_leftover_of(base, status.getPath().getName()):
                        self._fs.delete(status.getPath(), False)
        except FileNotFoundError:
            return  # without the folder there is no object

    def _make_folder(self, folder: Any) -> None:
        for _ in range(_RACE_ATTEMPTS):  # some fail if another writer makes a folder on the way
            if self._fs.mkdirs(folder):
                return
        raise OSError(f"{self.url} could not make the folder {folder.toUri().getPath()}")

    def _rename_over(self, temporary: Any, target: Any) -> None:
        for attempt in range(_RACE_ATTEMPTS):
            try:
                with java_errors():
                    self._replace(temporary, target)
                return
            except FileExistsError:
                # Deleting and renaming are two steps, and another writer was between them.
                if attempt == _RACE_ATTEMPTS - 1:
                    raise

    def _replace(self, temporary: Any, target: Any) -> None:
        if self._context is not None:
            kind = getattr(self._jvm.hadoop.fs, "Options$Rename")
            options = self._jvm.gateway.new_array(kind, 1)
            options[0] = kind.OVERWRITE
            self._context.rename(temporary, target, options)
            return
        self._fs.delete(target, False)
        if not self._fs.rename(temporary, target):
            raise FileExistsError(f"{self.url} could not rename {temporary} to {target.getName()}")

    def _file_context(self) -> Any:
        """Hadoop's newer interface, the only public one that renames over; None without it."""
        from py4j.protocol import Py4JJavaError

        try:
            return self._jvm.hadoop.fs.FileContext.getFileContext(
                self._root.toUri(), self._jvm.conf
            )
        except Py4JJavaError:
            return None

    def _path(self, name: str) -> Any:
        return self._jvm.hadoop.fs.Path(self._root, name) if name else self._root

    def _name(self, path: Any) -> str:
        root = str(self._root.toUri().getPath()).rstrip("/")
        return str(path.toUri().getPath()).removeprefix(f"{root}/")

    def _local(self, path: Path) -> Any:
        return self._jvm.path(path.as_uri())


def _paths(files: Any) -> Iterator[Any]:
    while files.hasNext():
        yield files.next().getPath()


@contextlib.contextmanager
def _spool() -> Iterator[Path]:
    """The path of a file to be, in a folder that only this user may enter."""
    with tempfile.TemporaryDirectory(prefix="sparkdml-spool-") as folder:
        yield Path(folder) / "object"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
