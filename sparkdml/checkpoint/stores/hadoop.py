"""A store on a Hadoop file system, through the driver's JVM: hdfs, viewfs, what Spark reaches.

Driver only, on the threads of its callers; workers use it through the relay. Py4J encodes bytes as
text, so objects pass through a local file instead, which the JVM copies at full speed: the
temporary folder needs room for the largest object, once for each concurrent reader and writer. The
module also has what stores need of the JVM: its Hadoop configuration, and its errors as Python's.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sparkdml.checkpoint.stores.base import (
    Buffer,
    check_name,
    folder_of_prefix,
    is_leftover_of,
    is_temporary,
    temporary_name,
)
from sparkdml.checkpoint.stores.urls import split_password, without_passwords

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Jvm:
    """The JVM of a classic session; a Spark Connect session has none."""

    def __init__(self, spark: SparkSession) -> None:
        context = spark.sparkContext
        gateway: Any = context._gateway
        self.gateway = gateway
        self.hadoop: Any = gateway.jvm.org.apache.hadoop
        # The session's configuration includes `spark.conf.set("fs.…")`, the context's does not.
        self.conf: Any = spark._jsparkSession.sessionState().newHadoopConf()

    @classmethod
    def of(cls, spark: SparkSession | None) -> Jvm | None:
        """Return None without a session, and for a session whose JVM is elsewhere."""
        if spark is None or not hasattr(spark, "_jsparkSession"):
            return None
        return cls(spark)

    def setting(self, key: str) -> str | None:
        """Return a setting of Hadoop's, None if it is not set or empty."""
        value = self.conf.get(key)
        return str(value).strip() or None if value is not None else None

    def secret(self, key: str) -> str | None:
        """Like `setting`, but asks Hadoop's credential providers first, as Hadoop does."""
        with java_errors():
            characters = self.conf.getPassword(key)
        return "".join(characters).strip() or None if characters is not None else None

    def path(self, url: str) -> Any:
        return self.hadoop.fs.Path(url)

    def qualified(self, path: str) -> str:
        """Resolve a bare path as Spark does: on `fs.defaultFS`, in its working directory."""
        with java_errors():
            bare = self.path(path)
            return str(bare.getFileSystem(self.conf).makeQualified(bare).toString())

    def knows_scheme(self, scheme: str) -> bool:
        """Whether Hadoop has a FileSystem class for it, on this driver's class path."""
        from py4j.protocol import Py4JJavaError

        try:
            self.hadoop.fs.FileSystem.getFileSystemClass(scheme, self.conf)
        except Py4JJavaError:
            return False  # no class is configured for it, or its jar is missing
        return True


@contextlib.contextmanager
def java_errors() -> Iterator[None]:
    """Turns Java exceptions into those that Python code expects."""
    from py4j.protocol import Py4JJavaError, Py4JNetworkError

    try:
        yield
    except Py4JJavaError as error:
        translated = _translated(error.java_exception)
        # Hadoop's messages quote URLs, and Java's stack trace quotes the messages.
        raise translated from (None if without_passwords(str(error)) != str(error) else error)
    except Py4JNetworkError as error:
        raise ConnectionError(f"the driver's JVM does not answer: {error}") from error


def _translated(thrown: Any) -> Exception:
    kinds = set(_class_names(thrown.getClass()))
    message = str(thrown.getMessage()).partition("\n")[0]
    text = f"{thrown.getClass().getSimpleName()}: {without_passwords(message)}"
    if kinds & {"java.io.FileNotFoundException", "java.nio.file.NoSuchFileException"}:
        return FileNotFoundError(text)
    if "org.apache.hadoop.fs.FileAlreadyExistsException" in kinds:
        return FileExistsError(text)
    if kinds & {
        "java.nio.file.AccessDeniedException",
        "java.lang.SecurityException",
        "org.apache.hadoop.security.AccessControlException",
        "org.apache.hadoop.fs.permission.AccessControlException",
    }:
        return PermissionError(text)
    if "java.io.IOException" in kinds or "java.io.UncheckedIOException" in kinds:
        return OSError(text)
    if "java.lang.IllegalArgumentException" in kinds:
        return ValueError(text)
    return RuntimeError(text)


def _class_names(java_class: Any) -> Iterator[str]:
    while java_class is not None:
        yield str(java_class.getName())
        java_class = java_class.getSuperclass()


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
        """Fetch the object as a local file, for callers that don't read it into memory."""
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
                if self._fs.exists(folder):  # so another process removed a folder below it
                    raise OSError(f"{self.url} changed while it was listed") from error
            return []
        except RuntimeError as error:
            # Hadoop's local file system raises this for a file that disappears during the listing.
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
        for _ in range(_RACE_ATTEMPTS):  # some fail if another writer creates the same folder
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
        """Return Hadoop's FileContext, the only public interface that can rename over; or None."""
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
    """Yield the path of a temporary file, in a folder that only this user may enter."""
    with tempfile.TemporaryDirectory(prefix="sparkdml-spool-") as folder:
        yield Path(folder) / "object"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
