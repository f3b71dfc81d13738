"""Dividing a step's rows by speed: nothing is lost, and no row is computed twice."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.feed.shared_rows import SMALLEST_SHARE, divide, hand_over, smooth

speeds = st.lists(st.floats(0.01, 100), min_size=1, max_size=8)


@settings(deadline=None, max_examples=80)
@given(total=st.integers(0, 1000), speeds=speeds)
def test_shares_follow_speeds(total, speeds):
    counts = divide(total, speeds)
    assert sum(counts) == total
    floor = SMALLEST_SHARE * sum(speeds) / len(speeds)
    raised = [max(speed, floor) for speed in speeds]
    exact = [total * speed / sum(raised) for speed in raised]
    if min(exact) >= 2:
        assert all(abs(count - share) < 1 for count, share in zip(counts, exact, strict=True))
    if total > 1:
        assert 1 not in counts  # BatchNorm has no use for a single row


@settings(deadline=None, max_examples=80)
@given(data=st.data(), sizes=st.lists(st.integers(0, 50), min_size=1, max_size=6))
def test_every_row_of_a_step_has_one_rank(data, sizes):
    starts = [data.draw(st.integers(0, 100)) for _ in sizes]
    counts = divide(sum(sizes), [data.draw(st.floats(0.1, 10)) for _ in sizes])
    pieces = hand_over(starts, sizes, counts)
    rows = Counter((o, row) for own in pieces for o, a, b in own for row in range(a, b))
    expected = {(o, starts[o] + i): 1 for o, size in enumerate(sizes) for i in range(size)}
    assert rows == expected
    for rank, own in enumerate(pieces):
        assert sum(b - a for _, a, b in own) == counts[rank]
        kept = sum(b - a for o, a, b in own if o == rank)
        assert kept == min(sizes[rank], counts[rank])  # no row travels that need not


def test_known_numbers():
    assert divide(64, [4, 4, 4, 1]) == [20, 20, 19, 5]
    assert divide(8, [4, 4, 4, 1]) == [4, 2, 2, 0]
    assert divide(2, [1, 1]) == [0, 2]
    assert hand_over([0, 10], [8, 8], [12, 4]) == [[(0, 0, 8), (1, 14, 18)], [(1, 10, 14)]]


def test_speeds_are_smoothed():
    first = smooth([1.0, 1.0, 1.0], [2.0, 8.0, 0.0], [8.0, 8.0, 0.0])
    assert first == [4.0, 1.0, pytest.approx(2.5)]  # the last has shown nothing yet
    assert smooth(first, [1.0, 1.0, 1.0], [8.0, 2.0, 0.0]) == [6.0, 1.5, 2.5]
    assert smooth(first, [0.0] * 3, [0.0] * 3) == first


def test_speeds_that_differ_by_noise_alone_move_nothing():
    assert smooth([1.0, 1.0], [1.0, 1.05], [10.0, 10.0]) == [pytest.approx(9.76, abs=0.01)] * 2
    assert smooth([1.0, 1.0], [1.0, 1.2], [10.0, 10.0])[0] == 10.0
