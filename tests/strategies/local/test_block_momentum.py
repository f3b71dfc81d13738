"""BMUF's equations, beside the paper's written out in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.strategies.local.block_momentum import BlockMomentum, filter_update_
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.plan import Schedule

numbers = st.floats(-10, 10)


@settings(deadline=None, max_examples=50)
@given(
    averages=st.lists(numbers, min_size=1, max_size=6),
    momentum=st.floats(0, 0.99),
    lr=st.floats(0.1, 2),
    nesterov=st.booleans(),
)
def test_the_filter_is_the_papers(averages, momentum, lr, nesterov):
    """W(t) = W(t-1) + Delta(t); the next block starts from it, or from where momentum leads."""
    model, delta, begins = 0.0, 0.0, 0.0
    ours = torch.zeros(1, dtype=torch.float64)
    ours_delta = torch.zeros_like(ours)
    for average in averages:
        delta = momentum * delta + lr * (average - begins)
        model += delta
        begins = model + momentum * delta if nesterov else model
        given_average = torch.tensor([average], dtype=torch.float64)
        filter_update_(ours_delta, ours, given_average, momentum, lr, nesterov)
    assert ours.item() == pytest.approx(begins, rel=1e-9, abs=1e-9)
    assert ours_delta.item() == pytest.approx(delta, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_momentum_it_is_the_average(nesterov):
    delta, start, average = torch.ones(3), torch.zeros(3), torch.tensor([1.0, -2.0, 3.0])
    filter_update_(delta, start, average, 0.0, 1.0, nesterov)
    assert torch.equal(start, average)


def test_momentum_follows_the_number_of_workers():
    def train(momentum):
        trainings = train_on_threads(
            lambda: BlockMomentum(2, momentum),
            digits_plan(lr=0.1),
            Schedule(1, 8),
            cut(digits(96), [24] * 4),
        )
        return trainings[0].task.params.values

    assert torch.equal(train(None), train(0.75))
    assert not torch.equal(train(None), train(0.5))
