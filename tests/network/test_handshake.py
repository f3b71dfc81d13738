"""The handshake: both ends prove that they know the token, and say nothing else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdml.network.handshake import (
    GREETING,
    PROOF_BYTES,
    REPLY_BYTES,
    HandshakeError,
    ListenerHandshake,
    prove,
)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        yield ours, theirs


def listen(end: socket.socket, token: str, wire: str, spoken: list[bytes]) -> threading.Thread:
    """The listener's side of one handshake, as the listener does it."""

    def run() -> None:
        handshake = ListenerHandshake(token, wire)
        end.sendall(handshake.hello)
        spoken.append(handshake.hello)
        try:
            answer = None
            while answer is None:
                content = end.recv(handshake.num_missing)
                spoken.append(content)
                answer = handshake.receive(content)
            end.sendall(answer)
            spoken.append(answer)
        except HandshakeError:
            end.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("token", ["secret", "täken", "\ud800", ""])
def test_both_ends_that_know_the_token(
    ends: tuple[socket.socket, socket.socket], token: str
) -> None:
    spoken: list[bytes] = []
    thread = listen(ends[1], token, "rows", spoken)
    prove(ends[0], token=token, wire="rows", timeout_seconds=5)
    thread.join()
    assert ends[0].gettimeout() is None
    assert not token or token.encode("utf-8", "surrogatepass") not in b"".join(spoken)


@pytest.mark.parametrize(("token", "wire"), [("another", "rows"), ("secret", "control")])
def test_another_token_or_wire_is_refused(
    ends: tuple[socket.socket, socket.socket], token: str, wire: str
) -> None:
    thread = listen(ends[1], "secret", "rows", [])
    with pytest.raises(HandshakeError, match="another token"):
        prove(ends[0], token=token, wire=wire, timeout_seconds=5)
    thread.join()


def test_the_client_notices_a_listener_that_does_not_know_the_token(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ends[1].sendall(ListenerHandshake("guessed", "rows").hello + bytes(PROOF_BYTES))
    with pytest.raises(HandshakeError, match="does not know the token"):
        prove(ends[0], token="secret", wire="rows", timeout_seconds=5)


def test_the_client_notices_another_protocol(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].sendall(b"HTTP/1.1 400 Bad Request\r\n" * 10)
    with pytest.raises(HandshakeError, match="is not sparkdml"):
        prove(ends[0], token="secret", wire="rows", timeout_seconds=5)


def test_the_client_waits_for_the_whole_handshake_no_longer_than_it_says(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    over = threading.Event()

    def drip() -> None:
        for byte in GREETING + bytes(100):
            if over.wait(0.05):
                return
            ends[1].sendall(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        prove(ends[0], token="secret", wire="rows", timeout_seconds=0.5)
    assert time.monotonic() - started < 2
    over.set()
    thread.join()


def test_a_proof_is_of_no_use_a_second_time() -> None:
    spoken: list[bytes] = []
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        thread = listen(theirs, "secret", "rows", spoken)
        prove(ours, token="secret", wire="rows", timeout_seconds=5)
        thread.join()
    recorded = b"".join(spoken[1:-1])
    assert len(recorded) == REPLY_BYTES
    with pytest.raises(HandshakeError, match="does not know the token"):
        ListenerHandshake("secret", "rows").receive(recorded)


@given(content=st.binary(max_size=2 * REPLY_BYTES))
def test_no_bytes_of_a_stranger_pass(content: bytes) -> None:
    handshake = ListenerHandshake("secret", "rows")
    try:
        answer = handshake.receive((GREETING + content)[: handshake.num_missing])
    except HandshakeError:
        return
    assert answer is None  # there is more to come
