"""The driver's stores: what they keep, what they refuse, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from sparkdml.comm import rendezvous
from sparkdml.comm.rendezvous import KeyValueServer, Rendezvous
from sparkdml.errors import ParameterError, SetupError
from sparkdml.testing.waiting import wait_until


@pytest.fixture
def server() -> Iterator[KeyValueServer]:
    with KeyValueServer("127.0.0.1") as running:
        yield running


def ask(server: KeyValueServer, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=5)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def raw(server: KeyValueServer, request: bytes) -> bytes:
    with socket.create_connection((server.host, server.port), timeout=5) as connection:
        connection.sendall(request)
        answer = b""
        while chunk := connection.recv(4096):
            answer += chunk
        return answer


def test_bytes_are_returned_as_they_were_put(server: KeyValueServer) -> None:
    value = bytes(range(256)) * 10
    assert ask(server, "PUT", "/global/0", value) == (200, b"")
    assert ask(server, "GET", "/global/0") == (200, value)
    assert ask(server, "PUT", "/global/0", b"") == (200, b"")
    assert ask(server, "GET", "/global/0") == (200, b"")
    assert ask(server, "DELETE", "/global/0") == (200, b"")
    assert ask(server, "GET", "/global/0") == (404, b"")
    assert ask(server, "DELETE", "/global/0") == (200, b"")


def test_scopes_are_apart(server: KeyValueServer) -> None:
    ask(server, "PUT", "/a/0", b"one")
    ask(server, "PUT", "/b/0", b"two")
    assert ask(server, "GET", "/a/0") == (200, b"one")


def test_a_get_waits_a_little_for_its_key(
    server: KeyValueServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "KEY_VALUE_HOLD_SECONDS", 60.0)  # it answers long before
    later = threading.Timer(0.05, ask, (server, "PUT", "/s/late", b"here"))
    later.start()
    assert ask(server, "GET", "/s/late") == (200, b"here")
    later.join()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"PUT /a/b HTTP/1.1\r\nContent-Length: many\r\n\r\n", 400),
        (b"PUT /a/b HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"\xff\xfe /a/b HTTP/1.1\r\n\r\n", 400),
        (b"POST /a/b HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 405),
        (b"GET /" + b"k" * 2000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"PUT /a/b HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", 413),
        (b"GET /a/b HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", 431),
    ],
)
def test_bad_requests_are_refused(
    server: KeyValueServer, request_bytes: bytes, status: int
) -> None:
    assert raw(server, request_bytes).startswith(f"HTTP/1.1 {status} ".encode())
    assert ask(server, "PUT", "/still/works", b"yes") == (200, b"")


def test_the_number_of_entries_is_bounded(
    server: KeyValueServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "MAX_ENTRIES", 2)
    assert ask(server, "PUT", "/s/0", b"a")[0] == 200
    assert ask(server, "PUT", "/s/1", b"a")[0] == 200
    assert ask(server, "PUT", "/s/2", b"a")[0] == 507
    assert ask(server, "PUT", "/s/1", b"b")[0] == 200  # in place of the old one
    assert ask(server, "DELETE", "/s/0")[0] == 200
    assert ask(server, "PUT", "/s/2", b"a")[0] == 200


def test_the_sum_of_all_values_is_bounded(
    server: KeyValueServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "MAX_TOTAL_BYTES", 10)
    assert ask(server, "PUT", "/s/0", b"a" * 8)[0] == 200
    assert ask(server, "PUT", "/s/1", b"a" * 3)[0] == 507
    assert ask(server, "PUT", "/s/0", b"a" * 10)[0] == 200
    ask(server, "DELETE", "/s/0")
    assert ask(server, "PUT", "/s/1", b"a" * 3)[0] == 200


def test_what_is_under_way_counts_before_it_is_stored(
    server: KeyValueServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "MAX_TOTAL_BYTES", 10)
    address = (server.host, server.port)
    with socket.create_connection(address, timeout=5) as slow:
        slow.sendall(b"PUT /s/0 HTTP/1.1\r\nContent-Length: 8\r\n\r\nhal")
        wait_until(lambda: server._total_bytes == 8)
        assert ask(server, "PUT", "/s/1", b"a" * 3)[0] == 507
    wait_until(lambda: server._total_bytes == 0)  # it left: what it asked for is free again
    assert ask(server, "PUT", "/s/1", b"a" * 3)[0] == 200


def test_a_silent_client_is_dropped_and_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "KEY_VALUE_REQUEST_SECONDS", 0.2)
    with (
        KeyValueServer("127.0.0.1") as server,
        socket.create_connection((server.host, server.port), timeout=5) as silent,
    ):
        silent.sendall(b"PUT /a/b HTTP/1.1\r\nContent-Length: 10\r\n\r\nhal")
        assert ask(server, "PUT", "/s/0", b"a")[0] == 200
        assert silent.recv(100) == b""


def test_too_many_connections_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MAX_CONNECTIONS", 1)
    with (
        KeyValueServer("127.0.0.1") as server,
        socket.create_connection((server.host, server.port), timeout=5) as first,
    ):
        time.sleep(0.05)  # until the server has accepted it
        with socket.create_connection((server.host, server.port), timeout=5) as second:
            assert second.recv(100) == b""
        first.sendall(b"DELETE /a/b HTTP/1.1\r\n\r\n")
        assert first.recv(100).startswith(b"HTTP/1.1 200")


def test_both_stores_listen_on_the_given_address_only() -> None:
    with Rendezvous("127.0.0.1") as rendezvous:
        listening = {
            connection.laddr
            for connection in psutil.Process().net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        ports = {rendezvous.store_port, rendezvous.kv_port}
        addresses = {address.ip for address in listening if address.port in ports}
        assert {address.port for address in listening} >= ports
        assert addresses == {"127.0.0.1"}


def test_the_store_serves_torch() -> None:
    with Rendezvous("127.0.0.1") as rendezvous:
        client = TCPStore(
            "127.0.0.1", rendezvous.store_port, is_master=False, timeout=timedelta(seconds=5)
        )
        client.set("key", "value")
        assert client.get("key") == b"value"


def test_closing_leaves_no_thread_and_no_port() -> None:
    def num_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = num_threads()
    rendezvous = Rendezvous("127.0.0.1")
    ports = (rendezvous.store_port, rendezvous.kv_port)
    assert num_threads() > before
    # A client that is still connected doesn't keep it open.
    with socket.create_connection(("127.0.0.1", rendezvous.kv_port)):
        rendezvous.close()
    rendezvous.close()
    # A thread that was joined is listed until the kernel has put it away.
    wait_until(lambda: num_threads() <= before, seconds=5)
    assert num_threads() == before
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=2)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "0", "000.0.0.0", "0x0", "::0"])
def test_listening_everywhere_is_refused(host: str) -> None:
    with pytest.raises(ParameterError, match="host must be a single address"):
        Rendezvous(host)


def test_an_address_of_another_machine_is_refused_with_the_fix() -> None:
    with pytest.raises(SetupError, match=r"192\.0\.2\.1.*spark\.driver\.host"):
        Rendezvous("192.0.2.1")


def test_a_server_can_be_made_where_a_loop_runs_already():
    """As in a notebook, whose cells run inside the kernel's own loop."""

    async def cell():
        with KeyValueServer("127.0.0.1") as server:
            return server.port

    assert asyncio.run(cell()) > 0
