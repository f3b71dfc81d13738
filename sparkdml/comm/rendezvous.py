"""Rendezvous in the driver: two stores in which ranks publish their addresses.

torch's process groups use a TCPStore, Horovod's an HTTP key-value store. Both run in the driver and
listen on one of its addresses, never on all of them. Each submission has a `Rendezvous` of its own,
so that it finds no data of an earlier one.

The key-value server is the part of a rendezvous server that Horovod's C++ client needs. The client
sends PUT, GET and DELETE on `/scope/key`, one connection per request, and expects 200 or, for a
missing key, 404. The server stores bytes without interpreting them. It does not use
`network.Listener`, as this client has no token, and unauthenticated clients must not get a thread
per connection. One event loop, on a thread of its own, serves all clients instead, and everything
that they can make grow is bounded.
"""

from __future__ import annotations

import asyncio
import threading
from http import HTTPStatus
from types import TracebackType

from torch._C._distributed_c10d import TCPStore

from sparkdml.comm.torch_groups import Alarm
from sparkdml.errors import SetupError
from sparkdml.network.connection import interface_towards
from sparkdml.network.listener import bind
from sparkdml.network.timeouts import KEY_VALUE_HOLD_SECONDS, KEY_VALUE_REQUEST_SECONDS

MAX_KEY_BYTES = 1024
MAX_VALUE_BYTES = 1 << 20  # the addresses of one rank's sockets: some 200 bytes for each peer
MAX_TOTAL_BYTES = 64 << 20
MAX_ENTRIES = 1 << 16
MAX_CONNECTIONS = 4096
MAX_HEAD_BYTES = 8192


class _Rejected(Exception):
    def __init__(self, status: HTTPStatus) -> None:
        self.status = status


class KeyValueServer:
    """Listens on `host` and a free port, on a thread of its own, until `close`."""

    def __init__(self, host: str) -> None:
        self.host = host
        bound = bind(host)
        self._entries: dict[str, bytes] = {}
        self._total_bytes = 0
        self._arrivals: dict[str, asyncio.Event] = {}
        self._requests: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="sparkdml-key-value-server", daemon=True
        )
        self._thread.start()
        # On the thread's own loop, since the caller may be inside another one, as in a notebook.
        starting = asyncio.start_server(
            self._connected, sock=bound, limit=MAX_HEAD_BYTES, backlog=MAX_CONNECTIONS
        )
        try:
            self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        except OSError:
            bound.close()
            self._end()
            raise
        self.port: int = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Stop the thread and free the port. May be called twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> KeyValueServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def _stop(self) -> None:
        self._server.close()
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._requests) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._requests.add(task)
        try:
            await asyncio.wait_for(self._serve(reader, writer), KEY_VALUE_REQUEST_SECONDS)
        except (asyncio.TimeoutError, ConnectionError, asyncio.CancelledError):
            pass  # A slow, broken or late client only loses its connection.
        finally:
            self._requests.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = b""
        try:
            status, body = await self._answer(reader)
        except _Rejected as rejected:
            status = rejected.status
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode("ascii") + body)
        await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[HTTPStatus, bytes]:
        method, key, num_bytes = await _read_head(reader)
        if method == "PUT":
            await self._put(key, reader, num_bytes)
            return HTTPStatus.OK, b""
        if method == "GET":
            value = await self._get(key)
            return (HTTPStatus.NOT_FOUND, b"") if value is None else (HTTPStatus.OK, value)
        if method == "DELETE":
            self._total_bytes -= len(self._entries.pop(key, b""))
            return HTTPStatus.OK, b""
        raise _Rejected(HTTPStatus.METHOD_NOT_ALLOWED)

    async def _put(self, key: str, reader: asyncio.StreamReader, num_bytes: int) -> None:
        total = self._total_bytes + num_bytes - len(self._entries.get(key, b""))
        if total > MAX_TOTAL_BYTES or (
            key not in self._entries and len(self._entries) >= MAX_ENTRIES
        ):
            raise _Rejected(HTTPStatus.INSUFFICIENT_STORAGE)
        self._total_bytes += num_bytes  # before it is read: what is under way takes memory, too
        try:
            value = await _read_body(reader, num_bytes)
        except BaseException:
            self._total_bytes -= num_bytes
            raise
        self._total_bytes -= len(self._entries.pop(key, b""))
        self._entries[key] = value
        arrival = self._arrivals.pop(key, None)
        if arrival is not None:
            arrival.set()

    async def _get(self, key: str) -> bytes | None:
        if key not in self._entries:
            arrival = self._arrivals.setdefault(key, asyncio.Event())
            try:
                await asyncio.wait_for(arrival.wait(), KEY_VALUE_HOLD_SECONDS)
            except asyncio.TimeoutError:
                if self._arrivals.get(key) is arrival:
                    del self._arrivals[key]
        return self._entries.get(key)


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, str, int]:
    """Read the method, the key and the length of the body."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("ascii").split("\r\n")
        method, key, _version = lines[0].split(" ")
        num_bytes = 0
        for line in lines[1:]:
            name, _, value = line.partition(":")
            if name.strip().lower() == "content-length":
                num_bytes = int(value)
    except asyncio.LimitOverrunError:
        raise _Rejected(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE) from None
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the client disconnected") from error
    except ValueError:
        raise _Rejected(HTTPStatus.BAD_REQUEST) from None
    if num_bytes < 0:
        raise _Rejected(HTTPStatus.BAD_REQUEST)
    if len(key) > MAX_KEY_BYTES:
        raise _Rejected(HTTPStatus.REQUEST_URI_TOO_LONG)
    if num_bytes > MAX_VALUE_BYTES:
        raise _Rejected(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    return method, key, num_bytes


async def _read_body(reader: asyncio.StreamReader, num_bytes: int) -> bytes:
    try:
        return await reader.readexactly(num_bytes)
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the client disconnected") from error


class Rendezvous:
    """Both stores, open until `close`; `host` is the driver's address as seen by workers."""

    def __init__(self, host: str) -> None:
        self.host = host
        try:
            self._key_values = KeyValueServer(host)
            try:
                self._store: TCPStore | None = _tcp_store(host)
            except BaseException:
                self._key_values.close()
                raise
        except OSError as error:
            raise SetupError(
                f"the driver can't listen on {host!r}: {error}. Set spark.driver.host (or "
                "spark.driver.bindAddress) to an address of this machine that workers can reach."
            ) from error
        self.kv_port = self._key_values.port
        self.store_port = int(self._store.port)

    def serve(self, backend: str) -> None:
        """Start what a backend needs in addition to the stores: for MPI, a name server."""
        if backend == "mpi" and self._store is not None:
            from sparkdml.comm.mpi_names import SERVER_KEY, name_server

            self._store.set(SERVER_KEY, name_server(interface_towards(self.host)))

    def sound_alarm(self, reason: str) -> None:
        """Make every rank that is blocked in a collective raise within a second."""
        if self._store is not None:
            Alarm(self._store).sound(reason)

    def close(self) -> None:
        """Stop both servers; a second call does nothing."""
        self._key_values.close()
        self._store = None  # drops the last reference, whose destructor stops the server's thread

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _tcp_store(host: str) -> TCPStore:
    # By default, TCPStore listens on every interface, so pass it a socket that is already bound.
    with bind(host) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.fileno()
        )
        listener.detach()  # the store owns it now
    return store
