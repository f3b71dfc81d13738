"""One connection of ours over TCP: a handshake, then messages as lines of JSON, and counted bytes.

Used by both ends of every hand-written wire, in the driver and in the workers. Nothing that comes
over it is unpickled, and a line has a largest length. The owner is the thread that receives; any
thread may send a message, and any thread may `interrupt`.

In the handshake both ends prove that they know the token. The listener sends a nonce; the client
answers with a nonce of its own and a proof; the listener answers with its proof. A proof is an HMAC
of both nonces under the token, with the name of the wire and of the end that made it. So the token
never crosses the network, a recorded handshake is of no use a second time, and a proof for one wire
or one end is none for another. This is the one place where a connection is authenticated; keys to
seal it with would be derived from the same nonces.

Which of this machine's addresses and interfaces leads to a host is asked here, too.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import json
import secrets
import socket
import threading
import time
from typing import Any, BinaryIO, cast

import psutil

GREETING = b"sparkdml/1 "  # first on the wire, so that whatever is not ours is refused at once
NONCE_BYTES = 32
PROOF_BYTES = 32
HELLO_BYTES = len(GREETING) + NONCE_BYTES
REPLY_BYTES = HELLO_BYTES + PROOF_BYTES


class HandshakeError(ConnectionError):
    """The other end does not speak this protocol, or does not know the token."""


class ListenerHandshake:
    """The listener's side of one connection's handshake; holds no socket."""

    def __init__(self, token: str, wire: str) -> None:
        self._token, self._wire = token, wire
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._reply = b""
        self.hello = GREETING + self._nonce  # to be sent first

    @property
    def num_missing(self) -> int:
        """How many bytes of the client's reply are still to come."""
        return REPLY_BYTES - len(self._reply)

    def receive(self, content: bytes) -> bytes | None:
        """More of the client's reply; what to answer once it is whole and its proof is right."""
        self._reply += content
        greeting = self._reply[: len(GREETING)]
        if not GREETING.startswith(greeting):
            raise HandshakeError("the client speaks another protocol")
        if self.num_missing:
            return None
        theirs = self._reply[len(GREETING) : HELLO_BYTES]
        expected = _proof(self._token, self._wire, b"client", self._nonce + theirs)
        if not hmac.compare_digest(self._reply[HELLO_BYTES:], expected):
            raise HandshakeError("the client does not know the token")
        return _proof(self._token, self._wire, b"listener", self._nonce + theirs)


def prove(connection: socket.socket, *, token: str, wire: str, timeout_seconds: float) -> None:
    """The client's side, all of it; leaves the socket without a time-out."""
    deadline = time.monotonic() + timeout_seconds
    hello = _receive(connection, HELLO_BYTES, deadline)
    if not hello.startswith(GREETING):
        raise HandshakeError("what listens there is not sparkdml, or another version of it")
    own = secrets.token_bytes(NONCE_BYTES)
    nonces = hello[len(GREETING) :] + own
    connection.sendall(GREETING + own + _proof(token, wire, b"client", nonces))
    expected = _proof(token, wire, b"listener", nonces)
    if not hmac.compare_digest(_receive(connection, PROOF_BYTES, deadline), expected):
        raise HandshakeError("what listens there does not know the token")
    connection.settimeout(None)


def _receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    content = b""
    while len(content) < num_bytes:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        received = connection.recv(num_bytes - len(content))
        if not received:
            raise HandshakeError(
                "the listener ended the handshake: it takes another token, or it is closing"
            )
        content += received
    return content


def _proof(token: str, wire: str, end: bytes, nonces: bytes) -> bytes:
    about = b"sparkdml " + wire.encode() + b" " + end + b" "
    return hmac.digest(token.encode("utf-8", "surrogatepass"), about + nonces, "sha256")


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


def address_towards(host: str) -> str | None:
    """Return the address from which this machine reaches `host`, or None if it has no route."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # on a datagram socket, this chooses the route and sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_towards(host: str) -> str | None:
    """Return the interface through which this machine reaches `host`, or None if unknown."""
    source = address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        # psutil writes link-local IPv6 addresses with their scope: fe80::1%eth0
        if any(entry.address.partition("%")[0] == source for entry in addresses):
            return str(name)
    return None
