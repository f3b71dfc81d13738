"""The file is a valid trace at all times, whichever process is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from sparkdml.errors import ParameterError
from sparkdml.observe.observers import Observers
from sparkdml.observe.timeline import trace as observer_module
from sparkdml.observe.timeline.trace import Timeline
from sparkdml.observe.timeline.trace_file import TRAINING, find_faults, read_trace, write_trace
from sparkdml.testing.waiting import wait_until


def spans_event(step: int) -> dict[str, Any]:
    now = time.time()
    return {
        "kind": "spans",
        "time": now,
        "host": "h",
        "origin": round(now * 1e9),
        "uncertainty": 1.0,
        "every": 1,
        "spans": [[TRAINING, "step", step * 10.0, 1.0, step, None]],
    }


def check(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    assert find_faults(events) == []
    return events


def test_there_from_the_start_and_whole_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    timeline = Timeline(str(path))
    assert check(path) == []
    for step in range(10):
        timeline.handle(1, spans_event(step))
    timeline.close()
    assert sum(event["name"] == "step" for event in check(path)) == 10
    assert os.listdir(tmp_path) == ["run.json"]
    about = json.loads(path.read_text())["otherData"]
    assert about["outcome"] == "unfinished"
    assert about["clock uncertainty in microseconds"] == {"rank 1": 1.0}


def test_kept_up_to_date_during_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    timeline = Timeline(str(path), write_seconds=0.01)
    timeline.handle(0, spans_event(1))
    wait_until(lambda: check(path), seconds=5)
    assert any(event["name"] == "step" for event in check(path))
    timeline.close()


@pytest.mark.parametrize(
    "pause",
    [pytest.param(0.05, marks=pytest.mark.slow), 0.4, pytest.param(0.9, marks=pytest.mark.slow)],
)
def test_a_killed_driver_leaves_a_valid_trace(tmp_path: Path, pause: float) -> None:
    path = tmp_path / "run.json"
    script = textwrap.dedent(
        f"""
        import sys, time
        from sparkdml.observe.timeline.trace import Timeline
        timeline = Timeline({str(path)!r}, write_seconds=0.001)
        step = 0
        print("ready", flush=True)
        while True:
            step += 1
            now = time.time()
            spans = [[1, "step", i * 10.0, 10.0, step * 100 + i, None] for i in range(100)]
            timeline.handle(0, {{"kind": "spans", "time": now, "host": "h", "uncertainty": 1.0,
                "origin": round(now * 1e9), "every": 1, "spans": spans}})
            time.sleep(0.002)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for _ in range(20):
        time.sleep(pause / 20)
        check(path)  # a reader at any moment
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    events = check(path)
    assert pause < 0.4 or sum(event["name"] == "step" for event in events) > 1000


def test_a_large_file_is_written_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = []

    def slow_write(*args: Any) -> None:
        writes.append(time.monotonic())
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    monkeypatch.setattr(observer_module, "write_trace", slow_write)
    timeline = Timeline(str(tmp_path / "run.json"), write_seconds=0.001)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        timeline.handle(0, spans_event(1))
        time.sleep(0.005)
    timeline.close()
    assert len(writes) <= 4, "the first, at most two in a second, the last"


def test_a_disk_that_fails_costs_the_timeline_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = Timeline(str(tmp_path / "run.json"), write_seconds=0.001)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(observer_module, "write_trace", full)
    observers = Observers([timeline], run="r")
    timeline.handle(0, spans_event(1))
    wait_until(lambda: timeline._error is not None, seconds=5)

    def go_on() -> None:
        observers.handle(0, spans_event(2))
        observers.handle(0, spans_event(3))  # the observer takes it no longer
        observers.close()

    with pytest.warns(UserWarning, match=r"observer Timeline failed.*No space left") as caught:
        go_on()
    assert len(caught) == 1


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_trace(path, ['{"a": 1}'], {})

    def lines() -> Any:
        yield '{"b": 1}'
        raise OSError("unplugged")

    with pytest.raises(OSError, match="unplugged"):
        write_trace(path, lines(), {})
    assert read_trace(str(path)).events == [{"a": 1}]
    assert os.listdir(tmp_path) == ["run.json"]


@pytest.mark.parametrize("path", ["s3://bucket/run.json", ".", "no/such/folder/run.json"])
def test_places_that_cannot_be_written_are_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParameterError, match="timeline must be a"):
        Timeline(path)


@pytest.mark.parametrize(
    ("text", "number", "is_cut"),
    [
        ('{"traceEvents": [{"a": 1}]}', 1, False),
        ('[{"a": 1}, {"b": 2}]', 2, False),
        ("[", 0, True),
        ('[\n{"a": 1},\n{"b": 2},', 2, True),
        ('[\n{"a": 1},\n{"b": ', 1, True),
        ('{"otherData": {}, "traceEvents": [{"a": 1}, {"b', 1, True),
    ],
)
def test_files_that_were_cut_off_can_be_read(
    text: str, number: int, is_cut: bool, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    trace = read_trace(str(path))
    assert (len(trace.events), trace.is_cut) == (number, is_cut)


@pytest.mark.parametrize("text", ["", "loss 0.5", "{}", "3", "[1, 2]"])
def test_files_that_are_no_traces_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ParameterError, match="path must be a trace"):
        read_trace(str(path))
