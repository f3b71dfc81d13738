"""Stragglers: judged by each rank's own time, never by its wait for others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdml.observe.stragglers import (
    MIN_SECONDS_LOST,
    SLOWER,
    Straggler,
    Stragglers,
    Times,
    find_stragglers,
)


def times(host="a", steps=100, rows=6400, **seconds):
    return Times(host, steps, rows, seconds)


def test_a_rank_that_computes_longer_while_the_others_wait_for_it():
    ranks = {
        0: times(compute=10.0, communication=10.0),
        1: times(compute=19.0, communication=1.0),
        2: times(compute=10.0, communication=10.0),
    }
    (found,) = find_stragglers(ranks)
    assert (found.rank, found.why, found.slower) == (1, "compute", 1.9)
    assert found.seconds_lost == pytest.approx(9.0)
    assert "rank 1 on a took 1.9 times as long as the others (9.0 s lost, compute)" in str(found)


def test_a_rank_that_waits_for_rows():
    ranks = {0: times(data=1.0, compute=5.0), 1: times(data=9.0, compute=5.0)}
    (found,) = find_stragglers(ranks)
    assert (found.rank, found.why) == (1, "data")
    assert "waits for rows" in str(found)


def test_a_slow_host_is_named_as_such():
    ranks = {
        0: times("a", compute=5.0),
        1: times("a", compute=5.0),
        2: times("b", compute=12.0),
        3: times("b", compute=11.0),
    }
    found = find_stragglers(ranks)
    assert [(s.rank, s.host, s.why) for s in found] == [(2, "b", "host"), (3, "b", "host")]


def test_one_slow_rank_of_a_host_is_not_the_host():
    ranks = {0: times("a", compute=5.0), 1: times("b", compute=5.0), 2: times("b", compute=9.0)}
    assert [s.why for s in find_stragglers(ranks)] == ["compute"]


def test_more_rows_explain_more_time():
    ranks = {0: times(rows=3200, compute=5.0), 1: times(rows=6400, compute=10.0)}
    (found,) = find_stragglers(ranks)
    assert found.more_rows == 2.0
    assert "it has 2.0 times the rows of the others" in str(found)


@pytest.mark.parametrize(
    "ranks",
    [
        {},
        {0: times(compute=100.0)},
        {0: times(compute=100.0), 1: times(steps=0, compute=0.0)},
        {0: times(compute=100.0), 1: times(compute=100.0 * SLOWER - 1)},
        {0: times(compute=0.1), 1: times(compute=0.1 + MIN_SECONDS_LOST * 0.9)},
        # Ten times slower in what takes a hundredth of the time.
        {
            0: times(other=1.0, communication=500.0),
            1: times(other=10.0, communication=500.0),
        },
    ],
    ids=["none", "alone", "idle other", "chance", "too little", "no share"],
)
def test_no_rank_is_a_straggler(ranks):
    assert find_stragglers(ranks) == []


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=9))
def test_the_fastest_rank_is_never_blamed(computes):
    ranks = {rank: times(compute=seconds) for rank, seconds in enumerate(computes)}
    fastest = min(computes)
    assert all(computes[s.rank] > fastest for s in find_stragglers(ranks))


def event(host, compute, steps=10):
    seconds = {"data": 0.1, "compute": compute, "communication": 0.0, "checkpoint": 0.0}
    return {"kind": "rank", "steps": steps, "rows": 64, "host": host, "seconds": seconds}


def test_the_observer_adds_up_and_answers_at_any_time():
    observer = Stragglers()
    assert observer.report() == []
    for _ in range(5):
        observer.handle(0, event("a", 1.0))
        observer.handle(1, event("a", 2.0))
    observer.handle(0, {"kind": "epoch", "row": {}})
    (found,) = observer.report()
    assert (found.rank, found.seconds_lost) == (1, 5.0)
    observer.close()
    assert observer.report() == [found]


def test_submissions_are_judged_each_by_itself():
    observer = Stragglers()
    for rank, host, compute in ((0, "a", 1.0), (1, "b", 5.0)):
        observer.handle(rank, event(host, compute))
    observer.handle(-1, {"kind": "restart", "from_step": 10, "cause": "lost", "workers": 2})
    # Rank 1 now sits elsewhere and is as fast as rank 0, but everything is slower than before.
    for rank, host in ((0, "a"), (1, "c")):
        observer.handle(rank, event(host, 20.0))
    assert [(s.rank, s.host) for s in observer.report()] == [(1, "b")]


def test_a_straggler_survives_the_wire():
    straggler = Straggler(1, "b", 1.8, "host", 12.5)
    assert Straggler.from_dict(straggler.to_dict()) == straggler
