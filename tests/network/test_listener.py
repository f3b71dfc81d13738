"""The listener's contract: who is served, what strangers can do to it, and what its end leaves."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from sparkdml.errors import ParameterError
from sparkdml.network.connection import GREETING, HELLO_BYTES, Connection
from sparkdml.network.listener import Listener, bind
from sparkdml.testing.waiting import wait_until

TOKEN = "a-long-random-token"

Make = Callable[..., Listener]


def echo(connection: Connection) -> None:
    while (message := connection.receive()) is not None:
        connection.send(message)


@pytest.fixture
def make() -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def opened(serve: Callable[[Connection], None] = echo, **limits: float) -> Listener:
            return stack.enter_context(Listener("test", "127.0.0.1", TOKEN, serve, **limits))

        yield opened


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "0", "000.0.0.0", "0x0", "::0"])
def test_every_interface_is_refused_however_it_is_written(host: str) -> None:
    with pytest.raises(ParameterError, match="host must be a single address of this machine"):
        bind(host)


def connect(listener: Listener, token: str = TOKEN, wire: str = "test") -> Connection:
    return Connection.connect(listener.address, token=token, wire=wire, timeout_seconds=10)


def is_served(listener: Listener) -> bool:
    connection = connect(listener)
    connection.send({"n": 1})
    answer = connection.receive()
    connection.close()
    return answer == {"n": 1}


def strangers(listener: Listener, count: int) -> list[socket.socket]:
    return [socket.create_connection(listener.address, timeout=10) for _ in range(count)]


def is_hung_up(stranger: socket.socket) -> bool:
    """Whether the listener ends it, after its greeting."""
    try:
        while stranger.recv(1000):
            pass
    except ConnectionResetError:
        pass
    stranger.close()
    return True


def threads(end: str = "") -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("sparkdml-test" + end)]


def test_clients_with_the_token_are_served_at_once(make: Make) -> None:
    listener = make()
    connections = [connect(listener) for _ in range(20)]
    for number, connection in enumerate(connections):
        connection.send({"n": number})
    assert [one.receive() for one in connections] == [{"n": n} for n in range(20)]
    for connection in connections:
        connection.close()
    wait_until(lambda: threads() == ["sparkdml-test"])


@pytest.mark.parametrize(("token", "wire"), [("", "test"), (TOKEN + "x", "test"), (TOKEN, "other")])
def test_a_bad_token_is_refused(make: Make, token: str, wire: str) -> None:
    served: list[Connection] = []
    listener = make(served.append)
    with pytest.raises(ConnectionError, match="another token"):
        connect(listener, token, wire)
    assert served == []


@pytest.mark.parametrize(
    "spoken",
    [b"GET / HTTP/1.1\r\n\r\n", b"\n", b"\x80\x04junk", GREETING + bytes(64), b"x" * 100_000],
    ids=["http", "newline", "pickle", "guess", "long"],
)
def test_a_stranger_who_speaks_nonsense_is_hung_up_on_at_once(make: Make, spoken: bytes) -> None:
    listener = make(handshake_seconds=60)
    (stranger,) = strangers(listener, 1)
    with contextlib.suppress(ConnectionError):  # refused while still sending
        stranger.sendall(spoken)
    assert is_hung_up(stranger)
    assert is_served(listener)


def test_a_silent_stranger_is_hung_up_on_when_the_handshake_is_due(make: Make) -> None:
    listener = make(handshake_seconds=0.5)
    (stranger,) = strangers(listener, 1)
    started = time.monotonic()
    assert is_hung_up(stranger)
    assert 0.3 < time.monotonic() - started < 5


def test_the_deadline_is_for_the_whole_handshake(make: Make) -> None:
    """One byte after another doesn't prolong it."""
    listener = make(handshake_seconds=0.5)
    (stranger,) = strangers(listener, 1)
    started = time.monotonic()
    with contextlib.suppress(ConnectionError):
        for byte in GREETING + bytes(1000):
            stranger.sendall(bytes([byte]))
            time.sleep(0.05)
    assert time.monotonic() - started < 5  # the reply would take some 4 s, all of it 50
    stranger.close()


