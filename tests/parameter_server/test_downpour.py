"""Downpour SGD: who pushes and fetches when, what the servers do with it, and how it begins."""

from functools import partial

import pytest
import torch

from sparkdml.parameter_server.downpour import Downpour
from sparkdml.testing.digits import combined_batches, cut, digits, digits_plan
from sparkdml.testing.served_threads import train_served
from sparkdml.testing.threads import train_alone
from sparkdml.training.callbacks import Callback
from sparkdml.training.flat import in_order
from sparkdml.training.plan import Schedule


def parameters_of(module):
    return torch.cat([p.detach().view(-1) for p in module.parameters()])


def test_the_servers_use_adagrad_with_the_optimizers_learning_rate():
    rows = digits(64)
    make = partial(Downpour, n_fetch=1, n_push=1, num_servers=2)
    [training] = train_served(make, digits_plan(lr=0.05), Schedule(2, 8), [rows])
    plan = digits_plan(optimizer=partial(torch.optim.Adagrad, lr=0.05))
    reference = train_alone(plan, [*combined_batches([rows], 8)] * 2)
    torch.testing.assert_close(
        parameters_of(training.task.module), parameters_of(reference), rtol=1e-4, atol=1e-5
    )


def test_gathered_gradients_make_one_step_of_the_servers():
    """Four batches at once, on a model that was never fetched between, are one of four times."""
    rows = digits(64)
    make = partial(Downpour, n_fetch=4, n_push=4, num_servers=1)
    plan = digits_plan(lr=0.05, optimizer=partial(Still, lr=0.05))
    [training] = train_served(make, plan, Schedule(1, 8), [rows])
    reference = train_alone(
        digits_plan(optimizer=partial(torch.optim.Adagrad, lr=0.05)),
        [*combined_batches([rows], 32)],
    )
    torch.testing.assert_close(
        parameters_of(training.task.module), parameters_of(reference), rtol=1e-4, atol=1e-5
    )


class Still(torch.optim.SGD):
    """Makes no step, so that gradients are those of the model that was fetched."""

    def step(self, closure=None):
        return None


@pytest.mark.parametrize(("n_push", "expected"), [(1, 16), (5, 4)])
def test_one_in_n_steps_pushes_and_the_rest_follows_at_the_epochs_end(n_push, expected):
    make = partial(Downpour, n_fetch=3, n_push=n_push, num_servers=1)
    [training] = train_served(make, digits_plan(lr=0.05), Schedule(1, 8), [digits(128)])
    told = next(event for event in training.ctx.events if event["kind"] == "client")
    # Each time gradients, sums and progress, a part each.
    assert told["pushes"] == 3 * expected
    assert training.history[0]["rows"] == 128


class FirstSight(Callback):
    """The model as it was before the first step."""

    def __init__(self):
        self.seen = None

    def on_step_start(self, training):
        if self.seen is None:
            self.seen = training.task.params.values.clone()


@pytest.mark.parametrize("warm_start", [0, 6, 1000])
def test_the_first_worker_may_begin_alone(warm_start):
    """With more steps than an epoch has, it is alone for its first epoch."""
    make = partial(Downpour, n_fetch=1, n_push=1, warm_start=warm_start, num_servers=1)
    parts = cut(digits(120), [80, 40])
    trainings = train_served(
        make, digits_plan(lr=0.05), Schedule(1, 8), parts, callbacks=lambda: [FirstSight()]
    )
    first, second = (training.callbacks[0].seen for training in trainings)
    initial = train_alone(digits_plan(), [])
    batches = [*combined_batches(parts[:1], 8)][: min(warm_start, 10)]
    warm = train_alone(digits_plan(optimizer=partial(torch.optim.Adagrad, lr=0.05)), batches)
    expected, begun = (
        torch.cat([p.detach().view(-1) for p in in_order(module)]) for module in (warm, initial)
    )
    assert torch.equal(first, begun)
    if warm_start != 6:
        torch.testing.assert_close(second, expected, rtol=1e-4, atol=1e-5)
    else:  # by the time that the second looks, the first may have continued
        assert not torch.equal(second, first)
    assert trainings[0].history[0]["rows"] == 120
