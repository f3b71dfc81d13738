"""Roles: how they become jobs and slots, and how their tasks connect, leave, and reconnect."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.errors import DataError, SetupError, WorkerError, WorkerLost
from sparkdml.network.timeouts import Timeouts
from sparkdml.runtime.driver.control_server import ControlServer
from sparkdml.runtime.driver.preflight import check_settings
from sparkdml.runtime.driver.slots import Slots
from sparkdml.runtime.protocol.messages import Hello
from sparkdml.runtime.protocol.plan import Options, Plan
from sparkdml.runtime.protocol.roles import (
    Resources,
    Role,
    demands,
    describe,
    job_roles,
    most_workers,
    num_slots,
    num_tasks,
    role_and_rank,
)
from sparkdml.runtime.worker.control_client import ControlClient
from sparkdml.testing.waiting import wait_until

WORKERS = Role("worker", 3)
HELPERS = Role("helper", 2, reads="none")
SERVERS = Role("server", 2, gang=False, reads="none")


# -- as jobs ------------------------------------------------------------------------------------


def test_gang_roles_share_a_job_in_which_who_reads_comes_first():
    assert job_roles([HELPERS, SERVERS, WORKERS]) == [(WORKERS, HELPERS), (SERVERS,)]
    alone = replace(WORKERS, gang=False)
    assert job_roles([SERVERS, alone]) == [(alone,), (SERVERS,)]
    assert job_roles([SERVERS, HELPERS, alone]) == [(alone,), (SERVERS,), (HELPERS,)]


def test_a_gang_without_data_is_first_too():
    assert job_roles([replace(WORKERS, reads="none"), SERVERS])[0] == (
        replace(WORKERS, reads="none"),
    )


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
@settings(deadline=None, max_examples=30)
def test_every_task_is_assigned_once(counts):
    roles = [Role(f"r{index}", count) for index, count in enumerate(counts)]
    tasks = [role_and_rank(roles, index) for index in range(num_tasks(roles))]
    assert tasks == [(role, rank) for role in roles for rank in range(role.count)]
    with pytest.raises(IndexError):
        role_and_rank(roles, num_tasks(roles))


@pytest.mark.parametrize(
    "roles",
    [
        [WORKERS, WORKERS],
        [WORKERS, Role("other", 1)],
        [Role("worker", 0)],
        [WORKERS, replace(HELPERS, resources=Resources(2))],
        [replace(WORKERS, at_once=False)],
    ],
)
def test_roles_that_make_no_sense(roles):
    with pytest.raises(AssertionError):
        job_roles(roles)


# -- as slots -----------------------------------------------------------------------------------


def layered(num_workers):
    return [Role("worker", num_workers), Role("helper", -(-num_workers // 2), reads="none")]


@pytest.mark.parametrize(("slots", "workers"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (6, 4)])
def test_as_many_workers_as_there_is_room_for(slots, workers):
    assert most_workers(layered, slots) == workers
    assert slots < 2 or num_tasks(layered(workers)) <= slots


def test_tasks_that_need_not_run_at_once_need_one_slot():
    one_by_one = Role("worker", 8, gang=False, at_once=False)
    assert num_slots([one_by_one]) == 1
    assert num_slots([one_by_one, SERVERS]) == 3


def test_a_large_task_takes_the_room_of_a_small_one():
    usual = Resources(cpus=1, gpus=1)
    small = replace(SERVERS, resources=Resources(cpus=1))
    assert demands([WORKERS, small], usual) == {usual: 3, Resources(cpus=1): 5}
    assert demands([WORKERS, SERVERS], usual) == {usual: 5}


def test_roles_in_words():
    assert describe([WORKERS]) == "3 workers"
    assert describe([WORKERS, replace(SERVERS, count=1)]) == "3 workers and 1 server"
    assert describe([WORKERS, HELPERS, SERVERS]) == "3 workers, 2 helpers and 2 servers"


# -- members that reconnect -----------------------------------------------------------------------


@pytest.fixture
def changes():
    return []


@pytest.fixture
def server(changes):
    made = ControlServer(
        "127.0.0.1",
        "token",
        Timeouts(1.0),
        on_event=lambda task, event: None,
        answer=lambda task, question: None,
        retried=["server"],
        on_change=lambda m: changes.append((m.task.rank, m.task.attempt, m.state)),
        together=["server"],
    )
    yield made
    made.close()


def plan_of(server):
    return Plan(
        run_id="run",
        role=SERVERS,
        resources=Resources(),
        driver_host="127.0.0.1",
        driver_port=server.port,
        store_port=0,
        kv_port=0,
        token="token",
        backend="single",
        seed=0,
        source="none",
        feed=None,
        timeouts=Timeouts(0.4),
    )


def join(server, attempt=0, rank=0):
    task = hello(rank, attempt, task_id=7 + attempt)
    client = ControlClient(plan_of(server), task)
    wait_until(lambda: ("server", rank) in server.members)
    wait_until(lambda: server.members["server", rank].task == task)
    return client


def hello(rank, attempt, task_id=None):
    return Hello(
        "server",
        rank,
        number=rank,
        host="here",
        pid=100 + attempt,
        attempt=attempt,
        task_id=task_id,
    )


def test_a_retried_task_may_be_lost_and_reconnect(server, changes):
    join(server).close()
    wait_until(lambda: (0, 0, "lost") in changes)
    assert server.failure() is None
    client = join(server, attempt=1)
    client.failed(ValueError("once more"))
    wait_until(lambda: (0, 1, "failed") in changes)
    assert server.failure() is None
    client.close()
    client = join(server, attempt=2)
    client.done()
    client.close()
    wait_until(server.all_gone)
    assert changes == [
        (0, 0, "here"),
        (0, 0, "lost"),
        (0, 1, "here"),
        (0, 1, "failed"),
        (0, 2, "here"),
        (0, 2, "done"),
    ]


def test_it_is_a_failure_once_spark_has_given_up(server):
    others = join(server, rank=1)
    others.close()  # lost, and about to reconnect
    client = join(server, attempt=3)
    client.failed(ValueError("for the fourth time"))
    wait_until(lambda: server.members["server", 0].state == "failed")
    server.give_up(["server"])
    found = server.failure()
    assert isinstance(found, WorkerError)
    assert "for the fourth time" in str(found)
    client.close()


def test_what_would_come_again_is_final_at_once(server):
    client = join(server)
    client.failed(DataError("a null"))
    assert isinstance(wait_until(server.failure), DataError)
    client.close()


def test_a_late_attempt_does_not_take_the_place_of_a_newer_one(server, changes):
    newer = join(server, attempt=1)
    member = server.members["server", 0]
    older = ControlClient(plan_of(server), hello(0, attempt=0))
    assert older.wait_for_the_end(10)
    assert server.members["server", 0] is member
    assert changes == [(0, 1, "here")]
    older.close()
    newer.close()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_stage_that_spark_starts_again_ends_the_run(server, is_lost):
    """Attempts count from 0 again, and tasks that still run are started once more."""
    first = join(server)
    if is_lost:
        first.close()
        wait_until(lambda: server.members["server", 0].state == "lost")
    second = ControlClient(plan_of(server), hello(0, attempt=0, task_id=8))
    found = wait_until(server.failure)
    assert isinstance(found, WorkerLost), "another submission may resume from a checkpoint"
    assert "starts all of it again" in str(found)
    assert second.wait_for_the_end(10)
    first.close()
    second.close()


def test_a_stage_of_tasks_that_do_not_wait_may_start_again(server):
    server._together.clear()
    first = join(server)
    second = ControlClient(plan_of(server), hello(0, attempt=0, task_id=8))
    wait_until(lambda: server.members["server", 0].task.task_id == 8)
    assert server.failure() is None
    first.close()
    second.close()


def test_a_silent_task_is_told_once_and_is_a_loss_if_it_can_not_be_ended(server):
    client = join(server)
    client._closing = True  # it sends no more heartbeats
    silent = wait_until(server.take_silent)
    assert [(member.task.rank, member.task.task_id) for member in silent] == [(0, 7)]
    assert server.take_silent() == []
    assert server.failure() is None
    server.give_up(["server"])
    assert isinstance(server.failure(), WorkerLost)
    client.close()


def test_who_serves_is_told_of_the_end_even_if_it_comes_late(server):
    early = join(server)
    assert not early.wait_for_the_end(0)
    server.dismiss(["server"])
    assert early.wait_for_the_end(10)
    late = join(server, rank=1)
    assert late.wait_for_the_end(10)
    for client in (early, late):
        client.done()
        client.close()


# -- slots, asked of a cluster --------------------------------------------------------------------


class FakeCluster:
    """Four slots, and a note of what was asked for."""

    def __init__(self, elastic=False):
        self.elastic, self.asked = elastic, []

    def setting(self, key):
        return "true" if self.elastic and key == "spark.dynamicAllocation.enabled" else None

    def task_profile(self, resources):
        return None

    def wait_for_slots(self, needed, resources, profile, timeout_seconds, who, gang):
        self.asked.append((needed, who, gang))
        return 4 if needed is None else needed

    def wait_for_replacements(self, wanted, least, resources, profile, timeout_seconds):
        self.asked.append((wanted, least))
        return min(wanted, 3)


def one_by_one(num_workers):
    return [Role("worker", num_workers, gang=False, at_once=False)]


@pytest.mark.parametrize(
    ("roles_of", "num_workers", "count", "asked"),
    [
        (lambda n: [Role("worker", n)], 3, 3, [(3, None, True)]),
        (lambda n: [Role("worker", n)], None, 4, [(None, None, True), (4, None, True)]),
        (layered, None, 2, [(None, None, True), (3, "2 workers and 1 helper", True)]),
        (one_by_one, 9, 9, [(1, "9 workers", False)]),
    ],
)
def test_slots_for_all_roles(roles_of, num_workers, count, asked):
    cluster = FakeCluster()
    slots = Slots(cluster, Options(num_workers=num_workers), roles_of)
    assert slots.wait() == count
    assert cluster.asked == asked


def test_under_dynamic_allocation_executors_come_with_the_work():
    cluster = FakeCluster(elastic=True)
    slots = Slots(cluster, Options(num_workers=9), one_by_one)
    assert not slots.has_gang
    assert not slots.has_open_wires
    assert slots.wait() == 9
    assert cluster.asked == []
    check_settings({"spark.dynamicAllocation.enabled": "true"}, many=False, spools=True, gang=False)
    with pytest.raises(SetupError, match="dynamicAllocation"):
        check_settings({"spark.dynamicAllocation.enabled": "true"}, many=False, spools=True)


def test_after_a_failure_fewer_workers_with_their_helpers():
    cluster = FakeCluster()
    slots = Slots(cluster, Options(num_workers=4, min_workers=1), layered)
    assert slots.wait_again(4) == 2  # of 3 slots one is the helper's
    assert cluster.asked == [(6, 2)]
    assert Slots(cluster, Options(num_workers=9), one_by_one).wait_again(9) == 9
