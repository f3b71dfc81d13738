"""A worker that is far slower than the others is expelled, and readmitted: through the strategy."""

from functools import partial

import pytest
import torch

from sparkdml.errors import ParameterError
from sparkdml.parameter_server import worker
from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.consistency import ASP, BSP, SSP, TAP, Expulsion
from sparkdml.parameter_server.strategy import ParameterServer
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.served_threads import train_served
from sparkdml.testing.waiting import wait_until
from sparkdml.training.callbacks import Callback
from sparkdml.training.plan import Schedule

SLOW = 2  # the rank
SECONDS = {"slow": 1.0, "well": 0.01}


class SaysSo(WorkerClient):
    """Says how long its clocks take, in place of measuring it."""

    says = "slow"

    def _computed_seconds(self):
        is_slow = self.worker == SLOW and SaysSo.says == "slow"
        return SECONDS["slow" if is_slow else "well"]


class Watched(ParameterServer):
    """One whose group can be looked at."""

    desks = []

    def driver_service(self, num_workers):
        driver_service = super().driver_service(num_workers)
        Watched.desks.append(driver_service)
        return driver_service


def watch():
    return Watched.desks[-1].membership._watch


def expelled():
    return Watched.desks[-1].membership.view.expelled


class Story(Callback):
    """The slow one stays in its third step until it is expelled and the others are five ahead.

    Then it is as quick as they are, who wait before their last step until it is with them again.
    """

    def __init__(self):
        self.steps = {}

    def on_step_start(self, training):
        rank, step = training.ctx.rank, training.step
        self.steps[rank] = step
        others = [other for other in (0, 1, 2) if other != SLOW]
        if rank == SLOW and step == 1:
            # The rule compares: first it must have heard of the others.
            wait_until(lambda: watch()._seconds.keys() >= set(others), seconds=60)
        if rank == SLOW and step == 2:
            wait_until(lambda: expelled() == (SLOW,), seconds=60)
            wait_until(lambda: all(self.steps[other] >= step + 5 for other in others), seconds=60)
            SaysSo.says = "well"
        if rank != SLOW and step == 11:
            wait_until(lambda: expelled() == (), seconds=60)


@pytest.mark.parametrize(
    "consistency",
    [pytest.param(BSP(), marks=pytest.mark.slow), BSP(stand_in=True), SSP(1)],
    ids=str,
)
def test_a_slow_worker_is_expelled_and_readmitted_and_every_row_counts(monkeypatch, consistency):
    monkeypatch.setattr(worker, "WorkerClient", SaysSo)
    monkeypatch.setattr(SaysSo, "says", "slow")
    trainings = train_served(
        partial(Watched, consistency=consistency, expulsion=Expulsion(4.0, 1, 1)),
        digits_plan(lr=0.05),
        Schedule(1, 8),
        cut(digits(288), [96, 96, 96]),
        callbacks=[Story()],
    )
    told = [event["what"] for event in Watched.desks[-1].membership.events]
    assert "worker expelled" in told
    assert "worker waited for again" in told
    for training in trainings:
        # Also where a gradient stands in for a missing one: its rows are not counted again.
        assert training.history[0]["rows"] == 288.0
        assert torch.equal(training.task.params.values, trainings[0].task.params.values)


@pytest.mark.parametrize("consistency", [ASP(0.01), TAP()], ids=str)
def test_where_no_worker_waits_none_can_be_expelled(consistency):
    with pytest.raises(ParameterError, match="expulsion"):
        ParameterServer(consistency=consistency, expulsion=Expulsion())


def test_a_stand_in_needs_a_rule():
    with pytest.raises(ParameterError, match=r"expulsion=Expulsion\(\)"):
        ParameterServer(consistency=BSP(stand_in=True))
    assert "stand_in=True" in repr(ParameterServer(1, BSP(stand_in=True), expulsion=Expulsion()))


def test_a_rule_of_another_kind_is_refused():
    with pytest.raises(ParameterError, match="expulsion"):
        ParameterServer(expulsion=4.0)
