"""Files of a saved model, on the driver's disk or on whatever file system Spark's Hadoop knows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.utils import is_remote

from sparkdml.errors import DataError, SetupError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The gateway to the JVM carries bytes as text in one message, which must fit into memory there.
_CHUNK_BYTES = 4 << 20


class Folder:
    """A place of named files. Local ones bypass the JVM, whose gateway is slow for weights."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        if is_remote():
            raise SetupError(
                f"cannot save to or load from {path}: a Spark Connect session gives no access to "
                "Spark's file systems. Use a classic session (no spark.remote)."
            )
        self.path = path
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

    def write(self, name: str, content: bytes) -> None:
        if self._local is not None:
            target = self._local / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            return
        stream = self._system.create(self._hadoop_path(name), True)
        try:
            for start in range(0, len(content), _CHUNK_BYTES):
                stream.write(bytearray(content[start : start + _CHUNK_BYTES]))
        finally:
            stream.close()

    def read(self, name: str) -> bytes:
        if self._local is not None:
            target = self._local / name
            if not target.is_file():
                raise self._missing(name)
            return target.read_bytes()
        path = self._hadoop_path(name)
        if not self._system.exists(path):
            raise self._missing(name)
        stream = self._system.open(path)
        try:
            chunks = []
            while chunk := bytes(stream.readNBytes(_CHUNK_BYTES)):
                chunks.append(chunk)
            return b"".join(chunks)
        finally:
            stream.close()

    def _hadoop_path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, name)

    def _missing(self, name: str) -> DataError:
        return DataError(
            f"{self.name_of(name)} is missing: this is no folder that sparkdml saved, or it was "
            "copied or written only in part. Save the model again."
        )
