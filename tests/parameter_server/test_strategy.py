"""The parameter server as a strategy, on threads with the real wire: it equals AllReduce."""

import threading
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from sparkdml.errors import ParameterError
from sparkdml.parameter_server.arguments import updater_of
from sparkdml.parameter_server.consistency import ASP, BSP, SSP, TAP
from sparkdml.parameter_server.hybrid import Hybrid
from sparkdml.parameter_server.strategy import ParameterServer
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.strategies.layered_sgd import group_workers, make_groups
from sparkdml.testing.digits import combined_batches, cut, digits, digits_plan, make_normed_reader
from sparkdml.testing.faults import Injected, StopAt
from sparkdml.testing.memory_checkpoints import MemoryCheckpoints
from sparkdml.testing.served_threads import train_served
from sparkdml.testing.threads import train_alone, train_on_threads
from sparkdml.training.callbacks import Callback, LearningRateSchedule
from sparkdml.training.plan import Schedule
from sparkdml.training.training import TrainingPlan


class Path(Callback):
    """The parameters after every step."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, training):
        self.steps.append(training.task.params.values.clone())


def path_of(train, strategy_of, plan, parts, epochs=2):
    paths = []

    def callbacks():
        paths.append(Path())
        return [paths[-1]]

    trainings = train(strategy_of, plan, Schedule(epochs, 8), parts, callbacks=callbacks)
    by_rank = {id(training.callbacks[0]): training.ctx.rank for training in trainings}
    return trainings, next(path.steps for path in paths if by_rank.get(id(path)) == 0)


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.Adam, lr=0.01),
        partial(torch.optim.Adagrad, lr=0.05),
    ],
    ids=lambda optimizer: optimizer.func.__name__,
)
def test_bsp_equals_allreduce_step_by_step(optimizer):
    plan = digits_plan(optimizer=optimizer)
    parts = cut(digits(150), [60, 50, 40])
    ours, our_path = path_of(train_served, ParameterServer, plan, parts)
    theirs, their_path = path_of(train_on_threads, AllReduce, plan, parts)
    assert len(our_path) == len(their_path)
    for one, other in zip(our_path, their_path, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for one, other in zip(ours, theirs, strict=True):
        for mine, expected in zip(one.history, other.history, strict=True):
            assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-4)
            assert mine["rows"] == expected["rows"]


# -- workers that are restarted -------------------------------------------------------------------


class FailsOnce(Callback):
    """One rank fails after one step, in its first attempt alone."""

    def __init__(self, rank, step):
        self.rank, self.step = rank, step

    def on_step_end(self, training):
        ctx = training.ctx
        if (ctx.rank, training.step, ctx.attempt) == (self.rank, self.step, 0):
            raise Injected("once")


@pytest.mark.parametrize("consistency", [BSP(), SSP(1), ASP(0.001), TAP()], ids=str)
@pytest.mark.parametrize(("rank", "step"), [(1, 3), pytest.param(0, 12, marks=pytest.mark.slow)])
def test_a_restarted_worker_continues_behind_its_last_batch(consistency, rank, step):
    parts = cut(digits(180), [80, 60, 40])
    trainings = train_served(
        partial(ParameterServer, consistency=consistency),
        digits_plan(lr=0.1),
        Schedule(3, 8),
        parts,
        callbacks=[FailsOnce(rank, step)],
        max_attempts=2,
    )
    assert trainings[rank].ctx.attempt == 1
    for training in trainings:
        assert len(training.history) == 3
        assert [row["rows"] for row in training.history] == [180.0] * 3
        assert training.history[2]["loss"] < training.history[0]["loss"]
    for training in trainings[1:]:
        torch.testing.assert_close(
            training.task.params.values, trainings[0].task.params.values, rtol=0, atol=0
        )


def test_a_run_stops_on_all_workers_though_one_has_forgotten_why():
    """EarlyStopping's memory is lost with a worker; the others' word counts."""

    class Impatient(Callback):
        def on_epoch_end(self, training, row):
            if training.ctx.attempt == 0 and row["epoch"] == 2:
                training.stop("enough")

    trainings = train_served(
        ParameterServer,
        digits_plan(lr=0.1),
        Schedule(5, 8),
        cut(digits(80), [40, 40]),
        callbacks=[Impatient(), FailsOnce(1, 7)],
        max_attempts=2,
    )
    assert [training.stopped for training in trainings] == ["enough"] * 2
    assert [len(training.history) for training in trainings] == [2, 2]


def test_the_history_has_waits_and_staleness():
    parts = cut(digits(96), [48, 48])
    for consistency in (BSP(), SSP(2)):
        strategy = partial(ParameterServer, consistency=consistency)
        trainings = train_served(strategy, digits_plan(lr=0.1), Schedule(2, 8), parts)
        for one, other in zip(*(training.history for training in trainings), strict=True):
            assert one["wait_seconds"] == other["wait_seconds"] > 0
            assert one["staleness"] == other["staleness"]
            bound = 0 if consistency == BSP() else 2
            assert 0 <= one["staleness"] <= bound


# -- leased rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("consistency", [ASP(0.001), TAP()], ids=str)
def test_leased_rows_come_once_though_a_worker_is_held_up_or_restarted(consistency):
    """Rank 0 makes no second step before the others have used all that it doesn't hold itself."""
    others_have, done = threading.Event(), []

    class HeldUp(Callback):
        def on_step_start(self, training):
            if training.ctx.rank == 0 and training.step == 1:
                assert others_have.wait(60)

        def on_step_end(self, training):
            if training.ctx.rank:
                done.append(1)
                if len(done) >= 10:  # more batches than the others own
                    others_have.set()

    trainings = train_served(
        partial(ParameterServer, consistency=consistency, leased=True),
        digits_plan(lr=0.1),
        Schedule(2, 8),
        cut(digits(160), [96, 32, 32]),
        callbacks=[HeldUp(), FailsOnce(2, 2)],
        max_attempts=2,
    )
    for training in trainings:
        assert [row["rows"] for row in training.history] == [160.0] * 2
        assert training.history[1]["loss"] < training.history[0]["loss"]


