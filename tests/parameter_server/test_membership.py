"""The membership, with a simulated clock: its servers, silent members, and awaited workers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.errors import ParameterError
from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.consistency import Expulsion, Watch
from sparkdml.parameter_server.membership import Membership
from sparkdml.parameter_server.view import View
from sparkdml.parameter_server.wire.seal import JobKey


class Group:
    def __init__(self, num_servers: int = 3, **settings: Any) -> None:
        self.time = 0.0
        config = ServerConfig(
            JobKey.new(), num_servers=num_servers, lost_after_seconds=5.0, **settings
        )
        self.membership = Membership(config, now=lambda: self.time)
        self.numbers: dict[int, int] = {}

    @property
    def view(self) -> View:
        return self.membership.view

    def join(self, server_id: int) -> Any:
        self.numbers[server_id] = self.numbers.get(server_id, 100 * (server_id + 1)) + 1
        fields = {
            "server_id": server_id,
            "number": self.numbers[server_id],
            "address": f"h:{server_id}",
        }
        return self.membership.answer("server.join", fields)

    def beat(self, *server_ids: int, settled: int = 0) -> None:
        for server_id in server_ids:
            fields = {"server_id": server_id, "number": self.numbers[server_id], "settled": settled}
            assert not (self.membership.answer("server.beat", fields) or {}).get("expelled")

    def ask_worker(self, what: str, worker: int, **fields: Any) -> Any:
        fields = {"worker": worker, "number": worker + 1000, **fields}
        return self.membership.answer(f"server.{what}", fields)

    def pass_time(self, seconds: float, *beating: int) -> None:
        for _ in range(round(seconds)):
            self.time += 1.0
            self.beat(*beating)
            self.membership.check()


def started(num_servers: int = 3) -> Group:
    group = Group(num_servers)
    for server_id in range(num_servers):
        group.join(server_id)
    return group


def test_the_group_begins_when_all_servers_are_there() -> None:
    group = Group(2)
    group.join(0)
    assert group.view.generation == 0
    group.join(1)
    assert group.view.generation == 1
    assert set(group.view.servers) == {0, 1}
    assert group.view.replication == 2


def test_one_server_has_nowhere_to_replicate() -> None:
    assert started(1).view.replication == 1


def test_a_silent_server_is_removed_and_rejoins_by_catching_up() -> None:
    group = started()
    group.pass_time(6, 0, 1)
    assert set(group.view.servers) == {0, 1}
    fields = {"server_id": 2, "number": group.numbers[2]}
    assert group.membership.answer("server.beat", fields)["expelled"]  # type: ignore[index]
    group.join(2)
    assert set(group.view.joining) == {2}
    group.beat(0, settled=group.view.generation)
    assert set(group.view.joining) == {2}, "server 1 hasn't handed out its copies"
    group.beat(1, settled=group.view.generation - 1)
    assert set(group.view.joining) == {2}, "that was another generation"
    group.beat(1, settled=group.view.generation)
    assert set(group.view.servers) == {0, 1, 2}


def test_two_silent_servers_are_not_removed_at_once() -> None:
    group = started()
    group.pass_time(6, 0)
    assert len(group.view.servers) == 2
    assert group.membership.failure is None
    group.pass_time(3, 0)
    assert set(group.view.servers) == {0}
    answer = group.ask_worker("worker_join", 0)
    assert "replication=2" in answer["failed"], "what only these two held is lost: it must be said"


def test_one_loss_after_the_other_is_borne() -> None:
    group = started()
    group.membership.lost_server(2)
    group.beat(0, 1, settled=group.view.generation)
    group.membership.lost_server(1)
    assert group.membership.failure is None


def test_a_driver_that_slept_declares_no_member_dead() -> None:
    group = started()
    group.time += 1000.0
    group.membership.check()
    assert len(group.view.servers) == 3
    group.pass_time(2, 0, 1, 2)
    assert len(group.view.servers) == 3


def test_a_restarted_server_is_another_one() -> None:
    group = started()
    group.join(1)
    assert set(group.view.servers) == {0, 2}
    assert set(group.view.joining) == {1}


def test_views_are_sent_to_those_who_have_an_older_one() -> None:
    group = started()
    known = {"generation": group.view.generation, "roster": group.view.roster}
    fields = {"server_id": 0, "number": group.numbers[0], **known}
    assert "view" not in (group.membership.answer("server.beat", fields) or {})
    group.ask_worker("worker_join", 0)
    answer = group.membership.answer("server.beat", fields) or {}
    assert View.from_dict(answer["view"]) == group.view


def test_questions_of_others_are_left_to_them() -> None:
    assert started().membership.answer("lease.take", {}) is None


def test_a_barrier_counts_those_who_live() -> None:
    group = Group(1, num_workers=3)
    group.join(0)
    for worker in range(3):
        group.ask_worker("worker_join", worker)
    for worker in range(2):
        assert not group.ask_worker("barrier", worker, name="", times=1)["passed"]
    group.membership.lost_worker(2)
    assert group.ask_worker("barrier", 0, name="", times=1)["passed"]
    assert not group.ask_worker("barrier", 0, name="", times=2)["passed"]


def test_a_worker_far_slower_than_the_others_is_expelled_and_readmitted() -> None:
    group = Group(1, num_workers=3, expulsion=Expulsion(3.0, after_clocks=2, readmit_after=2))
    group.join(0)
    for worker in range(3):
        group.ask_worker("worker_join", worker)

    def clock(number: int, *seconds: float) -> tuple[int, ...]:
        for worker, busy in enumerate(seconds):
            group.ask_worker("worker_beat", worker, clock=number, busy_seconds=busy)
        return group.view.expelled

    assert clock(1, 1.0, 1.2, 9.0) == ()
    assert clock(2, 1.0, 1.2, 9.0) == (2,)
    assert clock(3, 1.0, 1.2, 1.0) == (2,)
    assert clock(4, 1.0, 1.2, 1.0) == ()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0.01, 100)), max_size=60))
def test_never_more_than_half_are_expelled(history: list[tuple[int, float]]) -> None:
    watch = Watch(Expulsion(2.0, 1, 1))
    seen = set()
    for worker, seconds in history:
        seen.add(worker)
        watch.finished(worker, seconds)
        assert 2 * len(watch.expelled) <= len(seen)


@pytest.mark.parametrize(
    ("settings", "parameter"),
    [
        ({"num_servers": 0}, "num_servers"),
        ({"replication": 0}, "replication"),
        ({"beat_seconds": 0}, "beat_seconds"),
        ({"lost_after_seconds": 0.1}, "lost_after_seconds"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ParameterError, match=parameter):
        ServerConfig(JobKey.new(), **settings)
