"""The driver's end of the relay: serves a store that only the driver can reach.

A thread for each connection, a connection for each operation. An object that a worker writes goes
from the socket to the store piece by piece. A worker that dies meanwhile has not sent the end, so
the store sees its chunks fail and keeps nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import BinaryIO, Protocol, runtime_checkable

from sparkdml.checkpoint.stores.base import Store
from sparkdml.checkpoint.stores.relay import Connection, Line
from sparkdml.checkpoint.stores.retrying import is_transient

logger = logging.getLogger(__name__)

HELLO_SECONDS = 10.0  # a stranger may not hold a thread for ever
MAX_CONNECTIONS = 4096
MAX_MESSAGE_CHARACTERS = 2000
CLOSE_SECONDS = 30.0


@runtime_checkable
class ReadsIntoFiles(Protocol):
    """What a store may be able to do besides: give an object without holding it in memory."""

    def as_local_file(self, name: str) -> AbstractContextManager[BinaryIO]: ...


class RelayServer:
    """Listens on `host` and a free port until `close`; whoever knows the token may use the store.

    The store must not be one that retries: what comes from a socket comes once. The workers retry.
    """

    def __init__(self, store: Store, host: str, token: str) -> None:
        self._store = store
        self._token = token.encode()
        self._lock = threading.Lock()
        self._serving: dict[threading.Thread, Connection] = {}
        self._closed = False
        self._listener = socket.create_server((host, 0), backlog=512)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="sparkdml-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; afterwards neither a thread nor the port is left. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            serving = dict(self._serving)
        with contextlib.suppress(OSError):  # some systems refuse that on a listening socket
            self._listener.shutdown(socket.SHUT_RDWR)  # or `accept` would sit there for ever
        self._listener.close()
        for connection in serving.values():
            connection.interrupt()
        for thread in (self._thread, *serving):
            thread.join(timeout=CLOSE_SECONDS)
            if thread.is_alive():
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

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                if self._closed or len(self._serving) >= MAX_CONNECTIONS:
                    accepted.close()
                    continue
                connection = Connection(accepted)
                thread = threading.Thread(
                    target=self._serve, args=(connection,), name="sparkdml-relayed", daemon=True
                )
                self._serving[thread] = connection
                thread.start()

    def _serve(self, connection: Connection) -> None:
        try:
            connection.limit_waiting(HELLO_SECONDS)
            request = connection.receive_line()
            token = str(request.get("token", "")).encode()
            if hmac.compare_digest(token, self._token):
                connection.limit_waiting(None)
                self._answer(connection, request)
        except OSError as error:
            logger.debug("a relayed connection ended early: %s", error)
        finally:
            connection.close()
            with self._lock:
                self._serving.pop(threading.current_thread(), None)

    def _answer(self, connection: Connection, request: Line) -> None:
        operation, name = str(request.get("operation")), str(request.get("name"))
        frames = connection.receive_frames() if operation == "write" else iter(())
        with contextlib.ExitStack() as stack:
            try:
                if operation == "read" and isinstance(self._store, ReadsIntoFiles):
                    content: bytes | BinaryIO = stack.enter_context(self._store.as_local_file(name))
                else:
                    content = self._done(operation, name, frames)
            except Exception as error:
                for _ in frames:
                    pass  # a worker in the midst of its object hears of the error after its end
                connection.send_line(_report(error))
                return
            # From here on, an error can only end the connection: the worker counts the bytes.
            if isinstance(content, bytes):
                connection.send_line({"num_bytes": len(content)})
                connection.send_bytes(content)
            else:
                connection.send_line({"num_bytes": os.fstat(content.fileno()).st_size})
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


def _report(error: Exception) -> Line:
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
