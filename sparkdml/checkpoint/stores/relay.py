"""The workers' end of the relay: a store whose objects go through the driver.

How the relay's two ends speak: a line of JSON each way, objects as counted bytes.

A request is `{token, operation, name}`; what `write` sends after it is frames, each a length and
as many bytes, and the length 0 last: a connection that breaks before has not said that it is done.
An answer is `{num_bytes}` and the bytes, or `{error, message}`. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from sparkdml.checkpoint.stores.base import Buffer, check_name
from sparkdml.errors import StoreError

MAX_LINE_BYTES = 16 << 10
PIECE_BYTES = 1 << 20
# A host that is gone answers no probe: its connections end within half a minute.
_PROBE_AFTER_SECONDS, _PROBE_EVERY_SECONDS, _PROBES = 10, 5, 4

_LENGTH = struct.Struct(">Q")

Line = dict[str, Any]


class Connection:
    """One end of one request."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = connection.makefile("rb", buffering=PIECE_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", _PROBE_AFTER_SECONDS),
            ("TCP_KEEPINTVL", _PROBE_EVERY_SECONDS),
            ("TCP_KEEPCNT", _PROBES),
            ("TCP_USER_TIMEOUT", 30_000),  # the same for data that nobody acknowledges
        ):
            if hasattr(socket, option):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def limit_waiting(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def send_line(self, line: Line) -> None:
        content = json.dumps(line).encode() + b"\n"
        if len(content) > MAX_LINE_BYTES:
            raise ValueError(f"a line of {len(content):,} bytes is longer than {MAX_LINE_BYTES:,}")
        self._socket.sendall(content)

    def receive_line(self) -> Line:
        content = self._reader.readline(MAX_LINE_BYTES)
        if not content.endswith(b"\n"):
            raise ConnectionError("the relay's connection ended, or sent too long a line")
        try:
            line = json.loads(content)
        except ValueError as error:
            raise ConnectionError(f"the relay's connection sent no JSON: {error}") from error
        if not isinstance(line, dict):
            raise ConnectionError("the relay's connection sent JSON of another kind")
        return line

    def send_bytes(self, content: Buffer) -> None:
        self._socket.sendall(content)

    def send_file(self, file: BinaryIO) -> None:
        self._socket.sendfile(file)

    def receive_bytes(self, num_bytes: int) -> bytes:
        content: bytes = self._reader.read(num_bytes)
        if len(content) < num_bytes:
            raise ConnectionError(
                f"the relay's connection ended after {len(content):,} of {num_bytes:,} bytes"
            )
        return content

    def send_frames(self, chunks: Iterable[Buffer]) -> None:
        for chunk in chunks:
            num_bytes = memoryview(chunk).nbytes
            if num_bytes:  # the length 0 is the end
                self._socket.sendall(_LENGTH.pack(num_bytes))
                self._socket.sendall(chunk)
        self._socket.sendall(_LENGTH.pack(0))

    def receive_frames(self) -> Iterator[bytes]:
        """In pieces of bounded size, whatever the sender's chunks are."""
        while left := _LENGTH.unpack(self.receive_bytes(_LENGTH.size))[0]:
            while left:
                piece = self.receive_bytes(min(left, PIECE_BYTES))
                left -= len(piece)
                yield piece

    def interrupt(self) -> None:
        """End the connection under another thread's hands; that thread closes it."""
        with contextlib.suppress(OSError):  # the other end may have been quicker
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.interrupt()
        self._reader.close()
        self._socket.close()


CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class RelayPlace:
    """Where the driver relays to the store at `url`."""

    url: str
    host: str
    port: int
    token: str = field(repr=False)

    def open(self) -> RelayStore:
        return RelayStore(self)


class RelayStore:
    """One connection for each operation, so that threads need not know of one another."""

    def __init__(self, place: RelayPlace) -> None:
        self.url = place.url
        self._place = place

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        with self._request("write", check_name(name)) as connection:
            connection.send_frames(chunks)
            self._answer(connection)

    def read(self, name: str) -> bytes:
        with self._request("read", check_name(name)) as connection:
            return self._answer(connection)

    def read_pieces(self, name: str) -> Iterator[bytes]:
        """As `read`, for what would not fit into memory twice."""
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
        address = (place.host, place.port)
        connection = Connection(socket.create_connection(address, timeout=CONNECT_SECONDS))
        try:
            # The store behind the relay takes the time it takes; a driver that is gone is noticed
            # by the connection itself.
            connection.limit_waiting(None)
            connection.send_line({"token": place.token, "operation": operation, "name": name})
            yield connection
        finally:
            connection.close()

    def _answer(self, connection: Connection) -> bytes:
        return connection.receive_bytes(self._length(connection))

    def _length(self, connection: Connection) -> int:
        line = connection.receive_line()
        if "error" in line:
            raise self._reported(line)
        return int(line["num_bytes"])

    def _reported(self, line: Line) -> Exception:
        kind, message = line["error"], f"{line['message']} (through the driver, from {self.url})"
        if kind == "missing":
            return FileNotFoundError(message)
        if kind == "refused":
            return PermissionError(message)
        if kind == "transient":
            return OSError(message)
        if kind == "name":
            return ValueError(message)
        return StoreError(message)
