"""The costs of a run from its trace, and the command that prints them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkdml.cli.main import main
from sparkdml.observe.timeline.summary import ADVICE, Summary, as_text, summarize
from sparkdml.observe.timeline.trace import Trace
from sparkdml.observe.timeline.trace_file import TRAINING, write_trace

START = 1_700_000_000.0
SECOND = 1e6


def spans(*spans: tuple[str, float, float, int | None]) -> dict[str, Any]:
    """Seconds since the run's start, and a duration in seconds."""
    return {
        "kind": "spans",
        "time": START + 1,
        "host": "host",
        "origin": round(START * 1e9),
        "uncertainty": 1.0,
        "every": 1,
        "spans": [[TRAINING, n, b * SECOND, d * SECOND, step, None] for n, b, d, step in spans],
    }


def step(
    number: int, begin: float, feed: float, wait: float
) -> list[tuple[str, float, float, Any]]:
    """A step of one second: what the feed and the others leave is spent in backward."""
    return [
        ("feed wait", begin, feed, number),
        ("backward", begin + feed, 1 - feed - wait, number),
        ("communication", begin + 1 - wait, wait, number),
        ("step", begin, 1.0, number),
    ]


def shares(summary: Summary) -> dict[str, float]:
    return {cost.name: round(cost.share, 3) for cost in summary.costs}


def slow_feed_on_rank_1() -> Trace:
    trace = Trace(START, 10_000)
    for rank, feed, wait in ((0, 0.1, 0.5), (1, 0.5, 0.1)):
        steps = [part for n in range(8) for part in step(n + 1, 1 + n, feed, wait)]
        trace.handle(rank, spans(*steps, ("validation", 9.0, 1.0, None)))
    trace.handle(-1, {"kind": "run-end", "outcome": "finished", "time": START + 10})
    return trace


def events_of(trace: Trace) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trace.lines()]


def test_shares_of_the_wall_time_and_the_worst_rank() -> None:
    summary = summarize(events_of(slow_feed_on_rank_1()))
    assert summary.wall_seconds == pytest.approx(10)
    assert (summary.num_steps, summary.last_step, summary.outcome) == (8, 8, "finished")
    assert shares(summary) == {
        "backward": 0.32,
        "feed wait": 0.24,
        "waiting for the slowest rank": 0.16,
        "start-up": 0.1,
        "validation": 0.1,
        "communication": 0.08,
    }
    costs = {cost.name: cost for cost in summary.costs}
    assert costs["feed wait"].worst_rank == 1
    assert costs["feed wait"].worst_share == pytest.approx(0.4)
    assert costs["feed wait"].seconds == pytest.approx(2.4)
    assert costs["waiting for the slowest rank"].worst_rank == 1, "the one that is waited for"


def test_a_thinned_trace_has_the_same_shares() -> None:
    whole = events_of(slow_feed_on_rank_1())
    some = [e for e in whole if e.get("args", {}).get("step") not in (2, 3, 4, 6, 7)]
    assert len(some) < len(whole)
    assert shares(summarize(some)) == shares(summarize(whole))


def test_a_step_that_did_not_end_and_the_time_between_restarts() -> None:
    trace = Trace(START, 10_000)
    trace.handle(0, spans(*step(1, 1, 0.5, 0.0), ("feed wait", 2.0, 0.5, 2)))
    trace.handle(-1, {"kind": "failure", "cause": "killed", "time": START + 3})
    trace.handle(-1, {"kind": "restart", "cause": "killed", "time": START + 4})
    trace.handle(0, spans(*step(1, 5.5, 0.5, 0.0), *step(2, 6.5, 0.5, 0.0)))
    summary = summarize(events_of(trace))
    assert (summary.num_failures, summary.num_restarts) == (1, 1)
    assert summary.outcome == "unfinished"
    assert summary.num_steps == 3, "step 1 was taken twice"
    assert shares(summary) == {
        "restarts": round(3 / 7.5, 3),
        "start-up": round(1 / 7.5, 3),
        "feed wait": round(1.75 / 7.5, 3),
        "backward": round(1.75 / 7.5, 3),
    }


def test_own_spans_in_a_step_are_not_counted_twice() -> None:
    trace = Trace(START, 10_000)
    trace.handle(0, spans(*step(1, 0, 0.5, 0.0), ("mine", 0.6, 0.2, 1)))
    assert shares(summarize(events_of(trace))) == {"feed wait": 0.5, "backward": 0.5}


def test_an_empty_trace() -> None:
    summary = summarize([])
    assert summary.costs == []
    assert "No rank has recorded a span" in as_text(summary, "x.json")


def test_the_text_names_the_costs_the_ranks_and_what_to_do() -> None:
    text = as_text(summarize(events_of(slow_feed_on_rank_1())), "run.json")
    lines = text.splitlines()
    assert lines[0] == "run.json: 2 ranks, 10.0 s, up to step 8 (8 in the trace), finished"
    assert lines[2] == "1.  32.0%  backward (3.20 s per rank; most on rank 0 on host: 32.0%)"
    assert "2.  24.0%  feed wait (2.40 s per rank; most on rank 1 on host: 40.0%)" in lines
    assert (
        "3.  16.0%  waiting for the slowest rank (1.60 s per rank; the slowest is rank 1 on host)"
        in lines
    )
    assert "communication" not in text, "only the five largest"
    assert ADVICE["feed wait"][:40] in text
    assert max(map(len, lines)) <= 100


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, path = slow_feed_on_rank_1(), tmp_path / "run.json"
    write_trace(path, trace.lines(), trace.about())
    assert main(["timeline", str(path), "--top", "1"]) == 0
    said = capsys.readouterr().out
    assert "1.  32.0%  backward" in said
    assert "feed wait" not in said
    assert main(["timeline", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["costs"][1]["name"] == "feed wait"


def test_the_command_reads_what_was_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, path = slow_feed_on_rank_1(), tmp_path / "run.json"
    write_trace(path, trace.lines(), trace.about())
    path.write_text(path.read_text()[:-400])
    assert main(["timeline", str(path)]) == 0
    said = capsys.readouterr().out
    assert "the file is truncated" in said
    assert "backward" in said


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "must be a trace written by sparkdml"),
        ("nothing", "must be a trace: JSON"),
        (None, "No such file"),
    ],
)
def test_the_command_refuses_other_files(
    text: str | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    assert main(["timeline", str(path)]) == 1
    assert complaint in capsys.readouterr().err
