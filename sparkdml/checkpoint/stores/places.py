"""Where checkpoints go: hosts' disks, fsspec in each worker, the driver's JVM, or a user's store.

Decided once, at the driver, by the URL. Workers get a small picklable place that they only have to
open. A store of the user's own is checked at the driver, which uses the object that it was given,
from several threads; each worker unpickles a copy. If the class is defined in a notebook or a
script, it is pickled with the store.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pyspark import cloudpickle

from sparkdml.checkpoint.stores.base import CheckpointStore, Place
from sparkdml.checkpoint.stores.fsspec_store import FsspecPlace
from sparkdml.checkpoint.stores.hadoop import HadoopStore, Jvm
from sparkdml.checkpoint.stores.local import LocalPlace, path_of
from sparkdml.checkpoint.stores.relay import RelayPlace
from sparkdml.checkpoint.stores.relay_server import RelayServer
from sparkdml.checkpoint.stores.retrying import Retrying, RetryingPlace
from sparkdml.checkpoint.stores.s3a import s3_options
from sparkdml.checkpoint.stores.urls import scheme_of, split_password
from sparkdml.errors import ParameterError, SetupError
from sparkdml.network.timeouts import Timeouts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_METHODS = ("write", "read", "names", "remove")


def check_store(store: Any) -> CheckpointStore:
    """Return the store if it has all attributes of a `CheckpointStore` and can be pickled."""
    missing = [f"{name}()" for name in _METHODS if not callable(getattr(store, name, None))]
    if not isinstance(getattr(store, "url", None), str):
        missing.append("url, a text for messages")
    if missing or isinstance(store, type):
        hint = f"It lacks {', '.join(missing)}." if missing else "Pass an object, not its class."
        raise ParameterError("store", store, "a dml.CheckpointStore", hint)
    _pickled(store)
    checked: CheckpointStore = store
    return checked


def _pickled(store: CheckpointStore) -> bytes:
    try:
        content: bytes = cloudpickle.dumps(store)  # type: ignore[no-untyped-call]
    except Exception as error:  # pickling runs the object's own code
        raise ParameterError(
            "store",
            store,
            "an object that can be pickled, since each worker uses a copy of it",
            f"{type(error).__name__}: {error}. Open connections and files in the methods, or leave "
            "them out in __getstate__.",
        ) from error
    return content


class GivenPlace:
    """The store itself at the driver; workers get a `PickledPlace`."""

    def __init__(self, store: CheckpointStore) -> None:
        self.url = store.url
        self._store = store
        # Pickled now, before the driver writes its probe: if the store keeps objects in its own
        # memory, a copy must not contain the probe.
        self._content = _pickled(store)

    def open(self) -> CheckpointStore:
        return self._store

    def __reduce__(self) -> tuple[Any, ...]:
        return PickledPlace, (self.url, self._content)


@dataclass(frozen=True)
class PickledPlace:
    """Unpickled only when it is opened, so that the worker's error says what is missing."""

    url: str
    content: bytes = field(repr=False)

    def open(self) -> CheckpointStore:
        try:
            store: CheckpointStore = pickle.loads(self.content)
        except Exception as error:  # unpickling runs the object's own code
            raise SetupError(
                f"the store for {self.url} can't be unpickled in a worker: "
                f"{type(error).__name__}: {error}. The workers must be able to import its module: "
                "use spark.sparkContext.addPyFile, --py-files, or install its package there"
            ) from error
        return store


