"""Horovod's own timeline: read while it is written, and taken from a real Horovod."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from sparkdml.comm.backends import horovod_available
from sparkdml.comm.base import World
from sparkdml.observe.timeline.horovod import HorovodReader, HorovodTimeline
from sparkdml.observe.timeline.trace_file import HOROVOD
from sparkdml.testing.rank_processes import RankProcesses


def horovod_file(start_micros: int) -> str:
    """As Horovod writes: several events on a line, a bracket that never closes."""

    def name(pid: int, **args: Any) -> dict[str, Any]:
        return {"name": "process_name", "ph": "M", "pid": pid, "args": args}

    events = [
        name(0, start_time_since_epoch_in_micros=start_micros),
        name(1, name="allreduce.bucket.0"),
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 100, "pid": 1},
        {"ph": "X", "name": "1", "ts": 110, "pid": 1, "dur": 0},
        {"ph": "X", "name": "0", "ts": 190, "pid": 1, "dur": 0},
        {"ph": "E", "ts": 200, "pid": 1},
        {"ph": "B", "name": "ALLREDUCE", "ts": 210, "pid": 1},
        {"ph": "B", "name": "MEMCPY_IN_FUSION_BUFFER", "ts": 211, "pid": 1},
        {"ph": "E", "ts": 220, "pid": 1},
        {"ph": "B", "name": "GLOO_ALLREDUCE", "ts": 221, "pid": 1},
        {"ph": "E", "ts": 300, "pid": 1},
        {"ph": "E", "ts": 301, "pid": 1, "args": {"dtype": "float32", "shape": "[10]"}},
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 400, "pid": 1},
    ]
    return "[\n" + ",\n".join(map(json.dumps, events)) + ","


@pytest.mark.parametrize("piece_bytes", [1, 7, 10_000])
def test_pieces_of_a_growing_file(piece_bytes: int) -> None:
    start = time.time_ns() // 1000 * 1000
    counter = time.perf_counter_ns() - (time.time_ns() - start)
    reader, spans = HorovodReader(), []
    text = horovod_file(start // 1000).encode()
    for place in range(0, len(text), piece_bytes):
        spans += reader.read(text[place : place + piece_bytes])
    tensor = {"tensor": "allreduce.bucket.0"}
    told = [(track, name, end - begin, step, args) for track, name, begin, end, step, args in spans]
    assert told == [
        (HOROVOD, "NEGOTIATE_ALLREDUCE", 100_000, None, {**tensor, "last rank": "0"}),
        (HOROVOD, "MEMCPY_IN_FUSION_BUFFER", 9_000, None, tensor),
        (HOROVOD, "GLOO_ALLREDUCE", 79_000, None, tensor),
    ]
    assert spans[0][2] - counter == pytest.approx(100_000, abs=50_000_000)


def test_a_closing_bracket_that_is_overwritten_later() -> None:
    whole = horovod_file(1_700_000_000_000_000).encode()
    cut = whole.index(b"},", whole.index(b'"ts": 190')) + 1
    reader = HorovodReader()
    spans = reader.read(whole[:cut] + b"]") + reader.read(whole[cut + 1 :])
    assert len(spans) == 3


@pytest.mark.parametrize("text", ["", "[", "[\n", "[]", "[\n{", "]"])
def test_files_without_an_event(text: str) -> None:
    assert HorovodReader().read(text.encode()) == []


def test_a_users_own_file_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_TIMELINE", raising=False)
    assert HorovodTimeline.is_possible("horovod")
    assert not HorovodTimeline.is_possible("torch")
    monkeypatch.setenv("HOROVOD_TIMELINE", "mine.json")
    assert not HorovodTimeline.is_possible("horovod")


def reduce_under_a_timeline(world: World) -> tuple[list[Any], tuple[int, int], str]:
    import torch

    from sparkdml.comm.backends import open_communicator
    from sparkdml.comm.environment import temporary_environment

    timeline = HorovodTimeline()
    with temporary_environment(timeline.ENVIRONMENT):
        comm = open_communicator("horovod", world)
    with comm:
        if world.rank == 0:
            timeline.start()
        spans = wait_until_it_records(timeline, comm)
        begin = time.perf_counter_ns()
        for _ in range(10):
            comm.allreduce_(torch.ones(1000))
        end = time.perf_counter_ns()
        deadline = time.monotonic() + 20
        while world.rank == 0 and len(of_a_thousand(spans)) < 20 and time.monotonic() < deadline:
            spans += timeline.take()
            time.sleep(0.02)
        folder = str(timeline._path.parent)
        timeline.close()
        timeline.close()
        comm.allreduce_(torch.ones(1))  # Horovod continues without it
    return of_a_thousand(spans), (begin, end), folder


def wait_until_it_records(timeline: HorovodTimeline, comm: Any) -> list[Any]:
    """Horovod begins to record in one of its next cycles: what is reduced until then is missed."""
    import torch

    spans: list[Any] = []
    deadline = time.monotonic() + 20
    while True:
        spans += timeline.take()
        waits = comm.rank == 0 and not spans and time.monotonic() < deadline
        if not comm.allreduce_(torch.tensor([float(waits)])).item():
            return spans
        time.sleep(0.02)


def of_a_thousand(spans: list[Any]) -> list[Any]:
    """Those of the tensors that the test is about, by the number of elements in their names."""
    return [span for span in spans if ".1000." in span[-1]["tensor"]]


@pytest.mark.skipif(not horovod_available(), reason="Horovod is not installed")
def test_a_real_horovod() -> None:
    with RankProcesses(None, 2) as processes:
        (spans, (begin, end), folder), (none, _, _) = processes.run(reduce_under_a_timeline)
    names = [name for _, name, *_ in spans]
    assert names.count("NEGOTIATE_ALLREDUCE") == 10
    assert names.count("GLOO_ALLREDUCE") == 10
    assert {args["last rank"] for *_, args in spans if "last rank" in args} <= {"0", "1"}
    slack = 50_000_000
    assert all(begin - slack <= span[2] <= span[3] <= end + slack for span in spans)
    assert none == []
    assert not Path(folder).exists()
    assert "HOROVOD_TIMELINE" not in os.environ
