"""When checkpoints are due: what `every=` means, and whether "auto" is as good as can be."""

from __future__ import annotations

import math
import threading
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sparkdml.checkpoint import policy
from sparkdml.checkpoint.policy import (
    FIRST_SECONDS,
    LONGEST_SECONDS,
    OVERHEAD_WITH_FAILURES,
    OVERHEAD_WITHOUT_FAILURES,
    SHORTEST_SECONDS,
    CheckpointSchedule,
    Interval,
    auto_interval,
    expected_failure_seconds,
    parse_every,
    young_daly,
)
from sparkdml.errors import ParameterError

DAY = 86400.0
costs = st.floats(1e-4, 1e4)
spans = st.floats(1.0, 1e8)


# -- every= --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "unit", "amount"),
    [
        (1, "steps", 1),
        (np.int64(250), "steps", 250),
        ("100 steps", "steps", 100),
        ("step", "steps", 1),
        (timedelta(minutes=2), "seconds", 120),
        ("30 seconds", "seconds", 30),
        ("30s", "seconds", 30),
        ("0.5 s", "seconds", 0.5),
        (" 10 Min ", "seconds", 600),
        ("minute", "seconds", 60),
        ("2 hours", "seconds", 7200),
        ("1.5h", "seconds", 5400),
        ("1 day", "seconds", DAY),
        ("epoch", "epochs", 1),
        ("2 epochs", "epochs", 2),
        ("auto", "auto", 1),
        (Interval("epochs", 3), "epochs", 3),
    ],
)
def test_every_is_understood(every, unit, amount):
    assert parse_every(every) == Interval(unit, amount)


@pytest.mark.parametrize(
    "every",
    [
        *(0, -5, True, np.True_, 1.5, math.nan, math.inf, None, []),
        *("", "5", "steps 5", "0 steps", "-3 s", "nan seconds", "inf s", "1.5 epochs", "0.5 steps"),
        *("2 auto", "fortnight", "5 5 s", "1,5 hours", "9" * 400 + " s"),
        *(
            timedelta(0),
            timedelta(seconds=-1),
            Interval("seconds", 0),
            Interval("seconds", math.nan),
        ),
    ],
)
def test_every_names_what_is_allowed(every):
    with pytest.raises(ParameterError, match="every must be") as caught:
        parse_every(every)
    assert repr(every) in str(caught.value)


@given(st.sampled_from(["steps", "seconds", "epochs"]), st.integers(1, 10**12))
def test_every_reads_back_what_it_says(unit, number):
    every = Interval(unit, number)
    assert parse_every(str(every)) == every


def test_every_says_what_it_is():
    assert [str(parse_every(every)) for every in (1, "2 epochs", "1.5 s", "auto")] == [
        "1 step",
        "2 epochs",
        "1.5 seconds",
        "auto",
    ]


# -- Young and Daly ------------------------------------------------------------------------------


@given(costs, spans)
def test_the_interval_is_positive_and_finite(cost, between):
    assert 0 < young_daly(cost, between) < math.inf


@given(costs, costs, spans)
def test_dearer_checkpoints_are_rarer(cost, other, between):
    low, high = sorted((cost, other))
    assert young_daly(low, between) <= young_daly(high, between) * (1 + 1e-9)


@given(costs, spans, spans)
def test_failures_make_checkpoints_more_frequent(cost, between, other):
    low, high = sorted((between, other))
    assume(cost < 2 * low)  # beyond that, Daly's two pieces don't meet
    assert young_daly(cost, low) <= young_daly(cost, high) * (1 + 1e-9)


def test_where_failures_are_rare_it_is_youngs():
    assert young_daly(1.0, 1e8) == pytest.approx(math.sqrt(2 * 1.0 * 1e8), rel=1e-3)


def _waste(interval, cost, gaps):
    """The share of the time that gave no lasting work, over these gaps between failures."""
    lasting = np.floor(gaps / (interval + cost)) * interval
    return 1 - lasting.sum() / gaps.sum()


