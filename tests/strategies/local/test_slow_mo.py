"""SlowMo's equations, and where they meet block momentum's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparkdml.strategies.local.base import learning_rates
from sparkdml.strategies.local.block_momentum import filter_update_
from sparkdml.strategies.local.slow_mo import SlowMo, slow_step_
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.callbacks import LearningRateSchedule
from sparkdml.training.plan import Schedule
from sparkdml.training.task import Task


@settings(deadline=None, max_examples=50)
@given(
    averages=st.lists(st.floats(-10, 10), min_size=1, max_size=6),
    rate=st.floats(1e-3, 1),
    momentum=st.floats(0, 0.99),
)
def test_at_one_rate_it_is_classical_block_momentum(averages, rate, momentum):
    slow, block = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    buffer, delta = torch.zeros_like(slow), torch.zeros_like(block)
    rates = torch.tensor([rate], dtype=torch.float64)
    for average in averages:
        target = torch.tensor([average], dtype=torch.float64)
        slow_step_(buffer, slow, target, rates, momentum, 1.0)
        filter_update_(delta, block, target, momentum, 1.0, nesterov=False)
    torch.testing.assert_close(slow, block, rtol=1e-8, atol=1e-8)


def test_the_memory_is_in_units_of_gradients():
    """Half the rate, half the way: the buffer, and so what momentum adds, follows the rate."""
    buffer, start = torch.zeros(1), torch.zeros(1)
    slow_step_(buffer, start, torch.tensor([-0.4]), torch.tensor([0.4]), 0.5, 1.0)
    assert (buffer.item(), start.item()) == pytest.approx((1.0, -0.4))
    slow_step_(buffer, start, start.clone(), torch.tensor([0.2]), 0.5, 1.0)
    assert (buffer.item(), start.item()) == pytest.approx((0.5, -0.5))


def test_a_rate_of_nothing_moves_nothing():
    buffer, start = torch.zeros(2), torch.ones(2)
    slow_step_(buffer, start, torch.tensor([1.0, 0.5]), torch.tensor([0.0, 1.0]), 0.9, 1.0)
    assert start.tolist() == [1.0, 0.5]
    assert buffer.tolist() == [0.0, 0.5]


def test_each_parameter_has_the_rate_of_its_group():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.slow, self.fast = nn.Linear(2, 1, bias=False), nn.Linear(1, 3, bias=False)

        def forward(self, x):
            return self.fast(self.slow(x))

    def groups(module):
        fast = {"params": list(module.fast.parameters()), "lr": 1.0}
        return [{"params": list(module.slow.parameters())}, fast]

    plan = digits_plan(lr=0.25, model=Two, parameter_groups=groups)
    # In the order of the flat buffer: the last module's parameters come first.
    assert learning_rates(Task(plan, torch.device("cpu"))).tolist() == [1.0] * 3 + [0.25] * 2
    assert learning_rates(Task(digits_plan(lr=0.25), torch.device("cpu"))).tolist() == [0.25]


def test_a_rank_without_rows_knows_the_rate_of_the_others():
    """Warm-up changes the rate between agreement and step, and a rank without rows has neither."""
    trainings = train_on_threads(
        lambda: SlowMo(2),
        digits_plan(lr=0.4),
        Schedule(1, 8),
        cut(digits(64), [64, 0]),
        callbacks=lambda: [LearningRateSchedule(warmup_steps=8)],
    )
    assert torch.equal(trainings[0].task.params.values, trainings[1].task.params.values)
    assert torch.equal(trainings[0].ctx.strategy._buffer, trainings[1].ctx.strategy._buffer)
    assert trainings[0].history[0]["lr"] == trainings[1].history[0]["lr"] == 0.2  # the 4th of 8
