"""The relay: a store that only the driver reaches, used from elsewhere over TCP."""

from __future__ import annotations

import contextlib
import errno
import pickle
import socket
import threading
import time
import tracemalloc
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparkdml.checkpoint.stores.base import Buffer
from sparkdml.checkpoint.stores.hadoop import HadoopStore
from sparkdml.checkpoint.stores.local import LocalStore
from sparkdml.checkpoint.stores.relay import WIRE, RelayPlace, RelayStore
from sparkdml.checkpoint.stores.relay_server import RelayServer
from sparkdml.errors import StoreError
from sparkdml.network.connection import Connection
from sparkdml.testing.store_contract import FailingChunks, OpenStore, StoreContract
from sparkdml.testing.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOKEN = "a-long-random-token"


def place_of(server: RelayServer, token: str = TOKEN) -> RelayPlace:
    return RelayPlace("hdfs://name/run", server.host, server.port, token)


class TestRelay(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Iterator[OpenStore]:
        with RelayServer(LocalStore(f"file://{tmp_path}/run"), "127.0.0.1", TOKEN) as server:
            place = place_of(server)
            yield lambda: pickle.loads(pickle.dumps(place)).open()


@pytest.mark.spark
def test_a_relayed_hdfs(hdfs: str, spark: SparkSession) -> None:
    behind = HadoopStore(spark, f"{hdfs}/{uuid.uuid4().hex}/run")
    with RelayServer(behind, "127.0.0.1", TOKEN) as server:
        store = place_of(server).open()
        content = bytes(range(256)) * (8 << 12)
        store.write("a/state", [content, b"end"])
        assert behind.read("a/state") == content + b"end" == store.read("a/state")
        with pytest.raises(FailingChunks.Failure):
            store.write("a/state", FailingChunks(3, bytes(1 << 20)))
        assert store.names("a/") == ["a/state"]
        assert store.read("a/state") == content + b"end"
        store.remove("a/state")
        assert store.names() == []
        with pytest.raises(FileNotFoundError, match="a/state"):
            store.read("a/state")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RelayServer]:
    with RelayServer(LocalStore(f"file://{tmp_path}"), "127.0.0.1", TOKEN) as server:
        yield server


@pytest.fixture
def store(server: RelayServer) -> RelayStore:
    return place_of(server).open()


def relay_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("sparkdml-relay")]


def test_without_the_token_nothing_happens(server: RelayServer, tmp_path: Path) -> None:
    for token in ("", "wrong", TOKEN[:-1], TOKEN + "x", "täken"):
        stranger = place_of(server, token).open()
        with pytest.raises(OSError):  # noqa: PT011 - it is hung up on, in one way or another
            stranger.write("state", [b"x"])
        with pytest.raises(OSError):  # noqa: PT011
            stranger.names()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "request_line",
    [b"\n", b"[]\n", b"no json\n", b"x" * 2_000_000, b"[" * 16_000 + b"\n", b"\xff\n"],
    ids=["empty", "list", "text", "endless", "nested", "binary"],
)
def test_a_request_that_is_no_message_is_hung_up_on(
    server: RelayServer, store: RelayStore, request_line: bytes
) -> None:
    with contextlib.closing(
        Connection.connect((server.host, server.port), token=TOKEN, wire=WIRE, timeout_seconds=5)
    ) as connection:
        connection.limit_waiting(30)
        with contextlib.suppress(ConnectionError):  # refused while still sending
            connection.send_bytes(request_line)
        assert connection.receive() is None
    store.write("state", [b"x"])  # and it serves on
    assert store.read("state") == b"x"


def test_an_unknown_operation_is_an_error(server: RelayServer, store: RelayStore) -> None:
    with store._request("execute", "state") as connection, pytest.raises(ValueError, match="exec"):
        store._answer(connection)


