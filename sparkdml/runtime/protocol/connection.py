"""The control wire between a worker and the driver: JSON lines over TCP, a token first.

Nothing that comes over it is unpickled, and a line has a largest length.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

MAX_LINE_BYTES = 1 << 20

Message = dict[str, Any]


class Connection:
    """One connection. Any thread may send, and another one receive."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._sending = threading.Lock()  # a long line goes in several pieces
        self._reader = connection.makefile("rb")

    @classmethod
    def connect(cls, host: str, port: int, timeout_seconds: float) -> Connection:
        connection = socket.create_connection((host, port), timeout=timeout_seconds)
        connection.settimeout(None)
        return cls(connection)

    def send(self, message: Message) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"a message of {len(line):,} bytes is longer than {MAX_LINE_BYTES:,}")
        with self._sending:
            self._socket.sendall(line)

    def receive(self) -> Message | None:
        """The next message, or None when the other side is gone or does not keep to the form."""
        try:
            line = self._reader.readline(MAX_LINE_BYTES + 1)
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other side may have been quicker
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.close()
        self._socket.close()