def test_leases_are_refused_where_workers_wait_for_the_slowest():
    with pytest.raises(ParameterError, match="TAP"):
        ParameterServer(consistency=SSP(3), leased=True)


# -- settings -------------------------------------------------------------------------------------


def test_a_schedule_of_the_learning_rate_reaches_the_servers():
    class Halve(Callback):
        def on_epoch_start(self, training):
            for group in training.task.optimizers[""].param_groups:
                group["lr"] = 0.2 / 2**training.epoch.number

    parts, plan = cut(digits(96), [48, 48]), digits_plan(lr=0.2)
    ours, theirs = (
        train(strategy, plan, Schedule(3, 8), parts, callbacks=lambda: [Halve()])
        for train, strategy in ((train_served, ParameterServer), (train_on_threads, AllReduce))
    )
    torch.testing.assert_close(
        ours[0].task.params.values, theirs[0].task.params.values, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("make", "groups"),
    [(ParameterServer, 1), (partial(Hybrid, group_size=2, consistency=BSP()), 2)],
    ids=["servers", "hybrid"],
)
def test_warm_up_and_a_scheduler_are_those_of_allreduce(make, groups):
    def schedules():
        return [LearningRateSchedule(partial(StepLR, step_size=1, gamma=0.5), warmup_steps=3)]

    parts, plan = cut(digits(96), [24] * 2 * groups), digits_plan(lr=0.2)
    make().check(TrainingPlan(plan, Schedule(2, 8), tuple(schedules())))
    ours, theirs = (
        train(strategy, plan, Schedule(2, 8), parts, callbacks=schedules)
        for train, strategy in ((train_served, make), (train_on_threads, AllReduce))
    )
    torch.testing.assert_close(
        ours[0].task.params.values, theirs[0].task.params.values, rtol=1e-4, atol=1e-5
    )
    rates = [[row["lr"] for row in run[0].history] for run in (ours, theirs)]
    assert rates[0] == rates[1]