_S3 = frozenset({"s3", "s3a", "s3n"})
# fsspec knows these names, but has no client for them, or none that uses Spark's credentials.
_JVM_FIRST = frozenset({"hdfs", "viewfs", "dbfs"})
_NOT_WRITABLE = frozenset(
    {
        "asynclocal",
        "async_wrapper",
        "asyncwrapper",
        "blockcache",
        "cached",
        "data",
        "dir",
        "filecache",
        "generic",
        "gist",
        "git",
        "github",
        "http",
        "https",
        "jar",
        "libarchive",
        "pyscript",
        "reference",
        "simplecache",
        "tar",
        "zip",
    }
)
_PACKAGES = {
    **dict.fromkeys(_S3, "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), "adlfs"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    "smb": "smbprotocol",
    "oss": "ossfs",
    "hf": "huggingface_hub",
}


class StoreAccess:
    """One store, as the driver and its workers reach it. Close it at the end of the run."""

    def __init__(self, place: Place | None, through_driver: HadoopStore | None = None) -> None:
        assert (place is None) != (through_driver is None)
        self._place = place
        self._through_driver = through_driver
        self._relay: RelayServer | None = None
        self.url = place.url if place is not None else self._behind_relay().url

    @property
    def is_local(self) -> bool:
        """Whether it is a path on each host's file system, which the hosts may not share."""
        return isinstance(self._place, LocalPlace)

    @property
    def needs_relay(self) -> bool:
        """Whether workers reach it only through the driver."""
        return self._through_driver is not None

    def driver_store(self) -> CheckpointStore:
        """The store with retries."""
        store = self._place.open() if self._place is not None else self._behind_relay()
        return Retrying(store)

    def worker_place(self, host: str, token: str, timeouts: Timeouts | None = None) -> Place:
        """Return what to ship. If only the driver reaches the store, start a relay on `host`."""
        if self._place is not None:
            return RetryingPlace(self._place)
        if self._relay is None:
            self._relay = RelayServer(self._behind_relay(), host, token, timeouts)
        return RetryingPlace(
            RelayPlace(
                self.url,
                self._relay.host,
                port=self._relay.port,
                token=token,
                timeouts=timeouts or Timeouts(),
            )
        )

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def __enter__(self) -> StoreAccess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _behind_relay(self) -> HadoopStore:
        assert self._through_driver is not None
        return self._through_driver


def resolve_place(
    url: str, storage_options: Mapping[str, Any] | None, spark: SparkSession | None
) -> StoreAccess:
    """Decide how `url` is reached. `spark` may be None where no session is needed to know.

    A bare path is resolved as in Spark, on `fs.defaultFS`, which is hdfs on many clusters. `file:`
    is a disk that all hosts share. Workers use what fsspec can open directly; hdfs, viewfs and what
    only Hadoop can open goes through the driver.
    """
    options = dict(storage_options or {})
    jvm = Jvm.of(spark)
    url = _absolute(url, jvm, spark)
    scheme = scheme_of(url)
    shown, password = split_password(url)
    if "::" in url or scheme in _NOT_WRITABLE:
        raise ParameterError(
            "checkpoint", shown, "the URL of a place that can be written", "Use file:, s3:, hdfs:"
        )
    if scheme == "memory":
        raise ParameterError(
            "checkpoint",
            shown,
            "a place that all processes of the run share, which memory: is not",
            "Use a path that all hosts share, or an object store such as s3:",
        )
    if scheme in ("file", "local"):
        return StoreAccess(_local(url, shown, options))
    if scheme not in _JVM_FIRST and _fsspec_opens(scheme):
        if password is not None:
            options.setdefault("password", password)
        return StoreAccess(_fsspec(shown, scheme, options, jvm))
    if jvm is not None and jvm.knows_scheme(scheme):
        assert spark is not None
        if options:
            raise ParameterError(
                "storage_options",
                sorted(options),
                f"empty for {scheme}:, which Spark's Hadoop configuration opens",
                "Set spark.hadoop.fs.… on the session",
            )
        return StoreAccess(None, HadoopStore(spark, url))
    raise _no_backend_opens(scheme, shown, jvm)


def _absolute(url: str, jvm: Jvm | None, spark: SparkSession | None) -> str:
    if not url.strip():
        raise ParameterError("checkpoint", url, "a path or a URL")
    if scheme_of(url):
        return url
    if jvm is not None:
        return jvm.qualified(url)
    if spark is not None:
        raise ParameterError(
            "checkpoint",
            url,
            "a URL with a scheme on Spark Connect, where the default file system isn't known",
            f"Write file:{url} or hdfs:{url}, for instance",
        )
    return f"file:{url}"


def _local(url: str, shown: str, options: Mapping[str, Any]) -> LocalPlace:
    if options:
        raise ParameterError("storage_options", sorted(options), "empty for a file: path")
    try:
        return LocalPlace(f"file://{path_of(url.removeprefix('local:'))}")
    except ValueError as error:
        raise ParameterError("checkpoint", shown, "file:/absolute/path") from error


def _fsspec(url: str, scheme: str, options: dict[str, Any], jvm: Jvm | None) -> FsspecPlace:
    if scheme in _S3:
        address = url.partition("://")[2]
        if not address.partition("/")[0]:
            raise ParameterError("checkpoint", url, "s3://BUCKET/PATH")
        if jvm is not None:
            options = s3_options(jvm, address.partition("/")[0], options)
        # Three layers retry, botocore, s3fs and ours, and their attempts multiply: with botocore's
        # default of five, an unreachable server would fail only after minutes.
        config = {"retries": {"total_max_attempts": 2}, **options.get("config_kwargs", {})}
        options = {**options, "config_kwargs": config}
        url = f"s3://{address}"  # s3fs does not know s3n
    return FsspecPlace(url, options)


def _fsspec_opens(scheme: str) -> bool:
    try:
        from fsspec import get_filesystem_class

        get_filesystem_class("s3" if scheme in _S3 else scheme)
    except (ImportError, ValueError):
        return False  # a package is missing, or fsspec knows no such scheme
    return True


def _no_backend_opens(scheme: str, url: str, jvm: Jvm | None) -> ParameterError:
    package = _PACKAGES.get(scheme)
    ways = [
        f"pip install {package} on the driver and all workers"
        if package
        else f"install an fsspec package for {scheme}: on the driver and all workers",
        f"give Spark the jar of Hadoop's file system for {scheme}: (spark.jars.packages)"
        if jvm is not None
        else "use a classic Spark session, whose Hadoop configuration may know it",
    ]
    return ParameterError(
        "checkpoint",
        url,
        f"a URL that fsspec or Hadoop's FileSystem can open, and neither knows {scheme}: here",
        f"Either {ways[0]}, or {ways[1]}",
    )
