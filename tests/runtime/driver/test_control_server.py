"""The control server and its clients over real sockets: liveness, causes, questions, strangers."""

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
from sparkdml.errors import (
    CommunicationError,
    DataError,
    ProtocolError,
    SetupError,
    WorkerError,
    WorkerLost,
)
from sparkdml.network.connection import MAX_LINE_BYTES, Connection
from sparkdml.network.timeouts import Timeouts
from sparkdml.runtime.driver.control_server import ControlServer
from sparkdml.runtime.driver.failures import describe_failure
from sparkdml.runtime.protocol.messages import Hello, ServiceQuestion, ask, encode
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
        timeouts=Timeouts(0.4),
    )


def answer(task, question):
    """As a driver service that knows few questions."""
    about = question.about
    if about == "error":
        raise ZeroDivisionError(about)
    if about == "unknown":
        raise ProtocolError("no such question")
    return about.upper()


def service_question(about, **fields):
    return ServiceQuestion(about, fields)


def hello(rank, role="worker", number=None):
    """Of a role that is not "worker", the tasks come behind those of the job that trains."""
    number = rank if number is None else number
    return Hello(role, rank, number=number, host=f"host-{rank}", pid=100 + rank)


@pytest.fixture
def events():
    return []


@pytest.fixture
def server(events):
    made = ControlServer(
        "127.0.0.1",
        TOKEN,
        Timeouts(1.0),
        on_event=lambda task, event: events.append((task.number, event)),
        answer=answer,
    )
    yield made
    made.close()


def join(server, rank):
    return ControlClient(make_plan(server.port), hello(rank))


def connect(server):
    address = ("127.0.0.1", server.port)
    return Connection.connect(address, token=TOKEN, wire="control", timeout_seconds=5)


def test_beats_keep_a_worker_alive(server):
    client = join(server, 0)
    time.sleep(1.5)
    assert server.failure() is None
    client.done()
    client.close()
    wait_until(server.all_gone)
    assert server.failure() is None


def test_events_and_questions(server, events):
    client = join(server, 1)
    client.event("progress", step=3)
    client.flush()
    assert client.ask(service_question("facts")) == "FACTS"
    with ThreadPoolExecutor(8) as pool:
        questions = [service_question(f"q{number}") for number in range(100)]
        assert list(pool.map(client.ask, questions)) == [q.about.upper() for q in questions]
    wait_until(lambda: events)
    assert events == [(1, {"type": "event", "kind": "progress", "step": 3})]
    client.done()
    client.close()


def test_output_comes_before_the_failure(server, events):
    for rank in range(20):
        client = join(server, rank)
        client.event("output", lines=["the last line"])
        client.failed(ValueError("a mistake"))
        wait_until(server.failure)
        assert [m["lines"] for r, m in events if r == rank] == [["the last line"]]
        client.close()
        server.members.clear()


def test_a_failure_has_rank_host_and_traceback(server):
    client = join(server, 1)
    try:
        raise KeyError("what")
    except KeyError as error:
        client.failed(error)
    found = wait_until(server.failure)
    assert isinstance(found, WorkerError)
    assert (found.rank, found.host) == (1, "host-1")
    assert 'raise KeyError("what")' in found.worker_traceback
    client.close()


def test_our_own_errors_come_as_themselves(server):
    client = join(server, 1)
    client.failed(DataError("column 'x' is null"))
    found = wait_until(server.failure)
    assert isinstance(found, DataError)
    assert str(found) == "column 'x' is null [rank 1 on host-1]"
    assert isinstance(found.__cause__, WorkerError)
    client.close()


def test_the_cause_is_told_from_its_effects(server):
    """Rank 0's collective fails before the driver sees that rank 1 is gone."""
    clients = [join(server, rank) for rank in range(2)]
    wait_until(lambda: len(server.members) == 2)
    clients[0].failed(CommunicationError("a peer is gone"))
    time.sleep(0.2)
    assert server.failure() is None
    clients[1].close()
    found = wait_until(server.failure)
    assert isinstance(found, WorkerLost)
    assert found.rank == 1
    clients[0].close()


def test_an_effect_without_a_cause_is_reported_after_a_while(server):
    client = join(server, 0)
    client.failed(CommunicationError("a peer is gone"))
    assert "a peer is gone" in str(wait_until(server.failure))
    client.close()


def test_a_silent_worker_is_lost(server):
    connection = connect(server)
    connection.send(encode(hello(2)))
    found = wait_until(server.failure)
    assert isinstance(found, WorkerLost)
    assert "has sent no heartbeat for 1 s (heartbeatTimeout=1)" in str(found)
    connection.close()


@pytest.mark.parametrize(
    "hello",
    [
        b"[1]",
        b'{"type": "hello", "role": "worker"}',
        b'{"type": "hello", "role": "worker", "rank": "x", "number": 0, "host": "h", "pid": 7}',
        b"[" * 100_000,
        b"\xff",
    ],
    ids=["list", "incomplete", "no number", "nested", "binary"],
)
def test_a_worker_that_does_not_say_which_task_it_is_is_refused(server, hello):
    connection = connect(server)
    connection._socket.sendall(hello + b"\n")
    assert connection.receive() is None
    connection.close()
    assert server.members == {}
    client = join(server, 0)
    assert client.ask(service_question("facts")) == "FACTS"
    client.close()


def test_a_line_has_a_largest_length(server):
    connection = connect(server)
    with contextlib.suppress(ConnectionError):  # refused while still sending
        connection._socket.sendall(b'{"role":"' + b"a" * (2 * MAX_LINE_BYTES))
    assert connection.receive() is None
    connection.close()
    assert server.members == {}