def test_validation_and_buffers_are_those_of_all_workers():
    parts = cut(digits(120), [70, 50])
    held_out = cut(digits(40), [10, 30])
    plan = digits_plan(lr=0.1, model=make_normed_reader)
    ours, theirs = (
        train(strategy, plan, Schedule(2, 8, validates=True), parts, held_out)
        for train, strategy in ((train_served, ParameterServer), (train_on_threads, AllReduce))
    )
    for one, other in zip(ours[1].history, theirs[1].history, strict=True):
        assert one["val_loss"] == pytest.approx(other["val_loss"], rel=1e-3)
        assert one["val_accuracy"] == pytest.approx(other["val_accuracy"])


def test_one_worker_with_one_server_whose_wire_is_encrypted():
    rows, plan = digits(60), digits_plan(lr=0.1)
    make = partial(ParameterServer, num_servers=1, encrypted=True)
    trained = train_served(make, plan, Schedule(2, 8), [rows])
    expected = train_alone(plan, [*combined_batches([rows], 8)] * 2)
    for ours, theirs in zip(
        trained[0].task.module.parameters(), expected.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "word"),
    [
        (torch.optim.RMSprop, "SGD, Adagrad or Adam"),
        (partial(torch.optim.Adam, amsgrad=True), "without amsgrad"),
        (partial(torch.optim.SGD, lr=0.1, dampening=0.1, momentum=0.5), "without dampening"),
        (partial(torch.optim.Adagrad, lr_decay=0.1), "without lr_decay"),
    ],
)
def test_optimizers_that_servers_do_not_have(optimizer, word):
    with pytest.raises(ParameterError, match=word):
        updater_of(optimizer([torch.nn.Parameter(torch.zeros(2))]))


# -- groups ---------------------------------------------------------------------------------------


def test_groups_are_made_of_workers_of_one_host():
    assert group_workers(["a", "b", "a", "b", "a"], 2) == [0, 1, 0, 2, 1]
    assert group_workers(["a"] * 4, 2) == [0, 0, 1, 1]
    assert make_groups(["a", "b", "a", "b", "b", "a"], 2, 2) == [0, 1, 0, 1, 1, 0]


def test_groups_that_wait_for_each_other_equal_allreduce_step_by_step():
    parts, plan = cut(digits(130), [40, 36, 30, 24]), digits_plan(lr=0.1, momentum=0.9)
    ours, our_path = path_of(train_served, partial(Hybrid, 2, consistency=BSP()), plan, parts)
    _, their_path = path_of(train_on_threads, AllReduce, plan, parts)
    for one, other in zip(our_path, their_path, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert len({tuple(training.task.params.values.tolist()) for training in ours}) == 1


def test_a_run_of_groups_that_was_stopped_within_an_epoch_counts_each_row_once():
    parts, kept = cut(digits(128), [32] * 4), MemoryCheckpoints()
    plan = digits_plan(lr=0.0)  # so that losses don't depend on when it was stopped

    def train(stop_at):
        return train_served(
            partial(Hybrid, 2),
            plan,
            Schedule(2, 8),
            parts,
            callbacks=[StopAt(1, stop_at)],
            checkpoints=kept,
        )

    assert train(2)[0].is_interrupted
    assert kept.newest.kind == "step"
    resumed = train(0)
    for row in resumed[0].history:
        assert row["rows"] == 128.0
        assert row["loss"] == pytest.approx(resumed[0].history[1]["loss"], rel=1e-5)
        assert row["accuracy"] == resumed[0].history[1]["accuracy"]
