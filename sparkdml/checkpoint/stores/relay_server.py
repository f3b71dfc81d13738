"""The driver's end of the relay: serves a store that only the driver can reach.

Runs in the driver, on the threads of the listener: one for each connection, which is one operation.
An object that a worker writes goes from the socket to the store piece by piece. If the worker dies
before the end, the store sees its chunks fail and keeps nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import BinaryIO, Protocol, runtime_checkable

from sparkdml.checkpoint.stores.base import CheckpointStore
from sparkdml.checkpoint.stores.relay import WIRE, receive_frames
from sparkdml.checkpoint.stores.retrying import is_transient
from sparkdml.network.connection import Connection, Message
from sparkdml.network.listener import Listener
from sparkdml.network.timeouts import RELAY_CLOSE_SECONDS, Timeouts

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARACTERS = 2000


@runtime_checkable
class ReadsIntoFiles(Protocol):
    """A store that can also return an object without holding it in memory."""

    def as_local_file(self, name: str) -> AbstractContextManager[BinaryIO]: ...


class RelayServer:
    """Listens on `host` and a free port until `close`; a client with the token may use the store.

    The store must not be one that retries, since chunks arrive from a socket once; workers retry.
    """

    def __init__(
        self, store: CheckpointStore, host: str, token: str, timeouts: Timeouts | None = None
    ) -> None:
        self._store, self._timeouts = store, timeouts or Timeouts()
        self._listener = Listener(
            WIRE, host, token, self._serve, handshake_seconds=self._timeouts.connect
        )
        self.host, self.port = host, self._listener.port

    def close(self) -> None:
        """Stop serving: end all threads and free the port. May be called twice."""
        for thread in self._listener.close(RELAY_CLOSE_SECONDS):
            logger.warning("%s still waits for %s", thread.name, self._store.url)

    def __enter__(self) -> RelayServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _serve(self, connection: Connection) -> None:
        connection.end_with_host(self._timeouts.silent_host)
        request = connection.receive()
        if request is None:
            return
        operation, name = str(request.get("operation")), str(request.get("name"))
        frames = receive_frames(connection) if operation == "write" else iter(())
        with contextlib.ExitStack() as stack:
            try:
                if operation == "read" and isinstance(self._store, ReadsIntoFiles):
                    content: bytes | BinaryIO = stack.enter_context(self._store.as_local_file(name))
                else:
                    content = self._done(operation, name, frames)
            except Exception as error:
                for _ in frames:
                    pass  # a worker that is still sending its object receives the error afterwards
                connection.send(_report(error))
                return
            # From here on an error can only end the connection, which the worker detects.
            if isinstance(content, bytes):
                connection.send({"num_bytes": len(content)})
                connection.send_bytes(content)
            else:
                connection.send({"num_bytes": os.fstat(content.fileno()).st_size})
                connection.send_file(content)

    def _done(self, operation: str, name: str, frames: Iterator[bytes]) -> bytes:
        if operation == "write":
            self._store.write(name, frames)
        elif operation == "read":
            return self._store.read(name)
        elif operation == "names":
            return json.dumps(self._store.names(name)).encode()
        elif operation == "remove":
            self._store.remove(name)
        else:
            raise ValueError(f"the relay knows no operation {operation!r}")
        return b""


def _report(error: Exception) -> Message:
    if isinstance(error, FileNotFoundError):
        kind = "missing"
    elif isinstance(error, PermissionError):
        kind = "refused"
    elif isinstance(error, ValueError):
        kind = "name"
    else:
        kind = "transient" if is_transient(error) else "other"
    message = f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARACTERS]
    return {"error": kind, "message": message}
