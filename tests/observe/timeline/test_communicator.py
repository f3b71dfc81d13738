"""A traced communicator is a communicator, and tells what it did."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from sparkdml.comm.base import Communicator
from sparkdml.comm.threads import run_threads
from sparkdml.observe.timeline.communicator import TracedCommunicator
from sparkdml.observe.timeline.recorder import SpanRecorder
from sparkdml.observe.timeline.trace_file import COMMUNICATION
from sparkdml.testing.communicator_contract import CommunicatorContract, OnEveryRank


def ignore(*args: Any, **fields: Any) -> None:
    """A link without a peer."""


def traced(comm: Communicator) -> tuple[TracedCommunicator, SpanRecorder]:
    spans = SpanRecorder(comm.size, "h", ignore, ignore, time.time)
    spans._closing.set()  # nothing is sent
    spans._thread.join()
    return TracedCommunicator(comm, spans), spans


class TestTraced(CommunicatorContract):
    @pytest.fixture(params=[1, 3])
    def on_every_rank(self, request: pytest.FixtureRequest) -> OnEveryRank:
        return lambda check: run_threads(
            request.param, lambda comm: check(traced(comm)[0]), timeout_seconds=20
        )


def use_everything(comm: Communicator) -> list[tuple[str, int]]:
    wrapped, spans = traced(comm)
    tensor = torch.ones(6)
    wrapped.allreduce_(tensor)
    wrapped.grouped_allreduce_([tensor, torch.ones(2)])
    wrapped.broadcast_(tensor)
    wrapped.allgather(tensor)
    wrapped.alltoall([torch.ones(3)] * comm.size)
    wrapped.reduce_scatter(tensor)
    wrapped.reduce_(tensor)
    wrapped.gather(tensor)
    wrapped.scatter([tensor] * comm.size if comm.rank == 0 else None)
    wrapped.barrier()
    part = wrapped.split(0)
    part.allreduce_(tensor)
    messages = part.point_to_point
    assert messages is not None
    if comm.rank == 0:
        messages.send(tensor, 1)
        messages.isend(tensor, 1).wait()
    else:
        messages.recv_(tensor, 0)
        messages.irecv_(tensor, 0).wait()
    return [(span[1], (span[5] or {})["bytes"]) for span in spans._spans]


def test_every_collective_is_recorded_with_its_bytes() -> None:
    first, second = run_threads(2, use_everything)
    collectives = [
        ("allreduce", 24),
        ("grouped allreduce", 32),
        ("broadcast", 24),
        ("allgather", 48),
        ("alltoall", 24),
        ("reduce-scatter", 24),
        ("reduce", 24),
    ]
    rest = [("barrier", 0), ("split", 0), ("allreduce", 24)]
    assert first == [
        *collectives, ("gather", 48), ("scatter", 48), *rest, ("send", 24), ("send", 24)
    ]  # fmt: skip
    assert second == [
        *collectives, ("gather", 24), ("scatter", 24), *rest, ("receive", 24), ("receive", 24)
    ]  # fmt: skip


def start_then_wait(comm: Communicator) -> list[Any]:
    wrapped, spans = traced(comm)
    spans.start_step(3)
    works = [wrapped.allreduce_async_(torch.ones(10)) for _ in range(2)]
    assert not spans._spans, "a span is there when it is over"
    time.sleep(0.05)
    for work in works:
        work.wait()
        work.wait()
    return list(spans._spans)


def test_asynchronous_work_lasts_from_its_start_until_it_was_waited_for() -> None:
    for spans in run_threads(2, start_then_wait):
        assert len(spans) == 2, "waiting again is no second span"
        for track, name, begin, end, step, args in spans:
            assert (track, name, step, args) == (COMMUNICATION, "allreduce", 3, {"bytes": 40})
            assert end - begin >= 50_000_000


def pass_over(comm: Communicator) -> tuple[int, Any]:
    wrapped, spans = traced(comm)
    spans._skip_mask = 1
    spans.start_step(1)
    work = wrapped.allreduce_async_(torch.ones(10))
    work.wait()
    wrapped.allgather(torch.ones(2))
    return len(spans._spans), type(work).__name__


def test_steps_that_are_passed_over_pay_nothing_and_leave_nothing() -> None:
    for number, kind in run_threads(2, pass_over):
        assert number == 0
        assert kind != "TracedWork"
