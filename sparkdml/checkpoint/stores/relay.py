"""The workers' end of the relay: a store whose objects go through the driver."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sparkdml.checkpoint.stores.base import Buffer
from sparkdml.checkpoint.stores.names import check_name
from sparkdml.checkpoint.stores.relay_wire import PIECE_BYTES, Connection, Line
from sparkdml.errors import StoreError

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
