"""The driver's endpoint and a worker's link, over real sockets: liveness, causes, strangers."""

import contextlib
import re
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from sparkdml.comm.driver_exchange import DriverCommunicator, DriverExchange
from sparkdml.errors import CommunicationError, DataError, SetupError, WorkerError, WorkerLost
from sparkdml.network.connection import MAX_LINE_BYTES, Connection
from sparkdml.runtime.driver.control_server import ControlServer
from sparkdml.runtime.protocol.plan import Plan, Resources, Role
from sparkdml.runtime.worker.control_client import ControlClient
from sparkdml.testing.waiting import wait_until

TOKEN = "a secret"


def make_plan(port):
    return Plan(
        run_id="run",
        role=Role("worker", 2),
        resources=Resources(),
        driver_host="127.0.0.1",
        driver_port=port,
        store_port=0,
        kv_port=0,
        token=TOKEN,
        backend="single",
        seed=0,
        source="none",
        feed=None,
        heartbeat_seconds=0.1,
    )


@pytest.fixture
def events():
    return []


@pytest.fixture
def endpoint(events):
    made = ControlServer(
        "127.0.0.1",
        TOKEN,
        1.0,
        lambda rank, m: events.append((rank, m)),
        lambda rank, m: 1 / 0 if m["what"] == "error" else m["what"].upper(),
    )
    yield made
    made.close()


def join(endpoint, rank):
    return ControlClient(make_plan(endpoint.port), rank, f"host-{rank}", 100 + rank)


def connect(endpoint):
    address = ("127.0.0.1", endpoint.port)
    return Connection.connect(address, token=TOKEN, wire="control", timeout_seconds=5)


def test_beats_keep_a_worker_alive(endpoint):
    client = join(endpoint, 0)
    time.sleep(1.5)
    assert endpoint.failure() is None
    client.done()
    client.close()
    wait_until(endpoint.all_gone)
    assert endpoint.failure() is None


def test_events_and_questions(endpoint, events):
    client = join(endpoint, 1)
    client.event("progress", step=3)
    client.flush()
    assert client.ask("facts") == "FACTS"
    with ThreadPoolExecutor(8) as pool:
        questions = [f"q{number}" for number in range(100)]
        assert list(pool.map(client.ask, questions)) == [q.upper() for q in questions]
    wait_until(lambda: events)
    assert events == [(1, {"type": "event", "kind": "progress", "step": 3})]
    client.done()
    client.close()


def test_last_words_come_before_the_failure(endpoint, events):
    for rank in range(20):
        client = join(endpoint, rank)
        client.event("output", lines=["last words"])
        client.failed(ValueError("a mistake"))
        wait_until(endpoint.failure)
        assert [m["lines"] for r, m in events if r == rank] == [["last words"]]
        client.close()
        endpoint.members.clear()


def test_a_failure_has_rank_host_and_traceback(endpoint):
    client = join(endpoint, 1)
    try:
        raise KeyError("what")
    except KeyError as error:
        client.failed(error)
    found = wait_until(endpoint.failure)
    assert isinstance(found, WorkerError)
    assert (found.rank, found.host) == (1, "host-1")
    assert 'raise KeyError("what")' in found.worker_traceback
    client.close()


def test_our_own_errors_come_as_themselves(endpoint):
    client = join(endpoint, 1)
    client.failed(DataError("column 'x' is null"))
    found = wait_until(endpoint.failure)
    assert isinstance(found, DataError)
    assert str(found) == "column 'x' is null [rank 1 on host-1]"
    assert isinstance(found.__cause__, WorkerError)
    client.close()


def test_the_cause_is_told_from_its_effects(endpoint):
    """Rank 0's collective fails before anybody sees that rank 1 is gone."""
    links = [join(endpoint, rank) for rank in range(2)]
    wait_until(lambda: len(endpoint.members) == 2)
    links[0].failed(CommunicationError("a peer is gone"))
    time.sleep(0.2)
    assert endpoint.failure() is None
    links[1].close()
    found = wait_until(endpoint.failure)
    assert isinstance(found, WorkerLost)
    assert found.rank == 1
    links[0].close()


def test_an_effect_without_a_cause_is_reported_after_a_while(endpoint):
    client = join(endpoint, 0)
    client.failed(CommunicationError("a peer is gone"))
    assert "a peer is gone" in str(wait_until(endpoint.failure))
    client.close()


def test_a_silent_worker_is_lost(endpoint):
    connection = connect(endpoint)
    connection.send({"rank": 2, "host": "h", "pid": 7, "role": "worker"})
    found = wait_until(endpoint.failure)
    assert isinstance(found, WorkerLost)
    assert "has not answered for 1 s (heartbeatTimeout=1)" in str(found)
    connection.close()


