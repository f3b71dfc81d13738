"""A spool that another process has written, read from here: its files, or over a connection.

A worker on the same host opens the owner's files through /proc and maps them: the page cache is
shared, nothing is copied. Whether it is the same host is proved by opening: what was opened must be
the very file (device, inode, length) that the owner's card names. The files need no name on the
disk, so a kill -9 leaves nothing behind.

A worker that can't map the owner's spool asks for rows over a connection: row numbers in, columns
out. The listener's handshake proves to both ends that the other knows the run's token. Every length
is known or bounded beforehand: a question is a count and as many row numbers, an answer has the
columns of the owner's card, one after the other, as they lie in its files (of ragged ones the
lengths first). Nothing is unpickled.

Runs in workers: the server on the listener's threads, one for each reader; a reader on the thread
that makes batches, which owns the connection.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparkdml.comm.base import Traffic
from sparkdml.errors import CommunicationError
from sparkdml.feed.batch import join
from sparkdml.feed.order import Ints
from sparkdml.feed.plan import Arrays
from sparkdml.feed.ragged import RaggedArray
from sparkdml.feed.spool import Spool
from sparkdml.network.connection import Connection
from sparkdml.network.listener import Listener
from sparkdml.network.timeouts import Timeouts

Card = dict[str, Any]  # what an owner tells the others of its spool; plain JSON


class Rows(Protocol):
    """Some worker's rows, wherever they are."""

    def take(self, rows: Ints) -> Arrays: ...
    def close(self) -> None: ...


class Shelf:
    """What a card says of an owner's rows: enough to order them without reading any."""

    def __init__(self, card: Card) -> None:
        spool = card["spool"]
        self._shards = np.array(spool["shards"], dtype=np.int64)
        self._counts = np.array(spool["counts"], dtype=np.int64)
        self.row_bytes = int(card["row_bytes"])

    def layout(self) -> tuple[Ints, Ints]:
        return self._shards, self._counts


def card_of(spool: Spool) -> Card:
    """For a sealed spool."""
    files = []
    for descriptor in spool.descriptors():
        stat = os.fstat(descriptor)
        files.append([descriptor, stat.st_dev, stat.st_ino, stat.st_size])
    return {
        "pid": os.getpid(),
        "files": files,
        "spool": spool.describe(),
        "row_bytes": spool.row_bytes,
    }


def open_here(card: Card) -> Spool | None:
    """The owner's spool through its own files, or None if they are not on this host."""
    opened: list[int] = []
    try:
        for descriptor, device, inode, size in card["files"]:
            path = Path("/proc") / str(int(card["pid"])) / "fd" / str(int(descriptor))
            own = os.open(path, os.O_RDONLY)
            opened.append(own)
            stat = os.fstat(own)
            if (stat.st_dev, stat.st_ino, stat.st_size) != (device, inode, size):
                raise FileNotFoundError(f"{path} is another file")
        return Spool.over(opened, card["spool"])
    except OSError:  # another host, another container, or a system without /proc
        for own in opened:
            os.close(own)
        return None


MAX_ROWS = 1 << 20  # in one question
MAX_BYTES = 1 << 30  # in one column of an answer
WIRE = "rows"

_COUNT = struct.Struct("!I")
_ROW = np.dtype("<i8")


class OwnerGone(CommunicationError):
    """A worker whose rows were wanted does not answer any more."""


class RowServer:
    """Serves one worker's rows to those that know the token, until it is closed."""

    def __init__(
        self,
        spool: Spool,
        host: str,
        token: str,
        timeouts: Timeouts,
        traffic: Traffic | None = None,
    ) -> None:
        self._spool, self._traffic = spool, traffic
        self._listener = Listener(
            WIRE, host, token, self._serve, handshake_seconds=timeouts.connect
        )
        self.address: tuple[str, int] = self._listener.address

    def close(self) -> None:
        self._listener.close()

    def _serve(self, connection: Connection) -> None:
        # A reader of its own: the spool's memory for batches is the training thread's.
        spool = Spool.over(
            [os.dup(one) for one in self._spool.descriptors()], self._spool.describe()
        )
        try:
            while True:
                self._answer(connection, spool)
        finally:
            spool.close()

    def _answer(self, connection: Connection, spool: Spool) -> None:
        (count,) = _COUNT.unpack(connection.receive_bytes(_COUNT.size))
        if not 0 < count <= MAX_ROWS:
            raise CommunicationError(f"a question for {count:,} rows")
        rows = np.frombuffer(connection.receive_bytes(count * _ROW.itemsize), _ROW).astype(np.int64)
        if rows.min() < 0 or rows.max() >= spool.num_rows:
            raise CommunicationError("a question for rows that are not there")
        for values in spool.take(rows).values():
            parts = [values]
            if isinstance(values, RaggedArray):
                parts = [np.diff(values.offsets).astype(_ROW), values.values]
            for part in parts:
                assert isinstance(part, np.ndarray)
                _send(connection, part)
                if self._traffic is not None:
                    self._traffic.sent(part.nbytes)


class RemoteRows:
    """An owner's rows, asked for as they are needed. One thread at a time."""

    def __init__(
        self, card: Card, address: tuple[str, int], token: str, timeouts: Timeouts
    ) -> None:
        self._columns: list[dict[str, Any]] = card["spool"]["columns"]
        self._owner = f"the worker at {address[0]}:{address[1]}"
        try:
            self._connection = Connection.connect(
                address, token=token, wire=WIRE, timeout_seconds=timeouts.connect
            )
        except OSError as error:
            raise self._gone(error) from error
        self._connection.limit_waiting(timeouts.rows_answer)

    def take(self, rows: Ints) -> Arrays:
        try:
            return join([self._ask(rows[i : i + MAX_ROWS]) for i in range(0, len(rows), MAX_ROWS)])
        except OSError as error:
            raise self._gone(error) from error

    def _ask(self, rows: Ints) -> Arrays:
        self._connection.send_bytes(_COUNT.pack(len(rows)) + rows.astype(_ROW).tobytes())
        return {column["name"]: self._column(column, len(rows)) for column in self._columns}

    def _column(self, column: dict[str, Any], num_rows: int) -> np.ndarray | RaggedArray:
        if "ends" not in column:
            return self._array(column, num_rows)
        lengths = np.frombuffer(_receive(self._connection, num_rows * _ROW.itemsize), _ROW)
        if lengths.min() < 0:
            raise CommunicationError(f"{self._owner} sent a row of negative length")
        return RaggedArray.of_lengths(
            self._array(column, int(lengths.sum())), lengths.astype(np.int64)
        )

    def _array(self, column: dict[str, Any], length: int) -> np.ndarray:
        dtype = np.dtype(column["dtype"] or "<f4")
        shape = (length, *map(int, column["shape"]))
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        content = _receive(self._connection, num_bytes)
        return np.frombuffer(content, dtype).reshape(shape)

    def close(self) -> None:
        self._connection.close()

    def _gone(self, error: Exception) -> OwnerGone:
        return OwnerGone(f"the rows of {self._owner} can't be read: {error}")


def _send(connection: Connection, values: np.ndarray) -> None:
    if values.nbytes > MAX_BYTES:
        raise CommunicationError(f"a column of {values.nbytes:,} bytes in one answer")
    if values.nbytes:
        connection.send_bytes(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def _receive(connection: Connection, num_bytes: int) -> bytearray:
    if num_bytes > MAX_BYTES:
        raise CommunicationError(f"an answer of {num_bytes:,} bytes, more than {MAX_BYTES:,}")
    content = bytearray(num_bytes)
    connection.receive_into(content)
    return content
