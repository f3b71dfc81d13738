"""Messages and bytes over one connection."""

from __future__ import annotations

import socket
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparkdml.network.connection import MAX_LINE_BYTES, Connection


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
