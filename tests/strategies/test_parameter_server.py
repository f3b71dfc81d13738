"""The parameter server as a strategy, on threads with the real wire: it equals AllReduce."""

from functools import partial

import pytest
import torch

from sparkdml.strategies.allreduce import AllReduce
from sparkdml.strategies.parameter_server import ParameterServer
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.served_threads import train_served
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.callbacks import Callback
from sparkdml.training.training import Schedule


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
