"""Files of a saved model, on the driver's disk or on whatever file system Spark's Hadoop knows."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pyspark.ml.param import Params
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter
from pyspark.ml.wrapper import JavaWrapper

from sparkdml.errors import DataError
from sparkdml.persistence.connect_folder import ConnectFolder
from sparkdml.runtime.cluster import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The gateway to the JVM carries bytes as text in one message, which must fit into memory there.
_CHUNK_BYTES = 4 << 20


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
        """What is too large for the memory is given as a file of the driver's."""
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
            f"{self.name_of(name)} is missing: this is no folder that sparkdml saved, or it was "
            "copied or written only in part. Save the model again."
        )


AnyFolder = Folder | ConnectFolder


def open_folder(spark: SparkSession, path: str) -> AnyFolder:
    return ConnectFolder(spark, path) if is_connect(spark) else Folder(spark, path)
