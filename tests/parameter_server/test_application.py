"""Several applications on one server group, on threads with the real wire."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pytest
import torch

import sparkdml as dml
from sparkdml.errors import CommunicationError, ParameterError
from sparkdml.parameter_server.application import config_from, describe, secret_of
from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.consistency import ASP, BSP, SSP, TAP, Consistency
from sparkdml.parameter_server.optimizers import Add
from sparkdml.parameter_server.strategy import ParameterServer
from sparkdml.parameter_server.wire.seal import JobKey
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.served_threads import train_served
from sparkdml.testing.server_cluster import ThreadedGroup
from sparkdml.training.callbacks import Callback
from sparkdml.training.plan import Schedule


def open_store(group, **settings):
    return group.applications.open(partial(ServerConfig, consistency=TAP(), **settings))


def train(group, lr, callbacks=(), **settings):
    """A small fit; its learning rate tells it from another's."""
    return train_served(
        partial(ParameterServer, servers=group, **settings),
        digits_plan(lr=lr, momentum=0.9),
        Schedule(2, 8),
        cut(digits(120), [70, 50]),
        callbacks=callbacks,
    )


def parameters(trainings):
    return trainings[0].task.params.values


def test_two_fits_at_once_end_as_each_does_alone():
    alone = [train(None, lr) for lr in (0.1, 0.03)]
    with ThreadedGroup(2) as group, ThreadPoolExecutor(2) as pool:
        at_once = list(pool.map(partial(train, group), (0.1, 0.03)))
        again = train(group, 0.1)  # the group is as good as new for the next
    for one, other in zip(alone, at_once, strict=True):
        assert torch.equal(parameters(one), parameters(other))
    assert torch.equal(parameters(again), parameters(alone[0]))


def test_tables_of_one_name_are_each_application_s_own():
    with ThreadedGroup(2) as group:
        first, second = open_store(group), open_store(group)
        with first.client() as one, second.client() as other:
            one.init("sums", torch.zeros(3), updater=Add())
            other.init("sums", torch.full((5,), 7.0), updater=Add())
            one.push("sums", torch.ones(3)).wait()
            assert one.pull("sums").wait().tolist() == [1.0] * 3
            assert other.pull("sums").wait().tolist() == [7.0] * 5
        first.close()
        second.close()


def test_an_application_that_fails_does_not_harm_the_other():
    class Fails(Callback):
        def on_step_end(self, training):
            if training.step == 3:
                raise ValueError("mine alone")

    alone = train(None, 0.1)
    with ThreadedGroup(2) as group, ThreadPoolExecutor(2) as pool:
        bad = pool.submit(train, group, 0.05, [Fails()])
        good = pool.submit(train, group, 0.1)
        with pytest.raises(ValueError, match="mine alone"):
            bad.result(60)
        assert torch.equal(parameters(good.result(60)), parameters(alone))


def test_a_lost_server_rejoins_all_applications():
    with ThreadedGroup(3) as group:
        stores = [open_store(group, replication=2) for _ in range(2)]
        clients = [store.client() for store in stores]
        for client in clients:
            client.init("sums", torch.zeros(50), updater=Add())
            client.push("sums", torch.ones(50)).wait()
        group.lose_server(1)
        for client in clients:
            client.push("sums", torch.ones(50)).wait(60)
        group.start_server(1, attempt=1)
        for client in clients:
            client.push("sums", torch.ones(50)).wait(60)
            assert client.pull("sums").wait(60).unique().tolist() == [3.0]
            client.close()
        for store in stores:
            store.close()


def test_a_group_that_is_closed_tells_those_who_still_use_it():
    with ThreadedGroup(1) as group:
        application = open_store(group)
        client = application.client()
        client.init("sums", torch.zeros(3))

    def push_for_ever():
        while True:
            client.push("sums", torch.ones(3)).wait(60)
            client.clock()

    with pytest.raises(CommunicationError, match="the server group was closed"):
        push_for_ever()
    client.abort()
    with pytest.raises(CommunicationError, match="the server group was closed"):
        open_store(group)


def test_keys_are_each_application_s_own():
    secrets = {secret_of(b"the group's", number) for number in range(5)}
    assert len(secrets | {b"the group's"}) == 6
    assert secret_of(b"another's", 1) not in secrets


@pytest.mark.parametrize("consistency", [BSP(stand_in=True), SSP(5), ASP(0.2, 0.1), TAP()], ids=str)
def test_servers_are_told_all_that_they_must_know(consistency):
    config = ServerConfig(
        JobKey.derive(b"secret", encrypted=True),
        num_servers=3,
        consistency=consistency,
        finite_only=True,
        beat_seconds=0.5,
    )
    assert config_from(describe(config), b"secret") == config


def test_what_a_group_can_not_do_is_refused():
    @dataclass(frozen=True)
    class Mine(Consistency):
        def may_read(self, clock, slowest):
            return True

    group = ThreadedGroup(3)
    with pytest.raises(ParameterError, match="BSP, SSP, ASP, TAP"):
        ParameterServer(servers=group, consistency=Mine()).driver_service(2)
    with pytest.raises(ParameterError, match=r"num_servers.*the group has 3"):
        ParameterServer(num_servers=4, servers=group)
    with pytest.raises(ParameterError, match=r"servers.*dml.ServerGroup"):
        ParameterServer(servers=3)
    with pytest.raises(ParameterError, match="num_servers"):
        dml.WithStore(print, num_servers=2, servers=group)
    assert [role.name for role in ParameterServer(servers=group).roles(2)] == ["worker"]
