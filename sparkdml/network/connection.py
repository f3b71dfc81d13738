"""One connection of ours over TCP: messages as lines of JSON, and counted bytes between them.

Used by both ends of every hand-written wire, in the driver and in the workers. Nothing that comes
over it is unpickled, and a line has a largest length. The owner is the thread that receives; any
thread may send a message, and any thread may `interrupt`.
"""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
from typing import Any, BinaryIO, cast

from sparkdml.network.handshake import prove

MAX_LINE_BYTES = 1 << 20
BUFFER_BYTES = 64 << 10  # of the reader; longer pieces go past it

Message = dict[str, Any]


class Connection:
    """One end, over a socket whose handshake is done."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._sending = threading.Lock()  # a long line goes in several pieces
        self._reader = cast(io.BufferedReader, connection.makefile("rb", buffering=BUFFER_BYTES))

    @classmethod
    def connect(
        cls, address: tuple[str, int], *, token: str, wire: str, timeout_seconds: float
    ) -> Connection:
        """To a listener of that wire; OSError if it can't be reached or takes another token."""
        connection = socket.create_connection(address, timeout=timeout_seconds)
        try:
            prove(connection, token=token, wire=wire, timeout_seconds=timeout_seconds)
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    def limit_waiting(self, seconds: float | None) -> None:
        """How long one call may wait for the other end; after that the connection is of no use."""
        self._socket.settimeout(seconds)

    def end_with_host(self, seconds: float) -> None:
        """Let the system end the connection once the other host is silent for that long."""
        probes = 4
        every = max(int(seconds) // (probes + 2), 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", max(int(seconds) - probes * every, 1)),
            ("TCP_KEEPINTVL", every),
            ("TCP_KEEPCNT", probes),
            ("TCP_USER_TIMEOUT", int(seconds * 1000)),  # the same for data that is not acknowledged
        ):
            if hasattr(socket, option):  # not on every system
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    # -- messages -------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"a message of {len(line):,} bytes is longer than {MAX_LINE_BYTES:,}")
        with self._sending:
            self._socket.sendall(line)

    def receive(self) -> Message | None:
        """The next message, or None when the other end is gone or sends something else."""
        try:
            line = self._reader.readline(MAX_LINE_BYTES + 1)
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    # -- bytes ----------------------------------------------------------------------------------

    def send_bytes(self, content: bytes | bytearray | memoryview) -> None:
        with self._sending:
            self._socket.sendall(content)

    def send_file(self, file: BinaryIO) -> None:
        with self._sending:
            self._socket.sendfile(file)

    def receive_bytes(self, num_bytes: int) -> bytes:
        """Exactly as many; ConnectionError if the other end is gone before."""
        content = self._reader.read(num_bytes)
        self._check_whole(len(content), num_bytes)
        return content

    def receive_into(self, buffer: bytearray | memoryview) -> None:
        """As `receive_bytes`, into memory of the caller's."""
        self._check_whole(self._reader.readinto(buffer), len(buffer))

    def _check_whole(self, received: int, num_bytes: int) -> None:
        if received < num_bytes:
            raise ConnectionError(f"the connection ended after {received:,} of {num_bytes:,} bytes")

    # -- the end --------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """End the connection while another thread uses it; that thread closes it."""
        with contextlib.suppress(OSError):  # the other end may have been quicker
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.interrupt()
        self._reader.close()
        self._socket.close()
