"""The workers' end of the relay: a store whose objects go through the driver.

Runs in a worker, on the thread that reads or writes; the other end is `relay_server` in the driver.
Each operation has a connection of its own. A request is `{operation, name}`; `write` sends frames
after it, each a length and as many bytes, with the length 0 at the end: a connection that breaks
before that has not written an object. An answer is `{num_bytes}` and the bytes, or
`{error, message}`. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sparkdml.checkpoint.stores.base import Buffer, check_name
from sparkdml.errors import StoreError
from sparkdml.network.connection import Connection, Message
from sparkdml.network.timeouts import Timeouts

WIRE = "relay"
PIECE_BYTES = 1 << 20

_LENGTH = struct.Struct(">Q")


def send_frames(connection: Connection, chunks: Iterable[Buffer]) -> None:
    for chunk in chunks:
        num_bytes = memoryview(chunk).nbytes
        if num_bytes:  # the length 0 is the end
            connection.send_bytes(_LENGTH.pack(num_bytes))
            connection.send_bytes(chunk)
    connection.send_bytes(_LENGTH.pack(0))


def receive_frames(connection: Connection) -> Iterator[bytes]:
    """Yield pieces of bounded size, whatever the sender's chunks are."""
    while left := _LENGTH.unpack(connection.receive_bytes(_LENGTH.size))[0]:
        while left:
            piece = connection.receive_bytes(min(left, PIECE_BYTES))
            left -= len(piece)
            yield piece


@dataclass(frozen=True)
class RelayPlace:
    """The address at which the driver relays to the store at `url`."""

    url: str
    host: str
    port: int
    token: str = field(repr=False)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def open(self) -> RelayStore:
        return RelayStore(self)


class RelayStore:
    """Opens a connection for each operation, so that threads need no coordination."""

    def __init__(self, place: RelayPlace) -> None:
        self.url = place.url
        self._place = place

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        with self._request("write", check_name(name)) as connection:
            send_frames(connection, chunks)
            self._answer(connection)

    def read(self, name: str) -> bytes:
        with self._request("read", check_name(name)) as connection:
            return self._answer(connection)

    def read_pieces(self, name: str) -> Iterator[bytes]:
        """Like `read`, but in chunks, for objects that would not fit into memory twice."""
        with self._request("read", check_name(name)) as connection:
            left = self._length(connection)
            while left:
                piece = connection.receive_bytes(min(left, PIECE_BYTES))
                left -= len(piece)
                yield piece

    def names(self, prefix: str = "") -> list[str]:
        with self._request("names", prefix) as connection:
            return [str(name) for name in json.loads(self._answer(connection))]

    def remove(self, name: str) -> None:
        with self._request("remove", check_name(name)) as connection:
            self._answer(connection)

    @contextlib.contextmanager
    def _request(self, operation: str, name: str) -> Iterator[Connection]:
        place = self._place
        connection = Connection.connect(
            (place.host, place.port),
            token=place.token,
            wire=WIRE,
            timeout_seconds=place.timeouts.connect,
        )
        try:
            # No time-out: the store behind the relay may be slow, and the connection breaks if the
            # driver is gone.
            connection.end_with_host(place.timeouts.silent_host)
            connection.send({"operation": operation, "name": name})
            yield connection
        finally:
            connection.close()

    def _answer(self, connection: Connection) -> bytes:
        return connection.receive_bytes(self._length(connection))

    def _length(self, connection: Connection) -> int:
        answer = connection.receive()
        if answer is None:
            raise ConnectionError("the driver closed the relay's connection without an answer")
        if "error" in answer:
            raise self._reported(answer)
        return int(answer["num_bytes"])

    def _reported(self, answer: Message) -> Exception:
        kind = answer["error"]
        message = f"{answer['message']} (through the driver, from {self.url})"
        if kind == "missing":
            return FileNotFoundError(message)
        if kind == "refused":
            return PermissionError(message)
        if kind == "transient":
            return OSError(message)
        if kind == "name":
            return ValueError(message)
        return StoreError(message)
