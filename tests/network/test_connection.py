"""One connection: both ends prove that they know the token; then messages and bytes."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdml.network.connection import (
    GREETING,
    MAX_LINE_BYTES,
    PROOF_BYTES,
    REPLY_BYTES,
    Connection,
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


def both_ends() -> tuple[Connection, Connection]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname(), timeout=5)
        return Connection(one), Connection(server.accept()[0])


def test_lines_of_several_threads_stay_whole() -> None:
    sender, receiver = both_ends()
    long = "x" * (MAX_LINE_BYTES - 100)  # goes in many pieces

    def send(thread: int) -> None:
        for number in range(5):
            sender.send({"thread": thread, "number": number, "text": long if thread else ""})

    threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    got = [receiver.receive() for _ in range(20)]
    for thread in threads:
        thread.join()
    sender.close()
    receiver.close()
    for number in range(4):
        own = [one["number"] for one in got if one is not None and one["thread"] == number]
        assert own == list(range(5))


@pytest.mark.parametrize("line", [b"[1]\n", b"no json\n", b"[" * 100_000 + b"\n", b"\xff\n"])
def test_what_is_no_message_ends_the_reading(line: bytes) -> None:
    sender, receiver = both_ends()
    sender.send_bytes(line)
    assert receiver.receive() is None
    sender.close()
    receiver.close()


def test_messages_and_counted_bytes_on_one_connection() -> None:
    sender, receiver = both_ends()
    content = bytes(range(256)) * 1000
    sender.send({"num_bytes": len(content)})
    sender.send_bytes(content)
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        sender.send_file(file)
    sender.send({"end": True})
    assert receiver.receive() == {"num_bytes": len(content)}
    assert receiver.receive_bytes(len(content)) == content
    again = bytearray(len(content))
    receiver.receive_into(again)
    assert again == content
    assert receiver.receive() == {"end": True}
    sender.send_bytes(b"half")
    sender.close()
    with pytest.raises(ConnectionError, match="after 4 of 8 bytes"):
        receiver.receive_bytes(8)
    receiver.close()


def test_a_message_has_a_largest_length() -> None:
    sender, receiver = both_ends()
    with pytest.raises(ValueError, match="is longer than 1,048,576"):
        sender.send({"text": "x" * MAX_LINE_BYTES})
    sender.close()
    receiver.close()


def test_an_interrupted_reader_hears_the_end() -> None:
    sender, receiver = both_ends()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(receiver.receive)
        receiver.interrupt()
        assert reading.result(timeout=5) is None
    sender.close()
    receiver.close()
