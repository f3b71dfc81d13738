"""The timeline of real workers: one clock for all, and a valid trace when a worker is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sparkdml as dml
from sparkdml.comm.backends import horovod_available
from sparkdml.errors import WorkerLost
from sparkdml.observe.observers import Observers
from sparkdml.observe.timeline.trace import Timeline
from sparkdml.observe.timeline.trace_file import find_faults

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def work(ctx: Any, num_steps: int, killed_after: int | None) -> None:
    """Some steps of a loop that is traced by hand."""
    import torch

    from sparkdml.runtime.worker.tracing import open_traced, start_recorder

    spans = start_recorder(ctx.world, ctx._client)
    with open_traced(spans, ctx.plan.backend, ctx.world) as comm:
        comm.barrier()
        for number in range(1, num_steps + 1):
            spans.start_step(number)
            time.sleep(0.03 if ctx.rank == 1 else 0.0)  # the slow one
            spans.lap("feed wait")
            works = [comm.allreduce_async_(torch.ones(1000)) for _ in range(3)]
            spans.lap("backward")
            for under_way in works:
                under_way.wait()
            spans.lap("communication")
            spans.end_step()
            if ctx.rank == 1 and number == killed_after:
                time.sleep(1.0)
                os.kill(os.getpid(), signal.SIGKILL)
        spans.close()


def run_traced(
    spark: SparkSession, path: Path, backend: str, num_steps: int, killed_after: int | None
) -> None:
    observers = Observers([Timeline(str(path))], run="r")
    try:
        dml.run(
            lambda ctx: work(ctx, num_steps, killed_after),
            num_workers=2,
            backend=backend,
            on_event=observers.handle,
            spark=spark,
        )
    finally:
        observers.close()


def read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    assert find_faults(events) == []
    return events


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_ranks_are_on_one_clock(spark: SparkSession, tmp_path: Path, backend: str) -> None:
    path = tmp_path / "run.json"
    run_traced(spark, path, backend, num_steps=20, killed_after=None)
    events = read(path)
    ends = {
        (e["pid"], e["args"]["step"]): e["ts"] + e["dur"]
        for e in events
        if e["name"] == "communication"
    }
    assert len(ends) == 40
    # An allreduce ends on both ranks at nearly the same time, however long each has waited.
    apart = sorted(abs(ends[0, step] - ends[1, step]) for step in range(1, 21))
    assert apart[10] < 15_000, "microseconds, in the middle of twenty; a step takes 30,000"
    waits = [e["dur"] for e in events if e["name"] == "communication" and e["pid"] == 0]
    assert sorted(waits)[10] > 15_000, "rank 0 waits for rank 1"
    reduced = [e for e in events if e["name"] == "allreduce" and "step" in e["args"]]
    assert len(reduced) == 2 * 20 * 3
    assert {e["args"]["bytes"] for e in reduced} == {4000}
    about = json.loads(path.read_text())["otherData"]
    assert set(about["clock uncertainty in microseconds"]) == {"rank 0", "rank 1"}
    has_horovod = any(e["name"].startswith("NEGOTIATE") for e in events)
    assert has_horovod == (backend == "auto" and horovod_available())


def test_a_killed_worker_is_in_the_trace_until_its_end(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(WorkerLost):
        run_traced(spark, path, "torch", num_steps=1000, killed_after=5)
    events = read(path)
    steps = {e["args"]["step"] for e in events if e["name"] == "step" and e["pid"] == 1}
    assert steps == {1, 2, 3, 4, 5}
    (failure,) = [e for e in events if e["ph"] == "i" and e["cat"] == "failure"]
    assert "rank 1" in failure["args"]["cause"]
    assert failure["ts"] > max(e["ts"] for e in events if e["ph"] == "X" and e["pid"] == 1)
