"""Sealed messages over ZeroMQ sockets: who sent what to whom, in what order, and never twice.

Every end has a random number of its own, new with each start. A message names the numbers of both
ends, and counts up: so a recorded message is of no use a second time, neither to this receiver (the
count has passed), nor to another, nor to the same server after a restart. What fails a check is
dropped and counted under its reason.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
from collections import Counter
from collections.abc import Sequence

import zmq

from sparkdml.errors import CommunicationError, ParameterError
from sparkdml.network.listener import bind
from sparkdml.parameter_server.wire.frames import MAX_FRAME_BYTES, Message, decode, encode
from sparkdml.parameter_server.wire.seal import BadFrame, JobKey, Opener, Sealer

MAX_FRAMES = 1 << 13
USER = b"sparkdml"


def new_number() -> int:
    """For an end of the wire: 64 random bits, never 0."""
    return secrets.randbits(64) or 1


class Inbox:
    """A server's end, which answers every client that has the job's key."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        key: JobKey,
        dropped: Counter[str] | None = None,
    ) -> None:
        self.own = new_number()
        self.dropped: Counter[str] = Counter() if dropped is None else dropped
        self._key = key
        self.authenticator = Authenticator(context, key, self.own, self.dropped)
        self._socket = context.socket(zmq.ROUTER)
        _limit(self._socket)
        self._socket.plain_server = True
        self._socket.ipv6 = ":" in host
        self.port = self._socket.bind_to_random_port(f"tcp://{_bracket(host)}")
        self._routes: dict[int, bytes] = {}
        self._seen: dict[int, int] = {}
        self._opener = Opener(key, self.own)
        self._sealers: dict[int, Sealer] = {}
        self._received: Counter[int] = Counter()

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._socket

    def receive(self) -> Message | None:
        """The next message that is good, or None when there is none at the moment."""
        while (frames := _next(self._socket)) is not None:
            try:
                message = _open(frames[1:], self._opener)
                if message.number <= self._seen.get(message.sender, 0):
                    raise BadFrame("replay")
            except BadFrame as reason:
                self.dropped[str(reason)] += 1
                continue
            self._seen[message.sender] = message.number
            self._received[message.sender] += 1
            self._routes[message.sender] = frames[0].bytes
            return message
        return None

    def num_received(self, sender: int) -> int:
        """How many messages have come: fewer than were sent, if a connection broke in between."""
        return self._received[sender]

    def send(self, message: Message, to: int) -> None:
        """Answer an end that has sent something before; one that is gone gets nothing."""
        route = self._routes.get(to)
        if route is None:
            return
        if to not in self._sealers:
            self._sealers[to] = Sealer(self._key, self.own, to, answers=True)
        frames = [route, *encode(message, self._sealers[to])]
        with contextlib.suppress(zmq.ZMQError):  # unreachable: the connection has gone
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        self._socket.close(linger=0)
        self.authenticator.close()


class Authenticator:
    """Whom ZeroMQ lets in at all: else a stranger's frames would be queued before we see them.

    A client says a word that is made from the job's key for this server. That a listener may
    overhear the word does not matter: every message must be sealed too.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        key: JobKey,
        own: int,
        dropped: Counter[str],
    ) -> None:
        self._dropped = dropped
        self._expected = [b"PLAIN", USER, key.word_for(own)]
        self.socket = context.socket(zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Decide on those who have come."""
        while True:
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # version, number, domain, address, identity, mechanism, credentials…
            known = len(request) > 5 and hmac.compare_digest(
                b"\0".join(request[5:]), b"\0".join(self._expected)
            )
            if not known:
                self._dropped["door"] += 1
            verdict = [b"200", b"OK"] if known else [b"400", b"unknown"]
            self.socket.send_multipart([*request[:2], *verdict, b"", b""])

    def close(self) -> None:
        self.socket.close(linger=0)