def test_strangers_hold_no_threads_and_displace_no_client(make: Make) -> None:
    listener = make(handshake_seconds=60, max_unauthenticated=20)
    flood = strangers(listener, 20)
    assert threads() == ["sparkdml-test"]
    assert is_served(listener)  # once the oldest of them has had its second
    assert is_hung_up(flood[0])  # the others may stay, as long as there is room
    for stranger in flood:
        stranger.close()


def test_clients_that_come_together_all_get_in(make: Make) -> None:
    """More at once than may be without a token: they wait for each other, none is dropped."""
    listener = make(max_unauthenticated=4)
    failed: list[BaseException] = []

    def use() -> None:
        try:
            assert is_served(listener)
        except BaseException as error:
            failed.append(error)

    users = [threading.Thread(target=use) for _ in range(60)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert failed == []


def test_an_error_of_one_connection_is_its_own(make: Make) -> None:
    def serve(connection: Connection) -> None:
        message = connection.receive()
        assert message is not None
        connection.send({"n": 1 // message["n"]})

    listener = make(serve)
    broken = connect(listener)
    broken.send({"n": 0})
    assert broken.receive() is None
    broken.close()
    assert is_served(listener)


def test_closing_ends_open_connections_and_leaves_no_thread_and_no_port() -> None:
    listener = Listener("test", "127.0.0.1", TOKEN, echo)
    connections = [connect(listener) for _ in range(3)]
    (stranger,) = strangers(listener, 1)
    assert stranger.recv(HELLO_BYTES).startswith(GREETING)
    started = time.monotonic()
    assert listener.close() == []
    assert time.monotonic() - started < 2
    assert threads() == []
    assert listener.close() == []
    assert [one.receive() for one in connections] == [None] * 3
    assert is_hung_up(stranger)
    for connection in connections:
        connection.close()
    with pytest.raises(ConnectionRefusedError):
        connect(listener)
    socket.create_server(listener.address).close()


def test_closing_names_the_threads_that_are_still_at_work() -> None:
    leave = threading.Event()
    listener = Listener("test", "127.0.0.1", TOKEN, lambda connection: bool(leave.wait(30)))
    connection = connect(listener)
    wait_until(lambda: threads("-peer"))
    assert [thread.name for thread in listener.close(0.1)] == ["sparkdml-test-peer"]
    leave.set()
    connection.close()
    wait_until(lambda: threads() == [])


def test_a_connections_own_thread_may_close_the_listener() -> None:
    closed = threading.Event()

    def serve(connection: Connection) -> None:
        listener.close()
        closed.set()

    listener = Listener("test", "127.0.0.1", TOKEN, serve)
    connection = connect(listener)
    assert closed.wait(5)
    connection.close()
    wait_until(lambda: threads() == [])


def test_the_address_is_one_of_this_machine_and_of_either_family() -> None:
    with bind("127.0.0.1") as one:
        assert one.getsockname()[0] == "127.0.0.1"
    if socket.has_ipv6:
        with contextlib.suppress(OSError), bind("::1") as other:  # where IPv6 is switched off
            assert other.getsockname()[0] == "::1"


STARVED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from sparkdml.network.listener import Listener
listener = Listener("test", "127.0.0.1", sys.argv[1], lambda c: c.send({"n": 1}))
print(listener.port, flush=True)
sys.stdin.readline()
"""


def test_a_lack_of_descriptors_does_not_end_the_listener() -> None:
    """Strangers take more than the process may open; those with the token get in all the same."""
    server = subprocess.Popen(
        [sys.executable, "-c", STARVED, TOKEN], stdin=-1, stdout=-1, stderr=-1, text=True
    )
    with server:
        assert server.stdout is not None
        address = ("127.0.0.1", int(server.stdout.readline()))
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == resource.RLIM_INFINITY or hard > 400
        flood = [socket.create_connection(address, timeout=10) for _ in range(200)]
        connection = Connection.connect(address, token=TOKEN, wire="test", timeout_seconds=60)
        assert connection.receive() == {"n": 1}
        connection.close()
        for stranger in flood:
            stranger.close()
        _, errors = server.communicate("\n", timeout=30)
    assert 1 <= errors.count("can't accept a connection now") < 20
    assert "Traceback" not in errors
