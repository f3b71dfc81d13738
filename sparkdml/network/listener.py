"""The listener under every hand-written server: it accepts, authenticates, and starts threads.

Runs where the server does, in the driver or in a worker. One thread, `sparkdml-WIRE`, accepts and
carries out all handshakes; each connection that passes gets a thread of its own,
`sparkdml-WIRE-peer`, which runs `serve` and owns the connection.

A client that has not shown that it knows the token costs a descriptor and some hundred bytes, never
a thread, until its handshake is due; the number of such clients is bounded. Neither they nor a lack
of descriptors or threads end the listener: it waits, and accepts again.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from sparkdml.errors import CommunicationError, ParameterError
from sparkdml.network.connection import Connection, HandshakeError, ListenerHandshake
from sparkdml.network.timeouts import LISTENER_CLOSE_SECONDS, Timeouts

logger = logging.getLogger(__name__)

BACKLOG = 4096  # all workers of a run may come at once; the system may allow fewer
MAX_UNAUTHENTICATED = 256
# While there is no room for another client: how long one may take for its handshake, which is a
# few milliseconds' work, and how long to wait before accepting is tried again.
CROWDED_SECONDS = 1.0
PAUSE_SECONDS = 0.05


def bind(host: str) -> socket.socket:
    """A listening socket on that address alone, of either family, and a free port.

    An address that stands for every interface is refused, however it is written ("0", "0x0", "::0"
    are such): the socket's own name tells, before it listens.
    """
    # An empty host stands for every interface, too.
    family, _, _, _, address = socket.getaddrinfo(host or "0.0.0.0", 0, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
        if ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_unspecified:
            raise ParameterError(
                "host",
                host,
                "a single address of this machine",
                "A server must not listen on every interface.",
            )
        bound.listen(BACKLOG)
    except BaseException:
        bound.close()
        raise
    return bound


@dataclass
class _Client:
    """One that has not shown yet that it knows the token."""

    socket: socket.socket
    handshake: ListenerHandshake
    since: float


class Listener:
    """Listens on `host` and a free port until `close`."""

    def __init__(
        self,
        wire: str,
        host: str,
        token: str,
        serve: Callable[[Connection], None],
        *,
        handshake_seconds: float = Timeouts().connect,
        max_unauthenticated: int = MAX_UNAUTHENTICATED,
    ) -> None:
        self._wire, self._token, self._serve = wire, token, serve
        self._handshake_seconds = handshake_seconds
        self._max_unauthenticated = max_unauthenticated
        self._lock = threading.Lock()
        self._serving: dict[threading.Thread, Connection] = {}
        self._clients: dict[socket.socket, _Client] = {}  # oldest first; the thread's own
        self._accept_after = 0.0  # while the process has no descriptor left
        self._closed = False
        self._socket = bind(host)
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._waker, self._woken = socket.socketpair()  # so that `close` ends a `select`
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"sparkdml-{wire}", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self.address[1]

    def close(self, timeout_seconds: float = LISTENER_CLOSE_SECONDS) -> list[threading.Thread]:
        """Accept no more and end all connections; the threads that are still at work after that.

        From any thread, also one of the listener's own; a second call does nothing.
        """
        with self._lock:
            if self._closed:
                return []
            self._closed = True
        with contextlib.suppress(OSError):
            self._waker.send(b"!")
        self._thread.join()
        self._waker.close()
        with self._lock:
            serving = dict(self._serving)
        for connection in serving.values():
            connection.interrupt()
        deadline = time.monotonic() + timeout_seconds
        for thread in serving:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))
        return [thread for thread in serving if thread.is_alive()]

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- the accepting thread -------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            try:
                for key, _ in self._selector.select(self._expire()):
                    if key.fileobj is self._socket:
                        self._accept()
                    elif key.data is not None:
                        self._hear(key.data)
            except Exception:  # whatever one client does, the others are served
                logger.exception("the listener of the %s wire met an error", self._wire)
                time.sleep(PAUSE_SECONDS)
        self._selector.close()
        for end in (self._socket, self._woken, *self._clients):
            end.close()

    def _expire(self) -> float | None:
        """Drop the clients that are overdue; when the next thing is due, in seconds from now."""
        now = time.monotonic()
        starved = self._accept_after - now
        crowded = starved > 0 or len(self._clients) >= self._max_unauthenticated
        patience = min(self._handshake_seconds, CROWDED_SECONDS if crowded else math.inf)
        due: list[float] = []
        for client in list(self._clients.values()):
            left = client.since + patience - now
            if left > 0:
                due.append(left)
                break
            self._drop(client)
        self._watch(starved <= 0 and len(self._clients) < self._max_unauthenticated)
        if starved > 0:
            due.append(starved)
        return min(due, default=None)

    def _watch(self, accepting: bool) -> None:
        if accepting == (self._socket in self._selector.get_map()):
            return
        if accepting:
            self._selector.register(self._socket, selectors.EVENT_READ)
        else:
            self._selector.unregister(self._socket)

    def _accept(self) -> None:
        try:
            accepted, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client has left
        except OSError as error:  # most likely no descriptor is left: the others need some, too
            if not self._accept_after:  # once, until it succeeds again
                logger.warning("the %s wire can't accept a connection now: %s", self._wire, error)
            self._accept_after = time.monotonic() + PAUSE_SECONDS
            return
        self._accept_after = 0.0
        client = _Client(
            accepted, ListenerHandshake(self._token, self._wire), since=time.monotonic()
        )
        try:
            accepted.setblocking(False)
            accepted.send(client.handshake.hello)  # an empty buffer has room for it
        except OSError:
            accepted.close()
            return
        self._clients[accepted] = client
        self._selector.register(accepted, selectors.EVENT_READ, client)

    def _hear(self, client: _Client) -> None:
        try:
            content = client.socket.recv(client.handshake.num_missing)
            if not content:
                raise HandshakeError("the client left")
            answer = client.handshake.receive(content)
            if answer is None:
                return
            client.socket.send(answer)
        except BlockingIOError:
            return
        except OSError as error:
            logger.debug("a client of the %s wire was refused: %s", self._wire, error)
            self._drop(client)
            return
        self._forget(client)
        self._start(client.socket)

    def _drop(self, client: _Client) -> None:
        self._forget(client)
        client.socket.close()

    def _forget(self, client: _Client) -> None:
        del self._clients[client.socket]
        self._selector.unregister(client.socket)

    def _start(self, accepted: socket.socket) -> None:
        try:
            accepted.setblocking(True)
            connection = Connection(accepted)
        except OSError:  # the client has left
            accepted.close()
            return
        thread = threading.Thread(
            target=self._run_serve, args=(connection,), name=f"sparkdml-{self._wire}-peer"
        )
        thread.daemon = True
        with self._lock:
            self._serving[thread] = connection
        try:
            thread.start()
        except RuntimeError as error:  # the system gives the process no more threads
            logger.warning("the %s wire can't serve a client now: %s", self._wire, error)
            with self._lock:
                del self._serving[thread]
            connection.close()

    # -- a connection's thread ------------------------------------------------------------------

    def _run_serve(self, connection: Connection) -> None:
        try:
            self._serve(connection)
        except (OSError, CommunicationError) as error:
            logger.debug("a connection of the %s wire ended early: %s", self._wire, error)
        except Exception:
            logger.exception("a connection of the %s wire was closed after an error", self._wire)
        finally:
            connection.close()
            with self._lock:
                self._serving.pop(threading.current_thread(), None)