class Outbox:
    """One end's connection to one server, which has its own number."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        own: int,
        server: int,
        key: JobKey,
        dropped: Counter[str],
    ) -> None:
        self.own, self.server = own, server
        self._dropped = dropped
        self._sealer, self._opener = Sealer(key, own, server), Opener(key, own, answers=True)
        self.num_missed = 0  # answers that were lost with a connection
        self._seen = 0
        self._socket = context.socket(zmq.DEALER)
        _limit(self._socket)
        self._socket.plain_username = USER
        self._socket.plain_password = key.word_for(server)
        self._socket.ipv6 = address.startswith("[")
        self._socket.connect(f"tcp://{address}")

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._socket

    def send(self, message: Message) -> int:
        """Queue it, and return its number, which the answer will name."""
        frames = encode(message, self._sealer)
        # A server that doesn't let us in leaves nowhere to send to: that counts as lost on the way.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        return message.number

    def receive(self) -> Message | None:
        while (frames := _next(self._socket)) is not None:
            try:
                message = _open(frames, self._opener)
                if message.sender != self.server:
                    raise BadFrame("stranger")
                if message.number <= self._seen:
                    raise BadFrame("replay")
            except BadFrame as reason:
                self._dropped[str(reason)] += 1
                continue
            self.num_missed += message.number - self._seen - 1
            self._seen = message.number
            return message
        return None

    def close(self, linger_seconds: float = 0.0) -> None:
        self._socket.close(linger=int(linger_seconds * 1000))


class Watcher:
    """Waits for messages on several ends, or for a wake-up."""

    def __init__(self) -> None:
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._waker.fileno(), zmq.POLLIN)

    def add(self, end: zmq.Socket[bytes]) -> None:
        self._poller.register(end, zmq.POLLIN)

    def remove(self, end: zmq.Socket[bytes]) -> None:
        self._poller.unregister(end)

    def wait(self, milliseconds: int) -> set[object]:
        """The ends that have messages."""
        ready: set[object] = {end for end, _ in self._poller.poll(milliseconds)}
        if self._waker.fileno() in ready:
            self._waker.clear()
        return ready

    def wake(self) -> None:
        """From any thread."""
        self._waker.wake()

    def close(self) -> None:
        self._waker.close()


class Waker:
    """Wakes a thread that polls sockets, from any other thread."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)

    def fileno(self) -> int:
        return self._ours.fileno()

    def wake(self) -> None:
        # A full buffer means that it is awake already; a closed one, that there is no thread left
        # to wake.
        with contextlib.suppress(OSError):
            self._theirs.send(b"!")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._ours.recv(4096):
                pass

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


def _next(end: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
    """The frames of the next message, or None when there is none at the moment."""
    try:
        return end.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None


def _open(frames: Sequence[zmq.Frame], opener: Opener) -> Message:
    if len(frames) > MAX_FRAMES:
        raise BadFrame("length")
    return decode([frame.buffer for frame in frames], opener)


def own_address(host: str, port: int) -> str:
    return f"{_bracket(host)}:{port}"


def check_bindable(host: str) -> None:
    """Raise a CommunicationError unless the host is one interface of this machine."""
    try:
        bind("" if host == "*" else host).close()  # ZeroMQ's word for every interface
    except (OSError, ParameterError) as error:
        raise CommunicationError(
            f"a server must bind to the job's interface, not to {host!r}: {error}"
        ) from error


def _limit(end: zmq.Socket[bytes]) -> None:
    """No frame is larger than ours are; no message is lost for want of room in a queue."""
    end.maxmsgsize = MAX_FRAME_BYTES + 4096
    end.sndhwm = 0
    end.rcvhwm = 1000  # then the sender's side of the connection fills up: nothing is lost
    end.linger = 0
    # So that a dead connection is noticed, and a new one is tried soon.
    end.reconnect_ivl = 50
    end.reconnect_ivl_max = 1000


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
