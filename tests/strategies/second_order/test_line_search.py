"""The line search alone: what it finds fulfils the strong Wolfe conditions, or it says None."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.strategies.second_order.line_search import (
    CURVATURE,
    DECREASE,
    Sample,
    between,
    search,
)


def drive(function, first_step=1.0, max_trials=40, noise=0.0):
    """Run a search over a function of the step: (value, slope); the result and what was tried."""
    start = Sample(0.0, *function(0.0))
    trials, tried = search(start, first_step, max_trials, noise), []
    try:
        step = next(trials)
        while True:
            tried.append(step)
            step = trials.send(Sample(step, *function(step)))
    except StopIteration as end:
        return start, end.value, tried


@settings(deadline=None, max_examples=100)
@given(
    minimum=st.floats(0.01, 300),
    bend=st.floats(0.01, 100),
    wave=st.floats(0, 0.9),
    first_step=st.floats(0.001, 100),
)
def test_what_is_found_fulfils_the_conditions(minimum, bend, wave, first_step):
    def function(t):
        """A bowl with waves in it."""
        value = 0.5 * bend * (t - minimum) ** 2 + wave * bend * math.cos(t)
        return value, bend * (t - minimum) - wave * bend * math.sin(t)

    start, found, tried = drive(function, first_step)
    assert found is not None
    assert found.value <= start.value + DECREASE * found.step * start.slope
    assert abs(found.slope) <= -CURVATURE * start.slope
    assert tried[0] == first_step
    assert found.step == tried[-1]  # nothing needs to be computed again


def test_a_parabola_takes_two_trials():
    _, found, tried = drive(lambda t: ((t - 3) ** 2, 2 * (t - 3)), first_step=20.0)
    assert found.step == pytest.approx(3.0)
    assert len(tried) == 2


def test_where_the_loss_can_not_be_computed_it_comes_closer():
    def function(t):
        return (-t, -1.0) if t < 0.3 else (math.inf, math.nan)

    _, found, _ = drive(function, max_trials=8)
    assert found is not None
    assert 0 < found.step < 0.3


def test_no_way_down_is_none_and_ends():
    _, found, tried = drive(lambda t: (t, -1.0), max_trials=6)  # a slope that lies
    assert found is None
    assert len(tried) == 6


def test_rounding_is_not_taken_for_a_rise():
    def function(t):
        """A value that only has noise left, and a slope that still tells where the minimum is."""
        return 1.0 + 1e-12 * ((t * 1e6) % 1), 1e-9 * (t - 1.0)

    assert drive(function, noise=1e-11)[1].step == pytest.approx(1.0)


@given(low=st.floats(0, 10), high=st.floats(0, 10), value=st.floats(-5, 5), slope=st.floats(-5, 5))
def test_trials_lie_well_inside(low, high, value, slope):
    near, far = sorted((low, high))
    if far - near < 1e-6:
        return
    step = between(Sample(low, 0.0, math.copysign(1.0, low - high)), Sample(high, value, slope))
    assert near + 0.099 * (far - near) <= step <= far - 0.099 * (far - near)