def test_a_worker_that_dies_while_writing_leaves_nothing(
    server: RelayServer, store: RelayStore, tmp_path: Path
) -> None:
    with store._request("write", "state") as connection:
        connection._socket.sendall((1 << 20).to_bytes(8, "big") + b"only the beginning")
        wait_until(lambda: list(tmp_path.iterdir()), seconds=5)
    wait_until(lambda: relay_threads() == ["sparkdml-relay"], seconds=5)
    assert list(tmp_path.iterdir()) == []


def test_memory_is_bounded_on_the_way_in(store: RelayStore) -> None:
    chunk = memoryview(bytes(64 << 20))
    tracemalloc.start()
    store.write("large", [chunk])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


class Broken:
    """A store whose every operation fails in the same way."""

    url = "hdfs://name/run"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        raise self._error

    def read(self, name: str) -> bytes:
        raise self._error

    def names(self, prefix: str = "") -> list[str]:
        raise self._error

    def remove(self, name: str) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("no such thing"), FileNotFoundError),
        (PermissionError("not yours"), PermissionError),
        (OSError(errno.ENOSPC, "no space"), OSError),
        (ConnectionError("name node gone"), OSError),
        (OSError(errno.EROFS, "read-only"), StoreError),
        (RuntimeError("out of heap"), StoreError),
        (OSError("x" * 100_000), OSError),
    ],
    ids=["missing", "refused", "full", "gone", "read-only", "other", "long"],
)
def test_errors_of_the_store_reach_the_worker(error: Exception, kind: type[Exception]) -> None:
    text = str(error)[:100]
    with RelayServer(Broken(error), "127.0.0.1", TOKEN) as server:
        store = place_of(server).open()
        with pytest.raises(kind) as caught:
            store.write("state", [bytes(3 << 20)] * 3)  # more than the sockets' buffers hold
        assert type(caught.value) is kind
        assert text in str(caught.value)
        assert "hdfs://name/run" in str(caught.value)
        for operation in (lambda: store.read("a"), store.names, lambda: store.remove("a")):
            with pytest.raises(kind) as caught:
                operation()
            assert type(caught.value) is kind


def test_closing_leaves_no_thread_and_no_port(tmp_path: Path) -> None:
    server = RelayServer(LocalStore(f"file://{tmp_path}"), "127.0.0.1", TOKEN)
    store = place_of(server).open()
    store.write("state", [b"x"])
    with (
        store._request("write", "half") as waiting,
        socket.create_connection((server.host, server.port)),
    ):
        waiting._socket.sendall((1 << 20).to_bytes(8, "big"))
        wait_until(lambda: len(relay_threads()) == 2, seconds=5)  # none for the stranger
        started = time.monotonic()
        server.close()
        assert time.monotonic() - started < 2
        assert relay_threads() == []
    server.close()
    with pytest.raises(ConnectionRefusedError):
        store.read("state")
    socket.create_server(("127.0.0.1", server.port)).close()
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_the_token_is_not_shown(server: RelayServer) -> None:
    assert TOKEN not in repr(place_of(server))
    assert TOKEN not in repr(place_of(server).open())


@pytest.mark.spark
def test_the_jvm_keeps_no_thread_for_each_operation(spark: SparkSession, tmp_path: Path) -> None:
    jvm = spark.sparkContext._jvm
    assert jvm is not None

    def threads() -> set[str]:
        """Py4J's for the connections of Python's threads; Spark's pools have names of their own."""
        alive = jvm.java.lang.Thread.getAllStackTraces().keySet().toArray()
        return {name for thread in alive if (name := thread.getName()).startswith("Thread-")}

    with RelayServer(HadoopStore(spark, f"file://{tmp_path}/run"), "127.0.0.1", TOKEN) as server:
        store = place_of(server).open()
        store.write("state", [b"x"])
        before = threads()
        for _ in range(30):
            assert store.read("state") == b"x"
        wait_until(lambda: len(threads() - before) < 10, seconds=30)