@pytest.mark.parametrize(
    "hello",
    [b"[1]", b'{"role": "worker"}', b'{"role": "worker", "rank": "x"}', b"[" * 100_000, b"\xff"],
    ids=["list", "incomplete", "no number", "nested", "binary"],
)
def test_a_worker_that_does_not_say_which_task_it_is_is_refused(endpoint, hello):
    connection = connect(endpoint)
    connection._socket.sendall(hello + b"\n")
    assert connection.receive() is None
    connection.close()
    assert endpoint.members == {}
    client = join(endpoint, 0)
    assert client.ask("facts") == "FACTS"
    client.close()


def test_a_line_has_a_largest_length(endpoint):
    connection = connect(endpoint)
    with contextlib.suppress(ConnectionError):  # refused while still sending
        connection._socket.sendall(b'{"role":"' + b"a" * (2 * MAX_LINE_BYTES))
    assert connection.receive() is None
    connection.close()
    assert endpoint.members == {}


def test_a_worker_with_another_token_is_refused(endpoint):
    with pytest.raises(SetupError, match=r"can't reach the driver .* another token"):
        ControlClient(replace(make_plan(endpoint.port), token="another"), 0, "h", 1)
    assert endpoint.members == {}


def test_a_driver_that_cannot_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(SetupError, match=f"can't reach the driver at 127.0.0.1:{port}"):
        ControlClient(make_plan(port), 0, "h", 1)


def test_a_driver_that_goes_away_does_not_harm_the_worker(endpoint):
    client = join(endpoint, 0)
    wait_until(lambda: endpoint.members)
    for connection in list(endpoint._connections):
        connection.close()
    for step in range(5000):
        client.event("progress", step=step)
    client.flush()
    assert client.ask("facts", timeout_seconds=1) is None
    client.done()
    client.close()


def test_a_plan_is_frozen():
    with pytest.raises(AttributeError):
        make_plan(1).seed = 3
    assert replace(make_plan(1), seed=3).seed == 3


@pytest.mark.parametrize("size", [2, 3, 8])
def test_exchanged_tensors_may_be_longer_than_a_line(size):
    """All ranks' contents come in one answer, and heartbeats arrive meanwhile."""
    table, length = DriverExchange(), 500_000

    def on_rank(rank):
        with closing(join(made, rank)) as client:
            comm = DriverCommunicator(
                rank, size, lambda **fields: client.ask("desk", 10, fields=fields), wait_seconds=30
            )
            summed = comm.allreduce_(torch.full((length,), rank + 1.0))
            client.done()
        return summed

    with (
        closing(
            ControlServer(
                "127.0.0.1", TOKEN, 30.0, print, lambda rank, m: table.contribute(**m["fields"])
            )
        ) as made,
        ThreadPoolExecutor(size) as pool,
    ):
        for summed in pool.map(on_rank, range(size)):
            assert torch.equal(summed, torch.full((length,), size * (size + 1) / 2))
        wait_until(made.all_gone)
        assert made.failure() is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("a" * MAX_LINE_BYTES, r"a message of 1,048,\d+ bytes is longer than 1,048,576"),
        ({1, 2}, "set is not JSON serializable"),
    ],
    ids=["too long", "no JSON"],
)
def test_an_answer_that_cannot_be_sent_ends_the_run_and_nobodys_heartbeats(answer, reason):
    with (
        closing(ControlServer("127.0.0.1", TOKEN, 1.0, print, lambda rank, m: answer)) as made,
        closing(join(made, 0)) as client,
    ):
        assert client.ask("desk", 10, about="history", fields={}) is None
        expected = rf"the driver's answer to 'history' must be JSON .*{reason}"
        assert re.search(expected, str(made.failure()))
        time.sleep(1.5)
        made.own_error = None
        assert made.failure() is None  # it still hears him
        client.done()
        client.close()
        wait_until(made.all_gone)


def test_a_worker_that_goes_while_it_is_answered_is_lost(endpoint):
    """Its connection is read to its end, though nothing can be written to it any more."""
    connection = connect(endpoint)
    connection.send({"rank": 2, "host": "h", "pid": 7, "role": "worker"})
    for number in range(200):
        connection.send({"type": "ask", "what": "x" * 10_000, "number": number})
    connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    assert "ended without a word" in str(wait_until(endpoint.failure))
    wait_until(endpoint.all_gone)


def test_a_mistake_at_the_driver_ends_the_run(endpoint):
    client = join(endpoint, 0)
    assert client.ask("error") is None
    assert isinstance(endpoint.failure(), ZeroDivisionError)
    client.close()
