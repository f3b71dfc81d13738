"""The table of time-outs: what follows from heartbeatTimeout, and that it reaches every wire."""

from __future__ import annotations

import pickle
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

import sparkdml as dml
from sparkdml.checkpoint.stores.local import LocalStore
from sparkdml.checkpoint.stores.relay_server import RelayServer
from sparkdml.feed.feed import Feed, FeedPlan
from sparkdml.feed.shared_rows import SharedRows
from sparkdml.network.timeouts import SERVER_BEAT_SECONDS, Timeouts
from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.kvstore.serving import StoreService
from sparkdml.parameter_server.membership import Membership
from sparkdml.parameter_server.wire.seal import JobKey
from sparkdml.runtime.driver.blob_server import BlobServer
from sparkdml.runtime.driver.control_server import ControlServer
from sparkdml.runtime.protocol.plan import Options
from sparkdml.runtime.protocol.service import TimedService

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

DERIVED = [name for name, value in vars(Timeouts).items() if isinstance(value, property)]


def derived(heartbeat_timeout: float) -> dict[str, float]:
    timeouts = Timeouts(heartbeat_timeout)
    return {name: getattr(timeouts, name) for name in DERIVED}


def test_the_defaults() -> None:
    assert Timeouts() == Timeouts(8.0)
    assert derived(8.0) == {
        "beat": 1.0,
        "cause": 2.0,
        "connect": 10.0,
        "driver_answer": 30.0,
        "silent_host": 30.0,
        "rows_answer": 60.0,
        "server_lost": 5.0,
    }


def test_no_wire_gives_a_peer_up_before_the_driver_does() -> None:
    for seconds in (20.0, 60.0, 600.0):
        found = derived(seconds)
        others = set(DERIVED) - {"beat", "cause", "server_lost"}
        assert all(found[name] >= seconds for name in others)
        assert found["server_lost"] == seconds * 5 / 8


@pytest.mark.parametrize("seconds", [0.1, 1.0, 8.0, 30.0, 3600.0])
def test_several_beats_fit_into_every_silence(seconds: float) -> None:
    timeouts = Timeouts(seconds)
    assert timeouts.beat <= seconds / 4
    assert timeouts.server_lost / 4 >= SERVER_BEAT_SECONDS


def test_messages_name_the_setting_and_its_value() -> None:
    assert str(Timeouts(30)) == "heartbeatTimeout=30"
    assert f"({Timeouts(0.5)})" == "(heartbeatTimeout=0.5)"


def test_it_is_frozen_and_can_be_shipped() -> None:
    timeouts: Any = Timeouts(30.0)
    assert pickle.loads(pickle.dumps(timeouts)) == timeouts
    with pytest.raises(AttributeError):
        timeouts.heartbeat_timeout = 1.0


# -- where it reaches ------------------------------------------------------------------------------


def test_the_listeners_of_a_run_wait_as_long_as_it_says(tmp_path: Path) -> None:
    timeouts = Options(heartbeat_timeout=30.0).timeouts
    feed = Feed(iter(()), FeedPlan(()), str(tmp_path))
    rows = SharedRows(feed, 0, "token", timeouts=timeouts)
    rows.serve("127.0.0.1")
    with (
        closing(ControlServer("127.0.0.1", "t", timeouts, print, print)) as control,
        closing(BlobServer("127.0.0.1", 0, timeouts)) as blobs,
        RelayServer(LocalStore(f"file://{tmp_path}"), "127.0.0.1", "t", timeouts) as relay,
    ):
        assert rows._server is not None
        for server in (control, blobs._server, relay, rows._server):
            assert server._listener._handshake_seconds == 30.0
        assert blobs.place.timeouts == timeouts
    rows.close()
    feed.close()


def test_servers_of_a_run_are_lost_after_what_follows_from_it() -> None:
    clock = [0.0]
    membership = Membership(ServerConfig(JobKey.new()), now=lambda: clock[0])
    service = StoreService(membership)
    assert isinstance(service, TimedService)
    service.use_timeouts(Timeouts(30.0))
    membership.answer("server.join", {"server_id": 0, "address": "a", "number": 1})
    lost_at = None
    while lost_at is None:
        clock[0] += 1.0  # looks often enough to be awake
        membership.check()
        if 0 not in membership.view.members:
            lost_at = clock[0]
    assert lost_at == 19.0  # the first look after 18.75 s


class Asked:
    """A function with a service of its own, which is told the time-outs."""

    def driver_service(self, num_workers: int) -> Asked:
        return self

    def use_timeouts(self, timeouts: Timeouts) -> None:
        self.timeouts = timeouts

    def answer(self, peer: Any, about: str, fields: Any) -> float:
        return self.timeouts.heartbeat_timeout

    def on_join(self, peer: Any) -> None: ...

    def on_leave(self, peer: Any, outcome: str) -> None: ...

    def __call__(self, ctx: Any) -> tuple[float, float, float]:
        timeouts = ctx.plan.timeouts
        return timeouts.heartbeat_timeout, timeouts.server_lost, ctx.ask("timeouts")


@pytest.mark.spark
def test_the_driver_ships_it_to_every_worker(spark: SparkSession) -> None:
    found = dml.run(Asked(), num_workers=2, heartbeat_timeout=30, spark=spark)
    assert found == [(30.0, 18.75, 30.0)] * 2
