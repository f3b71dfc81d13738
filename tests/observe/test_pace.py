"""Rows a second and time left, also over the end of an epoch and a restart."""

import pytest

from sparkdml.observe.progress import WINDOW_SECONDS, Throughput, clock, short


def test_the_rate_goes_over_the_end_of_an_epoch():
    pace = Throughput(epochs=3)
    assert pace.rows_per_second is None
    pace.count(0.0, 1, 60, 100)
    assert pace.seconds_left is None
    pace.count(2.0, 1, 80, 100)
    assert pace.rows_per_second == 10
    assert pace.seconds_left == 22
    pace.count(4.0, 1, 100, 100)
    pace.count(6.0, 2, 20, 100)
    assert pace.rows_per_second == 10
    assert pace.seconds_left == 18


def test_rows_before_a_resume_count_for_no_speed():
    pace = Throughput(epochs=2)
    pace.count(0.0, 2, 900_000, 1_000_000)
    pace.count(1.0, 2, 900_100, 1_000_000)
    assert pace.rows_per_second == 100


def test_a_restart_forgets_the_pause():
    pace = Throughput(epochs=1)
    pace.count(0.0, 1, 0, 100)
    pace.count(1.0, 1, 50, 100)
    pace.restart()
    assert pace.rows_per_second is None
    pace.count(500.0, 1, 20, 100)
    pace.count(501.0, 1, 30, 100)
    assert pace.rows_per_second == 10
    assert pace.seconds_left == 7


def test_what_was_long_ago_no_longer_counts():
    pace = Throughput(epochs=1)
    for second in range(100):
        pace.count(float(second), 1, float(second), None)
    for second in range(100, 200):
        pace.count(float(second), 1, 100.0 + 10 * (second - 100), None)
    assert pace.rows_per_second == pytest.approx(10)
    assert len(pace._points) <= WINDOW_SECONDS + 2
    assert pace.seconds_left is None  # the number of rows is unknown


def test_an_epoch_that_does_not_move_has_no_end():
    pace = Throughput(epochs=1)
    pace.count(0.0, 1, 10, 100)
    pace.count(1.0, 1, 10, 100)
    assert pace.seconds_left is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (725, "12:05"), (12_000, "3:20:00")]
)
def test_clock(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (987.4, "987"),
        (999.7, "1k"),
        (12_345, "12.3k"),
        (4.56e6, "4.56M"),
        (5e12, "5e+03G"),
    ],
)
def test_short(number, text):
    assert short(number) == text
