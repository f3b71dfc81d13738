"""The handshake that opens every connection of ours: both ends prove that they know the token.

The listener sends a nonce; the client answers with a nonce of its own and a proof; the listener
answers with its proof. A proof is an HMAC of both nonces under the token, with the name of the wire
and of the end that made it. So the token never crosses the network, a recorded handshake is of no
use a second time, and a proof for one wire or one end is none for another.

Pure functions of bytes, and `prove`, which a client calls on its own thread. This is the one place
where a connection is authenticated; keys to seal it with would be derived from the same nonces.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

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
