"""A worker of a parameter server dies between any two pushes of a step: each batch counts once.

The loss is linear in the parameters, so gradients don't depend on the model they are computed on,
and what the servers hold in the end is a sum over all batches: one too many or too few shows.
"""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from sparkdml.parameter_server import worker
from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.consistency import ASP, BSP, SSP, TAP
from sparkdml.parameter_server.downpour import Downpour
from sparkdml.parameter_server.model_tables import SUMS, VALUES
from sparkdml.parameter_server.optimizers import SGD
from sparkdml.parameter_server.progress import PROGRESS, mark_of_step
from sparkdml.parameter_server.strategy import ParameterServer
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.faults import Injected
from sparkdml.testing.served_threads import train_served
from sparkdml.testing.waiting import wait_until
from sparkdml.training.callbacks import Callback
from sparkdml.training.plan import Schedule

FIRST, REST = "first part of values", "other parts of values"
PIECES = (FIRST, REST, SUMS, PROGRESS)


def linear_loss(outputs, labels):
    """One value a row."""
    return (outputs * torch.linspace(-1, 1, 10)).sum(1) * (labels + 1) / 10


PLAN = digits_plan(lr=0.01, model=partial(nn.Linear, 64, 10), loss=linear_loss)


class InParts:
    """Mixed into a strategy: so that its small model is more than one part."""

    def _config(self, key):
        return replace(super()._config(key), part_bytes=1024)


class Parted(InParts, ParameterServer):
    pass


class PartedDownpour(InParts, Downpour):
    pass


def deadly_client(rank, deaths):
    """A client that dies in steps of one rank, `deaths`: step -> what still reaches the servers."""

    class DeadlyClient(WorkerClient):
        _arrives = None  # while it dies

        def push(self, name, value, rows=None, weight=1.0, mark=0):
            step = next((s for s in deaths if mark == mark_of_step(s)), None)
            if self.worker != rank or step is None:
                return super().push(name, value, rows, weight, mark)
            self.flush()  # of what lies before nothing is in doubt
            self._arrives = deaths[step]
            ticket = super().push(name, value, rows, weight, mark)
            ticket.wait()
            if name == PROGRESS:  # the last one of a step
                del deaths[step]
                raise Injected(f"in step {step}")
            return ticket

        def _entries(self, known, *arguments):
            entries = super()._entries(known, *arguments)
            if self._arrives is None:
                return entries
            name = known.table.name
            return [
                entry
                for entry in entries
                if (name if name != VALUES else REST if entry.part else FIRST) in self._arrives
            ]

    return DeadlyClient


class Waits(Callback):
    """The other workers make no step before the first one has died as often as it shall."""

    def __init__(self, deaths):
        self.deaths = deaths

    def on_step_start(self, training):
        wait_until(lambda: training.ctx.rank == 0 or not self.deaths, seconds=60)


def train(monkeypatch, strategy_of, parts, deaths, epochs=2):
    monkeypatch.setattr(worker, "WorkerClient", deadly_client(0, deaths))
    max_attempts = len(deaths) + 1
    trainings = train_served(
        strategy_of,
        PLAN,
        Schedule(epochs, 8),
        parts,
        callbacks=[Waits(deaths)],
        max_attempts=max_attempts,
    )
    assert not deaths
    assert trainings[0].ctx.attempt == max_attempts - 1
    return trainings


def all_values(trainings):
    return trainings[0].task.params.values


SUBSETS = [
    {piece for piece, arrives in zip(PIECES, choice, strict=True) if arrives}
    for choice in product([False, True], repeat=len(PIECES))
]


@pytest.mark.parametrize(
    "consistency", [BSP(), pytest.param(SSP(1), marks=pytest.mark.slow), TAP()], ids=str
)
def test_a_worker_dies_between_any_two_pushes_and_each_batch_counts_once(monkeypatch, consistency):
    # One worker alone, since under BSP a step's mean depends on who else is in its clock.
    parts = [digits(80)]
    deaths = {step + 2: subset for step, subset in enumerate(SUBSETS)}
    strategy = partial(Parted, consistency=consistency)
    killed = train(monkeypatch, strategy, parts, deaths)
    expected = train(monkeypatch, strategy, parts, {})
    for one, other in zip(killed, expected, strict=True):
        assert [row["rows"] for row in one.history] == [80.0] * 2
        assert one.step == other.step
    torch.testing.assert_close(all_values(killed), all_values(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("leased", [False, True])
def test_among_others_and_with_leased_rows(monkeypatch, leased):
    parts = cut(digits(100), [60, 40])
    if leased:  # how an owner's rows are cut depends on who comes when: here all cuts are alike
        parts = [{name: torch.cat([part[name][:8]] * 6) for name in part} for part in parts]
    deaths = {2: {FIRST, PROGRESS}, 3: {REST, SUMS}, 4: set(PIECES), 5: set()}
    strategy = partial(Parted, consistency=TAP(), leased=leased)
    killed = train(monkeypatch, strategy, parts, deaths)
    expected = train(monkeypatch, strategy, parts, {})
    for one in killed:
        assert [row["rows"] for row in one.history] == [row["rows"] for row in expected[0].history]
    torch.testing.assert_close(all_values(killed), all_values(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("warm_start", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_downpour_pushes_several_steps_together(monkeypatch, warm_start):
    """Ten steps an epoch: pushes of 4, 4 and 2; a warm start ends its first one after 3."""
    first = 3 if warm_start else 4
    deaths = {
        first: {REST},
        first + 4: {FIRST, PROGRESS},
        10: set(),
        14: {REST, SUMS},
        20: {PROGRESS},
    }
    strategy = partial(
        PartedDownpour, n_fetch=3, n_push=4, warm_start=warm_start, updater=SGD(lr=0.01)
    )
    killed = train(monkeypatch, strategy, [digits(80)], deaths)
    expected = train(monkeypatch, strategy, [digits(80)], {})
    assert [row["rows"] for row in killed[0].history] == [80.0] * 2
    torch.testing.assert_close(all_values(killed), all_values(expected), rtol=1e-5, atol=1e-6)


def test_rows_are_counted_once_under_asp_too(monkeypatch):
    deaths = {2: {SUMS}, 3: {PROGRESS}, 5: {FIRST, SUMS}}
    strategy = partial(Parted, consistency=ASP(0.001))
    killed = train(monkeypatch, strategy, cut(digits(100), [60, 40]), deaths)
    for one in killed:
        assert [row["rows"] for row in one.history] == [100.0] * 2
