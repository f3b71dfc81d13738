"""Elastic averaging: the spring's equations, and arguments that only a worker can judge."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.errors import ParameterError
from sparkdml.strategies.local.easgd import EASGD, draw_together_
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.plan import Schedule


@settings(deadline=None, max_examples=50)
@given(
    models=st.lists(st.floats(-100, 100), min_size=1, max_size=5),
    centre=st.floats(-100, 100),
    beta=st.floats(0, 1),
)
def test_the_spring_pulls_on_both_ends_alike(models, centre, beta):
    size = len(models)
    own = [torch.tensor([value], dtype=torch.float64) for value in models]
    mean = torch.stack(own).mean(0)
    centres = [torch.tensor([centre], dtype=torch.float64) for _ in own]
    before = sum(models) + centre
    spread_before = max(abs(value - centre) for value in models)
    for value, of_rank in zip(own, centres, strict=True):
        draw_together_(value, of_rank, mean, beta / size, beta)
    assert len({value.item() for value in centres}) == 1, "every rank has the same centre"
    assert sum(v.item() for v in own) + centres[0].item() == pytest.approx(before, abs=1e-9)
    assert max(abs(v.item() - centre) for v in own) <= spread_before + 1e-9


def test_models_differ_and_the_centre_is_kept():
    trainings = train_on_threads(
        partial(EASGD, 2), digits_plan(lr=0.2), Schedule(1, 8), cut(digits(64), [32, 32])
    )
    for training in trainings:
        assert torch.equal(training.task.params.values, training.ctx.strategy._centre)
    own = [training.ctx.strategy._centre for training in trainings]
    assert torch.equal(own[0], own[1])


def test_a_spring_that_would_overshoot_is_refused_before_the_first_step():
    with pytest.raises(ParameterError, match=r"rho must be at most .* = 2.5 but got 3"):
        train_on_threads(
            partial(EASGD, 2, rho=3.0),
            digits_plan(lr=0.2),
            Schedule(1, 8),
            cut(digits(64), [32, 32]),
        )
