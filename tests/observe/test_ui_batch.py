"""Events on their way to the JVM: merged, thinned, bounded, and in an order that makes sense."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sparkdml.observe.events import EVENTS
from sparkdml.observe.spark_ui import (
    MERGED_PER_POST,
    MOST_EVENTS,
    MOST_LOGS,
    MOST_LOSSES,
    MOST_LOSSES_WAITING,
    EventBatch,
    thin,
)


def steps(epoch, step, loss=0.5):
    return {"kind": "steps", "epoch": epoch, "step": step, "losses": [[step, loss]], "rows": step}


def rank_event(steps, compute):
    return {
        "kind": "rank",
        "steps": steps,
        "rows": 8 * steps,
        "seconds": {"compute": compute},
        "bytes": 100 * steps,
        "messages": 2 * steps,
    }


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=500),
    st.integers(4, 60),
)
def test_thinning_keeps_the_extremes_and_the_order(values, most):
    points = list(enumerate(values))
    kept = thin(points, most)
    assert len(kept) <= max(most, 2)
    assert kept == sorted(kept, key=lambda point: point[0])
    assert {min(values), max(values)} <= {value for _, value in kept}


def test_thinning_keeps_what_is_not_finite():
    points = [[step, 1.0] for step in range(1000)]
    points[321][1] = math.nan
    points[654][1] = None
    kept = [step for step, _ in thin(points, 50)]
    assert {321, 654} <= set(kept)


def test_steps_of_an_epoch_become_one_event_and_do_not_cross_a_restart():
    batch = EventBatch()
    for step in (1, 2, 3):
        batch.add(0, steps(1, step))
    batch.add(-1, {"kind": "restart", "from_step": 1})
    batch.add(0, steps(1, 2))
    batch.add(0, steps(2, 3))
    taken = batch.take()
    assert [event["kind"] for event in taken] == ["steps", "restart", "steps", "steps"]
    assert taken[0]["losses"] == [[1, 0.5], [2, 0.5], [3, 0.5]]
    assert taken[0]["step"] == 3
    assert [event["epoch"] for event in taken if event["kind"] == "steps"] == [1, 1, 2]
    assert batch.take() == []


def test_an_event_is_not_changed_under_other_observers():
    batch, event = EventBatch(), steps(1, 1)
    batch.add(0, event)
    batch.add(0, steps(1, 2))
    batch.take()
    assert event == steps(1, 1)


def test_sums_of_a_rank_are_added_and_stand_before_the_end():
    batch = EventBatch()
    batch.add(-1, {"kind": "run-start"})
    batch.add(1, rank_event(2, 0.5))
    batch.add(1, rank_event(3, 0.25))
    batch.add(-1, {"kind": "run-end"})
    start, rank, end = batch.take()
    assert (start["kind"], end["kind"]) == ("run-start", "run-end")
    assert (rank["rank"], rank["steps"], rank["rows"]) == (1, 5, 40)
    assert rank["seconds"] == {"compute": 0.75}
    assert (rank["bytes"], rank["messages"]) == (500, 10)


def test_of_a_server_the_newest_counts_are_posted_and_of_output_nothing():
    batch = EventBatch()
    for pushes in (3, 8):
        batch.add(2, {"kind": "server", "seat": 0, "pushes": pushes})
    batch.add(3, {"kind": "server", "seat": 1, "pushes": 4})
    for kind in (name for name, known in EVENTS.items() if known.posting == "none"):
        batch.add(0, {"kind": kind})
    batch.add(0, {"kind": "a kind of the user's own", "value": 1})
    own, first, second = batch.take()
    assert own["value"] == 1
    assert (first["rank"], first["pushes"]) == (2, 8)
    assert (second["rank"], second["pushes"]) == (3, 4)


def test_many_ranks_come_with_every_few_posts_and_all_at_the_end():
    batch, posts = EventBatch(), []
    for _ in range(8):
        for rank in range(4 * MERGED_PER_POST):
            batch.add(rank, rank_event(1, 0.1))
        posts.append(batch.take())
    assert [len(post) for post in posts] == [0, 0, 0, 128, 0, 0, 0, 128]
    assert posts[3][0]["steps"] == 4
    batch.add(7, rank_event(1, 0.1))
    assert len(batch.take(final=True)) == 1


def test_a_jvm_that_takes_nothing_costs_bounded_memory():
    batch = EventBatch()
    for step in range(20_000):
        batch.add(0, steps(1, step))
        assert len(batch._events[0]["losses"]) <= MOST_LOSSES_WAITING
    for step in range(2 * MOST_EVENTS):
        batch.add(0, {"kind": "log", "values": {"x": step}})
        batch.add(-1, {"kind": "checkpoint", "id": step})
    batch.add(0, {"kind": "output", "lines": ["never"]})
    batch.add(0, {"kind": "spans"})
    batch.add(-1, {"kind": "run-end"})
    taken = batch.take()
    assert len(taken) == MOST_EVENTS + 1
    assert len(taken[0]["losses"]) <= MOST_LOSSES
    assert taken[-1]["kind"] == "run-end"
    kinds = [event["kind"] for event in taken]
    assert kinds.count("log") == MOST_LOGS
    assert not {"output", "spans"} & set(kinds)
