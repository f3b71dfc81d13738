"""What the stores need of the driver's JVM: its Hadoop configuration, its errors as Python's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sparkdml.checkpoint.stores.urls import without_passwords

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Jvm:
    """The JVM of a classic session, which Spark Connect does not have."""

    def __init__(self, spark: SparkSession) -> None:
        context = spark.sparkContext
        gateway: Any = context._gateway
        self.gateway = gateway
        self.hadoop: Any = gateway.jvm.org.apache.hadoop
        # The session's, not the context's: it knows what `spark.conf.set("fs.…")` said too.
        self.conf: Any = spark._jsparkSession.sessionState().newHadoopConf()

    @classmethod
    def of(cls, spark: SparkSession | None) -> Jvm | None:
        """None without a session, or with one whose JVM is elsewhere."""
        if spark is None or not hasattr(spark, "_jsparkSession"):
            return None
        return cls(spark)

    def setting(self, key: str) -> str | None:
        """A setting of Hadoop's, None if it is not set or empty."""
        value = self.conf.get(key)
        return str(value).strip() or None if value is not None else None

    def secret(self, key: str) -> str | None:
        """Like `setting`, but looks into Hadoop's credential providers first, as Hadoop does."""
        with java_errors():
            characters = self.conf.getPassword(key)
        return "".join(characters).strip() or None if characters is not None else None

    def path(self, url: str) -> Any:
        return self.hadoop.fs.Path(url)

    def qualified(self, path: str) -> str:
        """A bare path as Spark understands it: on `fs.defaultFS`, in its working directory."""
        with java_errors():
            bare = self.path(path)
            return str(bare.getFileSystem(self.conf).makeQualified(bare).toString())

    def knows_scheme(self, scheme: str) -> bool:
        """Whether Hadoop has a FileSystem class for it, on this driver's class path."""
        from py4j.protocol import Py4JJavaError

        try:
            self.hadoop.fs.FileSystem.getFileSystemClass(scheme, self.conf)
        except Py4JJavaError:
            return False  # no class is named for it, or its jar is missing
        return True


@contextlib.contextmanager
def java_errors() -> Iterator[None]:
    """Turns what Java throws into the exceptions that Python code expects."""
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