def test_a_worker_with_another_token_is_refused(server):
    with pytest.raises(SetupError, match=r"can't reach the driver .* another token"):
        ControlClient(replace(make_plan(server.port), token="another"), hello(0))
    assert server.members == {}


def test_a_driver_that_cannot_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(SetupError, match=f"can't reach the driver at 127.0.0.1:{port}"):
        ControlClient(make_plan(port), hello(0))


def test_a_driver_that_goes_away_does_not_harm_the_worker(server):
    client = join(server, 0)
    wait_until(lambda: server.members)
    for connection in list(server._connections):
        connection.close()
    for step in range(5000):
        client.event("progress", step=step)
    client.flush()
    assert client.ask(service_question("facts"), timeout_seconds=1) is None
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
                rank,
                size,
                lambda **fields: client.ask(service_question("collective", **fields), 10),
                wait_seconds=30,
            )
            summed = comm.allreduce_(torch.full((length,), rank + 1.0))
            client.done()
        return summed

    with (
        closing(
            ControlServer(
                "127.0.0.1",
                TOKEN,
                Timeouts(30.0),
                print,
                lambda task, q: table.contribute(**q.fields),
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
def test_an_answer_that_cannot_be_sent_ends_the_run_and_no_heartbeats(answer, reason):
    with (
        closing(
            ControlServer("127.0.0.1", TOKEN, Timeouts(1.0), print, lambda task, question: answer)
        ) as made,
        closing(join(made, 0)) as client,
    ):
        assert client.ask(service_question("history"), 10) is None
        expected = rf"the driver's answer to 'history' must be JSON .*{reason}"
        assert re.search(expected, str(made.failure()))
        time.sleep(1.5)
        made.own_error = None
        assert made.failure() is None  # heartbeats still arrive
        client.done()
        client.close()
        wait_until(made.all_gone)


def test_a_worker_that_goes_while_it_is_answered_is_lost(server):
    """Its connection is read to its end, though nothing can be written to it any more."""
    connection = connect(server)
    connection.send(encode(hello(2)))
    for number in range(200):
        connection.send(encode(ask(number, service_question("x" * 10_000))))
    connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    assert "exited without reporting an error" in str(wait_until(server.failure))
    wait_until(server.all_gone)


def test_a_mistake_at_the_driver_ends_the_run(server):
    client = join(server, 0)
    assert client.ask(service_question("error")) is None
    assert isinstance(server.failure(), ZeroDivisionError)
    client.close()


def test_an_unknown_question_is_an_error_of_the_asker_alone(server):
    """The service says so; the other worker's questions are answered, and the run continues."""
    asker, other = join(server, 0), join(server, 1)
    with pytest.raises(ProtocolError, match="no such question"):
        asker.ask(service_question("unknown"))
    for client in (asker, other):
        assert client.ask(service_question("facts")) == "FACTS"
    assert server.failure() is None
    for client in (asker, other):
        client.done()
        client.close()


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ({"what": "colour", "fields": {}}, "there is no question 'colour' in the control protocol"),
        ({"what": 7, "fields": {}}, "'ask' has what=7"),
        ({"what": "rows"}, "'ask' lacks its field 'fields'"),
        ({"what": "rows", "fields": {}}, "'rows' lacks its field 'num_rows'"),
        ({"what": "rows", "fields": {"num_rows": "7"}}, "'rows' has num_rows='7'"),
        ({"what": "clock", "fields": {"zone": 1}}, "'clock' has no field 'zone'"),
    ],
)
def test_a_malformed_question_is_refused_and_the_run_continues(server, line, error):
    connection = connect(server)
    connection.send(encode(hello(0)))
    connection.send({"type": "ask", "number": 5, **line})
    answer = connection.receive()
    assert (answer["number"], answer["answer"]) == (5, None)
    assert error in answer["error"]
    connection.send({"type": "song", "number": 5})  # no question: ignored
    connection.send(encode(ask(6, service_question("facts"))))
    assert connection.receive()["answer"] == "FACTS"
    assert server.failure() is None
    connection.close()


@pytest.mark.parametrize("role", ["server", "evaluator"])
def test_a_failure_names_role_and_rank(server, role):
    """Not the task's number, which says how many tasks are before it in the run."""
    client = ControlClient(make_plan(server.port), hello(0, role, number=2))
    client.failed(ValueError("a mistake"))
    found = wait_until(server.failure)
    assert str(found).startswith(f"{role} 0 on host-0 failed: ValueError: a mistake")
    assert f"Traceback of {role} 0 on host-0:" in str(found)
    assert (found.role, found.rank) == (role, 0)
    event = describe_failure(found)
    assert (event["failed_role"], event["failed_rank"]) == (role, 0)
    assert event["cause"] == f"{role} 0 on host-0 failed: ValueError: a mistake"
    client.close()


def test_an_error_of_ours_names_role_and_rank(server):
    client = ControlClient(make_plan(server.port), hello(1, "server", number=3))
    client.failed(DataError("a null"))
    assert str(wait_until(server.failure)) == "a null [server 1 on host-1]"
    client.close()


def test_a_lost_server_is_named(server):
    ControlClient(make_plan(server.port), hello(0, "server", number=2)).close()
    assert str(wait_until(server.failure)) == (
        "server 0 on host-0 failed: its process (pid 100) exited without reporting an error: it "
        "was killed, perhaps for lack of memory, or its executor was lost"
    )
