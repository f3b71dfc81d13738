"""The control wire, over a socket."""

from __future__ import annotations

import socket
import threading

from sparkdml.runtime.protocol.connection import MAX_LINE_BYTES, Connection


def test_lines_of_several_threads_stay_whole() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = Connection.connect("127.0.0.1", server.getsockname()[1], timeout_seconds=5)
        receiver = Connection(server.accept()[0])
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