@pytest.mark.parametrize("cost", [0.2, 5.0, 60.0])
@pytest.mark.parametrize("ratio", [3, 20, 300, 5000])
def test_no_other_interval_wastes_much_less(cost, ratio):
    """Simulated with random failures; all intervals meet the same ones."""
    gaps = np.random.default_rng(7).exponential(cost * ratio, 200_000)
    grid = np.geomspace(cost / 10, cost * ratio * 3, 200)
    best = min(_waste(interval, cost, gaps) for interval in grid)
    assert _waste(young_daly(cost, cost * ratio), cost, gaps) <= 1.10 * best
    # The bar means something: an interval a few times off does not clear it.
    assert _waste(4 * young_daly(cost, cost * ratio), cost, gaps) > 1.10 * best


# -- the failure rate ----------------------------------------------------------------------------


def test_the_failure_rate_starts_at_one_a_day_and_learns():
    assert expected_failure_seconds(0, 0) == pytest.approx(DAY)
    assert expected_failure_seconds(1, 600) < 3 * 3600
    assert expected_failure_seconds(1000, 1000 * 60) == pytest.approx(60, rel=0.2)
    assert expected_failure_seconds(0, 30 * DAY) > 30 * DAY


@given(st.integers(0, 1000), st.floats(0, 1e7))
def test_each_failure_shortens_what_is_expected(failures, elapsed):
    expected = expected_failure_seconds(failures, elapsed)
    assert expected_failure_seconds(failures + 1, elapsed) < expected
    assert expected_failure_seconds(failures, elapsed + 60) > expected


# -- auto ----------------------------------------------------------------------------------------


@given(costs, spans, st.sampled_from([OVERHEAD_WITH_FAILURES, OVERHEAD_WITHOUT_FAILURES]))
def test_the_overhead_is_bounded(cost, between, overhead):
    interval = auto_interval(cost, between, overhead)
    assert cost / interval <= overhead * (1 + 1e-9)
    assert interval >= SHORTEST_SECONDS
    assert interval <= max(LONGEST_SECONDS, cost / overhead)


def _spent(pace, copy, write, seconds, step_seconds=0.05):
    """Trains with a clock of its own; the checkpoints taken, and the time that they took."""
    now, step, spent, taken = 0.0, 0, 0.0, []
    while now < seconds:
        now += step_seconds
        step += 1
        if pace.due_after_step(step, now):
            pace.taken(step, now)
            now += copy + write
            spent += copy + write
            pace.costed(copy, write)
            taken.append(now)
    return taken, spent


@pytest.mark.parametrize(("copy", "write"), [(0.001, 0.01), (0.1, 1.0), (5.0, 60.0)])
def test_auto_costs_three_percent_at_most_where_nothing_fails(copy, write):
    pace = CheckpointSchedule(Interval("auto"), now=0.0)
    pace.taken(0, 0.0)
    pace.costed(copy, write)
    taken, spent = _spent(pace, copy, write, seconds=6000)
    assert taken
    assert spent <= OVERHEAD_WITHOUT_FAILURES * 6000


def test_auto_takes_more_once_failures_were_seen():
    calm, troubled = (
        CheckpointSchedule(Interval("auto"), 0.0),
        CheckpointSchedule(Interval("auto"), 0.0, failures=10),
    )
    for pace in (calm, troubled):
        pace.costed(0.1, 1.9)
    assert troubled.interval_seconds < calm.interval_seconds / 5
    assert 2.0 / troubled.interval_seconds <= OVERHEAD_WITH_FAILURES


def test_auto_relaxes_while_nothing_fails():
    pace = CheckpointSchedule(Interval("auto"), 0.0, failures=1)
    pace.costed(0.1, 1.0)
    early = pace.interval_seconds
    pace.taken(10, 6 * 3600.0)
    assert pace.interval_seconds > 1.5 * early


def test_auto_before_the_first_cost_takes_one_soon():
    pace = CheckpointSchedule(Interval("auto"), now=100.0)
    assert not pace.due_after_step(1, 100.0 + FIRST_SECONDS - 0.1)
    assert pace.due_after_step(2, 100.0 + FIRST_SECONDS)


