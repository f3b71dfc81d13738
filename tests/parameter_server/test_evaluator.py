"""The evaluator on threads, with the real wire: it measures just the model that it says."""

from functools import partial

import pytest
import torch
from torch import nn

from sparkdml.errors import ParameterError
from sparkdml.feed.batch import Batch
from sparkdml.parameter_server.consistency import BSP, SSP, TAP
from sparkdml.parameter_server.downpour import Downpour
from sparkdml.parameter_server.strategy import ParameterServer
from sparkdml.testing.digits import cut, digits, digits_plan, make_normed_reader, make_reader
from sparkdml.testing.faults import Injected
from sparkdml.testing.served_threads import join, train_served
from sparkdml.testing.waiting import wait_until
from sparkdml.training.callbacks import Callback
from sparkdml.training.plan import Schedule
from sparkdml.training.training import TrainingPlan

HELD_OUT = cut(digits(40), [10, 30])


class Told:
    """What the evaluator has told, and a way to wait for it."""

    def __call__(self, run):
        self._run = run

    @property
    def rows(self):
        return [e for e in self._run.events.get("evaluator", ()) if e["kind"] == "evaluation"]

    def wait_for(self, count):
        wait_until(lambda: len(self.rows) >= count, seconds=60)


class Waits(Callback):
    """Rank 0 makes no step after the given ones before the evaluator has told something new.

    For BSP alone: under the others a snapshot waits for the slowest.
    """

    def __init__(self, told, *steps):
        self.told, self.steps = told, steps

    def on_step_end(self, training):
        if training.ctx.rank == 0 and training.step in self.steps:
            self.told.wait_for(self.steps.index(training.step) + 1)


class WaitsAtRest(Callback):
    """Rank 0 ends no epoch before the evaluator has told something: all stand still meanwhile."""

    def __init__(self, told):
        self.told = told

    def on_epoch_end(self, training, row):
        if training.ctx.rank == 0:
            self.told.wait_for(1)


class Losses(Callback):
    """Rank 0 measures the held-out rows after every step, too."""

    def __init__(self, held_out=HELD_OUT):
        self.by_step, self.rows = {}, join(held_out)

    def on_step_end(self, training):
        if training.ctx.rank == 0:
            sums = training.task.forward.evaluate(_batches(self.rows))
            totals = training.task.totals(sums)
            self.by_step[training.step] = training.task.forward.means(totals)["loss"]


def _batches(rows):
    yield from Batch(rows, len(rows["y"])).split(8)


class Bounded(nn.Module):
    """BatchNorm's statistics beside a constant that is infinite, as masks are."""

    def __init__(self):
        super().__init__()
        self.reader = make_normed_reader()
        self.register_buffer("lowest", torch.tensor([-torch.inf]))

    def forward(self, x):
        return self.reader(x).maximum(self.lowest)


@pytest.mark.parametrize("model", [make_reader, make_normed_reader, Bounded])
def test_under_bsp_it_measures_the_very_model_that_the_workers_have_after_that_step(model):
    """Rank 0's BatchNorm statistics stand for those of all, until they are merged."""
    told, losses = Told(), Losses()
    trainings = train_served(
        partial(ParameterServer, consistency=BSP(), evaluator=True),
        digits_plan(lr=0.1, model=model),
        Schedule(2, 8, validates=True),
        cut(digits(120), [60, 60]),
        HELD_OUT,
        callbacks=[losses, Waits(told, 3, 9)],
        on_start=told,
    )
    assert len(told.rows) >= 2
    for row in told.rows:
        assert row["values"]["val_loss"] == pytest.approx(losses.by_step[row["step"]], rel=1e-6)
        assert 0 <= row["values"]["val_accuracy"] <= 1
    # As without an evaluator: the model at the epoch's end, measured by the workers.
    for training in trainings if model is make_reader else ():
        for row, step in zip(training.history, (8, 16), strict=True):
            assert row["val_loss"] == pytest.approx(losses.by_step[step], rel=1e-6)


class Words(nn.Module):
    """With an embedding that is large enough to go by rows."""

    def __init__(self):
        super().__init__()
        self.words, self.kinds = nn.Embedding(3000, 4), nn.Linear(4, 2)

    def forward(self, words):
        return self.kinds(self.words(words.long()).mean(1))


def test_embeddings_are_read_of_tables_of_their_own():
    words = torch.randint(0, 3000, (120, 5), generator=torch.Generator().manual_seed(1))
    first, second, *held_out = cut({"x": words, "y": words[:, 0] % 2}, [56, 40, 10, 14])
    told, losses = Told(), Losses(held_out)
    train_served(
        partial(ParameterServer, evaluator=True),
        digits_plan(lr=1.0, model=Words),
        Schedule(2, 8, validates=True),
        [first, second],
        held_out,
        callbacks=[losses, Waits(told, 3)],
        on_start=told,
    )
    for row in told.rows:
        assert row["values"]["val_loss"] == pytest.approx(losses.by_step[row["step"]], rel=1e-6)


@pytest.mark.parametrize(
    "strategy",
    [
        partial(ParameterServer, consistency=SSP(2), evaluator=True),
        partial(ParameterServer, consistency=TAP(), leased=True, evaluator=True),
        partial(Downpour, 2, 2, evaluator=True),
    ],
)
def test_it_measures_beside_workers_that_run_apart(strategy):
    told = Told()
    trainings = train_served(
        strategy,
        digits_plan(lr=0.05),
        Schedule(3, 8, validates=True),
        cut(digits(140), [80, 60]),
        HELD_OUT,
        callbacks=[WaitsAtRest(told)],
        on_start=told,
    )
    assert [row["rows"] for row in trainings[0].history] == [140.0] * 3
    steps = [row["step"] for row in told.rows]
    assert steps
    assert steps == sorted(steps)


def test_an_evaluator_that_fails_restarts_unnoticed():
    told = Told()

    class FailsOnce(ParameterServer):
        def run(self, role, training):
            if role == "evaluator" and not training.ctx.attempt:
                raise Injected("once")
            super().run(role, training)

    plan, parts = digits_plan(lr=0.1), cut(digits(96), [48, 48])
    schedule = Schedule(2, 8, validates=True)
    ours, theirs = (
        train_served(
            make, plan, schedule, parts, HELD_OUT, callbacks=waits, max_attempts=2, on_start=told
        )
        for make, waits in (
            (partial(FailsOnce, evaluator=True), [Waits(told, 3)]),
            (ParameterServer, ()),
        )
    )
    assert torch.equal(ours[0].task.params.values, theirs[0].task.params.values)


def test_what_it_can_not_measure_is_refused_before_any_job():
    strategy = ParameterServer(evaluator=True)
    assert [role.name for role in strategy.roles(2)] == ["worker", "server", "evaluator"]
    with pytest.raises(ParameterError, match="validation must be given with evaluator=True"):
        strategy.check(TrainingPlan(digits_plan(lr=0.1), Schedule(1, 8)))
    strategy.check(TrainingPlan(digits_plan(lr=0.1), Schedule(1, 8, validates=True)))
