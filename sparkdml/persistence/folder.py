"""The folder of a saved stage: through Spark's Hadoop, through fsspec, or on this machine.

Driver only. `Folder` is for classic sessions; local paths bypass the JVM. `ConnectFolder` is for a
Spark Connect client, which has no JVM: a path without a scheme is on the client's machine, other
URLs are opened by fsspec. `PlainFolder` needs no Spark at all. All three write the same layout, so
that each can load what another has saved.
"""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO

import pyspark
from pyspark.ml.param import Params
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter
from pyspark.ml.wrapper import JavaWrapper

from sparkdml.errors import DataError, SetupError
from sparkdml.runtime.driver.cluster import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class ConnectFolder:
    """A folder for Spark Connect clients, with the interface of `Folder`."""

    def __init__(self, spark: Any, path: str) -> None:
        import fsspec

        self.path = path
        self._spark = spark
        try:
            self._fs, self._root = fsspec.core.url_to_fs(path)
        except (ImportError, ValueError, OSError) as error:
            raise SetupError(
                f"cannot save to or load from {path}: a Spark Connect session gives no access to "
                f"Spark's file systems, and fsspec can't open it here ({error}). Use a path of "
                "this machine, a URL that fsspec opens, or a classic session"
            ) from error

    def name_of(self, name: str) -> str:
        """The full path of a file, for messages."""
        return os.path.join(self.path, name)

    def prepare(self, overwrite: bool) -> None:
        """Remove what is there, or raise."""
        if not self._fs.exists(self._root):
            return
        if not overwrite:
            raise OSError(
                f"Path {self.path} already exists. To overwrite it, use "
                f'write().overwrite().save("{self.path}")'
            )
        self._fs.rm(self._root, recursive=True)

    def write(self, name: str, content: bytes | Path) -> None:
        """Write a file; content that is too large for memory is passed as a local file."""
        target = f"{self._root}/{name}"
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        source = content.open("rb") if isinstance(content, Path) else io.BytesIO(content)
        with source, self._fs.open(target, "wb") as file:
            shutil.copyfileobj(source, file, _CHUNK_BYTES)

    def read(self, name: str) -> bytes:
        content = io.BytesIO()
        self._copy(name, content)
        return content.getvalue()

    def fetch(self, name: str, target: Path) -> None:
        """A copy of the file at the client."""
        with target.open("wb") as file:
            self._copy(name, file)

    def _copy(self, name: str, target: BinaryIO) -> None:
        try:
            with self._fs.open(f"{self._root}/{name}", "rb") as file:
                shutil.copyfileobj(file, target, _CHUNK_BYTES)
        except FileNotFoundError:
            raise DataError(
                f"{self.name_of(name)} is missing: this folder was not saved by sparkdml, or it "
                "was only partly copied or written. Save the model again."
            ) from None

    def write_metadata(self, stage: Params) -> None:
        text = DefaultParamsWriter._get_metadata_to_save(stage, self._spark)
        self.write("metadata/part-00000", text.encode() + b"\n")
        self.write("metadata/_SUCCESS", b"")

    def read_metadata(self) -> dict[str, Any]:
        names = sorted(self._fs.glob(f"{self._root}/metadata/part-*"))
        if not names:
            raise DataError(f"{self.path} has no metadata: it is not the folder of a saved stage")
        text = b"".join(self._fs.cat_file(name) for name in names).decode().strip()
        metadata: dict[str, Any] = DefaultParamsReader._parseMetaData(text)
        return metadata


class PlainFolder(ConnectFolder):
    """The same layout; Spark's version in the metadata is that of the installed package."""

    def __init__(self, path: str) -> None:
        super().__init__(SimpleNamespace(version=pyspark.__version__), path)


_CHUNK_BYTES = 4 << 20


# The gateway to the JVM carries bytes as text in one message, which must fit into memory there.


class Folder:
    """A place of named files. Local ones bypass the JVM, whose gateway is slow for weights."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self.path = path
        self._spark = spark
        jvm: Any = spark._jvm
        self._jvm = jvm
        self._root: Any = jvm.org.apache.hadoop.fs.Path(path)
        self._system: Any = self._root.getFileSystem(spark._jsc.hadoopConfiguration())
        self._local: Path | None = None
        qualified = self._system.makeQualified(self._root).toUri()
        if qualified.getScheme() == "file":
            self._local = Path(qualified.getPath())

    def name_of(self, name: str) -> str:
        """The full path of a file, for messages."""
        return os.path.join(self.path, name)

    def prepare(self, overwrite: bool) -> None:
        """Remove what is there or raise, as Spark's own stages do it."""
        handler = JavaWrapper(
            JavaWrapper._new_java_obj("org.apache.spark.ml.util.FileSystemOverwrite")
        )
        handler._call_java("handleOverwrite", self.path, overwrite, self._spark._jsparkSession)

    def write_metadata(self, stage: Params) -> None:
        DefaultParamsWriter.saveMetadata(stage, self.path, self._spark)

    def read_metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = DefaultParamsReader.loadMetadata(self.path, self._spark)
        return metadata

    def write(self, name: str, content: bytes | Path) -> None:
        """Write a file; content that is too large for memory is passed as a local file."""
        if self._local is not None:
            target = self._local / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, target)
            else:
                target.write_bytes(content)
            return
        stream = self._system.create(self._hadoop_path(name), True)
        source = content.open("rb") if isinstance(content, Path) else io.BytesIO(content)
        try:
            with source:
                while chunk := source.read(_CHUNK_BYTES):
                    stream.write(bytearray(chunk))
        finally:
            stream.close()

    def read(self, name: str) -> bytes:
        content = io.BytesIO()
        self._copy(name, content)
        return content.getvalue()

    def fetch(self, name: str, target: Path) -> None:
        """A copy of the file at the driver."""
        with target.open("wb") as file:
            self._copy(name, file)

    def _copy(self, name: str, target: BinaryIO) -> None:
        if self._local is not None:
            source = self._local / name
            if not source.is_file():
                raise self._missing(name)
            with source.open("rb") as file:
                shutil.copyfileobj(file, target, _CHUNK_BYTES)
            return
        path = self._hadoop_path(name)
        if not self._system.exists(path):
            raise self._missing(name)
        stream = self._system.open(path)
        try:
            while chunk := bytes(stream.readNBytes(_CHUNK_BYTES)):
                target.write(chunk)
        finally:
            stream.close()

    def _hadoop_path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, name)

    def _missing(self, name: str) -> DataError:
        return DataError(
            f"{self.name_of(name)} is missing: this folder was not saved by sparkdml, or it was "
            "only partly copied or written. Save the model again."
        )


AnyFolder = Folder | ConnectFolder


def open_folder(spark: SparkSession, path: str) -> AnyFolder:
    return ConnectFolder(spark, path) if is_connect(spark) else Folder(spark, path)
