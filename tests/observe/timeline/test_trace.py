"""The trace at the driver: tracks, marks, thinning."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.observe.timeline.trace import ThinnedEvents, Trace
from sparkdml.observe.timeline.trace_file import COMMUNICATION, DRIVER_PID, TRAINING, find_faults

START = 1_700_000_000.0
LAPS = ("feed wait", "forward", "backward", "communication", "optimizer")


def step_spans(step: int, begin: float, lap: float = 100.0) -> list[list[Any]]:
    laps = [[TRAINING, n, begin + i * lap, lap, step, None] for i, n in enumerate(LAPS)]
    allreduce = [COMMUNICATION, "allreduce", begin + 250, 150, step, {"bytes": 4}]
    return [*laps, [TRAINING, "step", begin, lap * len(LAPS), step, None], allreduce]


def message(spans: list[list[Any]], at: float = 0.0, **more: Any) -> dict[str, Any]:
    """A "spans" event whose times are microseconds after `at` seconds."""
    return {
        "kind": "spans",
        "time": START + at + 1,
        "host": "a",
        "origin": round((START + at) * 1e9),
        "uncertainty": 20.0,
        "every": 1,
        "spans": spans,
        **more,
    }


def events_of(trace: Trace) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in trace.lines()]
    assert find_faults(events) == []
    return events


def test_processes_are_ranks_and_threads_are_tracks() -> None:
    trace = Trace(START, 1000)
    trace.handle(0, message(step_spans(1, 0)))
    trace.handle(1, message(step_spans(1, 30), host="b"))
    trace.handle(-1, {"kind": "restart", "time": START + 2, "cause": "x", "from_step": 0})
    trace.handle(1, message(step_spans(1, 3e6), host="c"))
    events = events_of(trace)
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name")
        for event in events
        if event["ph"] == "M"
    }
    assert names["process_name", 0, 0] == "rank 0 on a"
    assert names["process_name", 1, 0] == "rank 1 on b, then c"
    assert names["process_name", DRIVER_PID, 0] == "driver"
    assert names["thread_name", 1, TRAINING] == "training"
    assert names["thread_name", 1, COMMUNICATION] == "communication"
    (first, *_) = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert (first["name"], first["ts"], first["dur"]) == ("step", 30.0, 500.0)
    allreduce = next(e for e in events if e["name"] == "allreduce")
    assert allreduce["args"] == {"step": 1, "bytes": 4}


def test_a_step_that_is_told_after_its_parts_still_comes_before_them() -> None:
    trace = Trace(START, 1000)
    parts = step_spans(1, 0)
    trace.handle(0, message(parts[:2]))
    trace.handle(0, message(parts[2:]))
    assert next(event["name"] for event in events_of(trace) if event["ph"] == "X") == "step"


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 80)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_collectives_that_overlap_get_lanes(pieces: list[tuple[int, int]]) -> None:
    spans = sorted(
        ([COMMUNICATION, "allreduce", b, d, None, {"bytes": 1}] for b, d in pieces),
        key=lambda span: span[2] + span[3],
    )
    trace = Trace(START, 1000)
    if spans:
        trace.handle(0, message(spans))
    events = [event for event in events_of(trace) if event["ph"] == "X"]
    assert len(events) == len(pieces)
    by_thread: dict[int, float] = {}
    for event in events:  # side by side, not within one another
        assert event["ts"] >= by_thread.get(event["tid"], 0.0)
        by_thread[event["tid"]] = event["ts"] + event["dur"]


def test_marks() -> None:
    trace = Trace(START, 1000)
    row = {"epoch": 2.0, "loss": 0.5}
    told = [
        (-1, {"kind": "run-start", "name": "fit Net", "workers": 2, "plan": {"x": "y"}}),
        (0, {"kind": "epoch", "row": row}),
        (-1, {"kind": "checkpoint", "id": "s1-7", "step": 7, "bytes": 10}),
        (-1, {"kind": "failure", "cause": "c" * 9000, "failed_rank": 1, "host": "b", "step": 7}),
        (-1, {"kind": "failure", "cause": "bare"}),
        (-1, {"kind": "restart", "cause": "c", "from_step": 4, "workers": 1}),
        (-1, {"kind": "run-end", "outcome": "finished", "seconds": 3.0}),
    ]
    for number, (rank, event) in enumerate(told):
        assert trace.handle(rank, {**event, "time": START + number})
    assert not trace.handle(0, {"kind": "log", "values": {}, "time": START})
    marks = [event for event in events_of(trace) if event["ph"] == "i"]
    assert [mark["name"] for mark in marks] == [
        "run fit Net starts", "epoch 2 ends", "checkpoint s1-7", "failure", "failure", "restart",
        "run finished",
    ]  # fmt: skip
    assert [mark["ts"] for mark in marks] == [number * 1e6 for number in range(7)]
    assert marks[1]["args"] == row
    assert marks[3]["args"]["failed_rank"] == 1
    assert len(marks[3]["args"]["cause"]) == 2000
    assert trace.about()["outcome"] == "finished"


def test_a_rank_without_an_aligned_clock_goes_by_arrival() -> None:
    trace = Trace(START, 1000)
    wrong = round((START + 5000) * 1e9)  # its clock is 5000 s ahead
    trace.handle(0, message(step_spans(1, 0), uncertainty=None, origin=wrong))
    trace.handle(0, message(step_spans(2, 600), uncertainty=None, origin=wrong))
    steps = [event for event in events_of(trace) if event["name"] == "step"]
    assert steps[0]["ts"] == pytest.approx(1e6 - 500, abs=1), "it ends as its message comes"
    assert steps[1]["ts"] - steps[0]["ts"] == pytest.approx(600, abs=0.01)


def test_a_long_run_is_thinned_to_whole_steps() -> None:
    trace = Trace(START, 1000)
    for step in range(1, 5001):
        for rank in (0, 1):
            trace.handle(rank, message(step_spans(step, step * 1000.0 + rank)))
        if step % 100 == 0:
            trace.handle(0, {"kind": "epoch", "row": {"epoch": step / 100}, "time": START + step})
    events = events_of(trace)
    assert 500 < len(events) <= 1100
    parts: dict[int, int] = {}
    for event in events:
        if event["ph"] == "X":
            parts[event["args"]["step"]] = parts.get(event["args"]["step"], 0) + 1
    assert set(parts.values()) == {14}, "every step is there on both ranks, with all of its parts"
    kept = sorted(parts)
    assert kept[:8] == list(range(1, 9))
    assert kept[-8:] == list(range(4993, 5001))
    middle = [step for step in kept if 500 < step < 4500]
    gaps = {after - before for before, after in pairwise(middle)}
    assert len(middle) > 3
    assert len(gaps) == 1, "evenly spread"
    assert sum(event["ph"] == "i" for event in events) == 50
    about = trace.about()
    assert about["thinned"] is True
    assert about["events"] + about["events dropped"] == 5000 * 14 + 50
    assert f"multiple of {gaps.pop()}" in about["kept"]


def test_steps_of_a_restarted_run_are_not_mixed_up() -> None:
    events = ThinnedEvents(200)
    for submission in range(3):
        for step in range(100):
            for _ in range(4):
                events.add(
                    (submission * 100.0 + step, 0.0, f"{submission}/{step}"), (submission, step)
                )
    seen: dict[str, int] = {}
    for _, _, text in events.lines():
        seen[text] = seen.get(text, 0) + 1
    assert set(seen.values()) == {4}
    assert {text[0] for text in seen} == {"0", "1", "2"}


@given(st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_whatever_comes_the_number_is_bounded(seed: int) -> None:
    chance = random.Random(seed)
    events = ThinnedEvents(300)
    for number in range(5000):
        kind = chance.random()
        step = (0, chance.randrange(number + 1)) if kind < 0.4 else None
        events.add((float(number), 0.0, "{}"), step, is_mark=kind > 0.8)
    assert len(events.lines()) <= 300
