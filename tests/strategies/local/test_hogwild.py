"""Hogwild: one set of parameters in memory for all workers of a host."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from torch import nn

from sparkdml.comm.shared_memory.segment import Segment
from sparkdml.comm.threads import run_threads
from sparkdml.errors import ParameterError, SetupError
from sparkdml.strategies.local.hogwild import Hogwild, share
from sparkdml.testing.digits import cut, digits, digits_plan, loss_of
from sparkdml.testing.rank_processes import RankProcesses
from sparkdml.testing.threads import ThreadContext, train_on_threads, train_rank
from sparkdml.training.callbacks import EMA, GradientMonitor
from sparkdml.training.plan import Schedule
from sparkdml.training.task import TaskPlan


class Height(nn.Module):
    """Its loss has a slope of 1 wherever it is: every step goes down by the learning rate."""

    def __init__(self):
        super().__init__()
        self.height = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.height.expand(len(x))


def slope_plan():
    return TaskPlan(
        model=Height,
        loss=lambda outputs, targets: outputs,
        optimizer=partial(torch.optim.SGD, lr=1.0),
        features=("x",),
        label="y",
        metrics={},
        batch_size=1,
    )


def slope_rows(count):
    return {"x": torch.zeros(count, 1), "y": torch.zeros(count)}


def test_the_steps_of_all_workers_add_up():
    """In one round, without a meeting between. A few may be lost to another's, by design."""
    make = partial(Hogwild, steps=100)
    parts = [slope_rows(60), slope_rows(60), slope_rows(60)]
    trainings = train_on_threads(make, slope_plan(), Schedule(1, 1), parts)
    depths = [-training.task.module.height.item() for training in trainings]
    assert depths[0] == depths[1] == depths[2]
    assert 90 < depths[0] <= 180
    assert [row["steps"] for row in trainings[0].history] == [1.0]


def test_a_moving_average_follows_the_parameters_from_meeting_to_meeting():
    """Ten steps down in each of three rounds: the average is of 10, 20 and 30."""
    trainings = train_on_threads(
        partial(Hogwild, steps=10),
        slope_plan(),
        Schedule(1, 1),
        [slope_rows(30)],
        callbacks=[EMA(0.5, warmup=False)],
    )
    assert trainings[0].task.module.height.item() == -(0.125 * 10 + 0.25 * 20 + 0.5 * 30)


def slide(comm):
    """In a process: how deep it got, and how many files the process had open before and after."""
    before = len(os.listdir("/proc/self/fd"))
    training = train_rank(
        ThreadContext(comm, slope_rows(40)), Hogwild(steps=100), slope_plan(), Schedule(1, 1)
    )
    return -training.task.module.height.item(), len(os.listdir("/proc/self/fd")) - before


def learn(comm):
    rows = digits(400)
    part = cut(rows, [220, 180])[comm.rank]
    training = train_rank(
        ThreadContext(comm, part), Hogwild(steps=10), digits_plan(lr=0.2), Schedule(6, 8)
    )
    return loss_of(training.task.module, rows)


def test_processes_share_their_parameters_and_learn():
    with RankProcesses("torch", 2) as ranks:
        (deep, opened), (other, others) = ranks.run(slide)
        assert deep == other
        assert 40 < deep <= 80
        assert opened == others == 0
        losses = ranks.run(learn)
        assert losses[0] == losses[1] < 0.35


@pytest.mark.parametrize("rank", [1, 2])
def test_a_worker_on_another_host_is_refused_on_every_rank(monkeypatch, rank):
    opened = []

    def open_here_only(offer):
        opened.append(offer)
        return None if len(opened) == rank else real_open(offer)

    real_open = Segment.open
    monkeypatch.setattr(Segment, "open", open_here_only)
    errors = []

    def try_to_share(comm):
        with pytest.raises(SetupError, match="memory of one host") as caught:
            share(torch.zeros(5), comm)
        errors.append(str(caught.value))

    run_threads(3, try_to_share)
    assert len(set(errors)) == 1
    assert "LocalSGD()" in errors[0]


def test_a_host_without_such_memory_is_refused(monkeypatch):
    def refuse(self, num_bytes):
        raise OSError("no memory")

    monkeypatch.setattr(Segment, "allocate", refuse)
    with pytest.raises(SetupError, match="rank 0 can't map"):
        run_threads(2, lambda comm: share(torch.zeros(5), comm))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_tensors_are_one(dtype):
    def write(comm):
        shared = share(torch.zeros(3, dtype=dtype), comm)
        shared[comm.rank] = comm.rank + 1.0
        comm.barrier()
        return shared.tolist()

    assert run_threads(3, write) == [[1.0, 2.0, 3.0]] * 3


def test_gradients_that_are_not_averaged_are_not_monitored():
    class Job:
        callbacks = (GradientMonitor(),)

    with pytest.raises(ParameterError, match="GradientMonitor"):
        Hogwild().check(Job())