def test_auto_follows_a_store_that_becomes_slow():
    pace = CheckpointSchedule(Interval("auto"), now=0.0)
    pace.costed(0.01, 0.1)
    before = pace.interval_seconds
    for _ in range(6):
        pace.costed(0.01, 10.0)
    assert pace.cost_seconds == pytest.approx(10.0, rel=0.03)
    assert pace.interval_seconds > 8 * before


def test_a_given_failure_rate_replaces_the_observed_one():
    pace = CheckpointSchedule(
        Interval("auto"), 0.0, failures=50, elapsed_seconds=50.0, failure_seconds=7200
    )
    pace.costed(0.5, 0.5)
    assert pace.failure_seconds == 7200
    assert pace.interval_seconds == pytest.approx(young_daly(1.0, 7200))


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, math.inf, True, "hour"])
def test_a_failure_rate_that_is_none_is_refused(wrong):
    with pytest.raises(ParameterError, match="failure_seconds must be"):
        CheckpointSchedule(Interval("auto"), 0.0, failure_seconds=wrong)


def test_a_cost_reported_during_the_next_checkpoint_does_not_make_one_due(monkeypatch):
    """The writing thread reports while the training thread takes the next."""
    pace = CheckpointSchedule(Interval("auto"), now=0.0)
    training = threading.Thread(target=pace.taken, args=(1, 1000.0), name="training")

    def meanwhile(*args: float) -> float:
        if not training.ident:
            training.start()
            training.join(0.2)
        return auto_interval(*args)

    monkeypatch.setattr(policy, "auto_interval", meanwhile)
    pace.costed(0.1, 0.1)
    training.join()
    assert not pace.due_after_step(2, 1001.0)


# -- steps, seconds, epochs ----------------------------------------------------------------------


@given(st.integers(1, 50), st.integers(0, 200), st.integers(1, 300))
def test_steps_are_multiples_wherever_a_run_resumes(amount, first, count):
    pace = CheckpointSchedule(Interval("steps", amount), now=0.0, step=first)
    taken = []
    for step in range(first + 1, first + count + 1):
        if pace.due_after_step(step, 0.0):
            pace.taken(step, 0.0)
            taken.append(step)
    assert taken == [step for step in range(first + 1, first + count + 1) if step % amount == 0]
    assert not pace.due_after_epoch(1)


def test_what_is_due_stays_due_until_taken():
    pace = CheckpointSchedule(Interval("steps", 100), now=0.0)
    assert not pace.due_after_step(99, 0.0)
    assert pace.due_after_step(100, 0.0)
    assert pace.due_after_step(103, 0.0)  # a write was in flight
    pace.taken(103, 0.0)
    assert not pace.due_after_step(199, 1e9)
    assert pace.due_after_step(200, 1e9)


def test_seconds_count_from_the_last_one():
    pace = CheckpointSchedule(parse_every("30s"), now=1000.0)
    assert not pace.due_after_step(1, 1029.0)
    assert pace.due_after_step(2, 1030.5)
    pace.taken(2, 1030.5)
    pace.costed(50.0, 50.0)  # the user has said when: costs don't matter
    assert not pace.due_after_step(3, 1060.0)
    assert pace.due_after_step(4, 1060.5)
    assert not pace.due_after_epoch(1)  # ranks' clocks differ, so no rank decides by its own


@given(st.integers(1, 5), st.integers(0, 7))
def test_epochs_are_multiples_wherever_a_run_resumes(amount, first):
    pace = CheckpointSchedule(Interval("epochs", amount), now=0.0, epoch=first)
    taken = []
    for epoch in range(first + 1, 20):
        assert not pace.due_after_step(epoch * 10, 1e9)
        if pace.due_after_epoch(epoch):
            pace.taken(epoch * 10, 0.0)
            taken.append(epoch)
    assert taken == [epoch for epoch in range(first + 1, 20) if epoch % amount == 0]


@pytest.mark.parametrize("every", [7, "1 hour", "3 epochs", "auto"])
def test_epoch_ends_may_be_asked_for_besides(every):
    pace = CheckpointSchedule(parse_every(every), now=0.0, epoch=2, epoch_ends=True)
    for epoch in (3, 4, 5):
        assert pace.due_after_epoch(epoch)
        pace.taken(epoch * 10, 0.0)
        assert not pace.due_after_epoch(epoch)
