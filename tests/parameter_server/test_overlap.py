"""The pull behind the computation: within the bound, with a worker's own steps; not in BSP."""

from functools import partial

import pytest
import torch

from sparkdml.errors import ParameterError
from sparkdml.parameter_server.arguments import check_overlap_with
from sparkdml.parameter_server.client.requests import PartsTicket
from sparkdml.parameter_server.consistency import ASP, BSP, SSP, TAP
from sparkdml.parameter_server.model_tables import make_own_step
from sparkdml.parameter_server.optimizers import SGD, Adagrad, Adam
from sparkdml.parameter_server.strategy import ParameterServer
from sparkdml.testing.digits import combined_batches, cut, digits, digits_plan
from sparkdml.testing.served_threads import train_served
from sparkdml.testing.threads import train_alone
from sparkdml.training.plan import Schedule


@pytest.fixture(params=[False, True], ids=["as it comes", "every pull is late"])
def late(request, monkeypatch):
    """No pull is there in time: the worker continues with what it has wherever it may."""
    if request.param:
        monkeypatch.setattr(PartsTicket, "wait_a_little", lambda ticket, seconds: False)
    return request.param


def client_events(trainings):
    events = {id(event): event for one in trainings for event in one.ctx.events}
    return [event for event in events.values() if event["kind"] == "client"]


@pytest.mark.parametrize("consistency", [SSP(2), TAP()], ids=str)
def test_a_worker_alone_reads_its_own_writes(late, consistency):
    rows, plan = digits(80), digits_plan(lr=0.1)
    strategy = partial(ParameterServer, consistency=consistency)
    trained = train_served(strategy, plan, Schedule(2, 8), [rows])
    expected = train_alone(plan, [*combined_batches([rows], 8)] * 2)
    for ours, theirs in zip(
        trained[0].task.module.parameters(), expected.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    if late:
        # Nine of ten steps: before the first of an epoch there is nothing to wait for.
        assert [event["cached_pulls"] >= 9 for event in client_events(trained)] == [True] * 2


@pytest.mark.parametrize("bound", [0, 1, pytest.param(3, marks=pytest.mark.slow)])
def test_no_gradient_is_computed_on_an_older_model_than_the_bound_allows(late, bound):
    trained = train_served(
        partial(ParameterServer, consistency=SSP(bound)),
        digits_plan(lr=0.1),
        Schedule(2, 8),
        cut(digits(144), [80, 64]),
    )
    for event in client_events(trained):
        assert all(int(clocks) <= bound for clocks in event["staleness"])
    for training in trained:
        assert [row["rows"] for row in training.history] == [144.0] * 2
        assert training.history[1]["loss"] < training.history[0]["loss"]
        assert torch.equal(training.task.params.values, trained[0].task.params.values)


def test_without_overlap_every_gradient_is_of_the_model_just_read(late):
    strategy = partial(ParameterServer, consistency=TAP(), overlap=False)
    trained = train_served(strategy, digits_plan(lr=0.1), Schedule(1, 8), [digits(48)])
    assert [event["cached_pulls"] for event in client_events(trained)] == [0]


@pytest.mark.parametrize("updater", [SGD(0.1), SGD(0.1, weight_decay=0.01)], ids=str)
def test_an_own_step_is_what_the_servers_make_of_a_gradient(updater):
    values, grads = torch.randn(5), torch.randn(5)
    theirs = values.clone()
    updater.update(theirs, grads / 4, updater.slots(theirs, False))
    make_own_step(values, grads, 4.0, updater)
    torch.testing.assert_close(values, theirs)
    make_own_step(values, grads, 0.0, updater)  # no example
    torch.testing.assert_close(values, theirs)


def test_where_it_can_and_cannot_be_had():
    with pytest.raises(ParameterError, match="overlap"):
        ParameterServer(consistency=BSP(), overlap=True)
    assert not ParameterServer(consistency=BSP()).overlaps(SGD())
    for consistency in (SSP(2), ASP(0.01), TAP()):
        assert ParameterServer(consistency=consistency).overlaps(SGD())
        for updater in (SGD(momentum=0.9), Adagrad(), Adam()):
            assert not ParameterServer(consistency=consistency).overlaps(updater)
            with pytest.raises(ParameterError, match="overlap"):
                check_overlap_with(True, updater)
        assert not ParameterServer(consistency=consistency, overlap=False).overlaps(SGD())
