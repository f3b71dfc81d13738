"""A worker's reports of its training: its progress, and where its time goes.

Runs in the worker, on the loop's thread. A clock adds up the laps between the parts of a step;
events go to the driver a few times a second at most, however short the steps are.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sparkdml.runtime.worker.context import Context
    from sparkdml.training.epoch_progress import EpochProgress


Part = Literal["data", "compute", "communication", "checkpoint", "other"]
PARTS: tuple[Part, ...] = ("data", "compute", "communication", "checkpoint", "other")


class StepClock:
    """A stopwatch that never stops: each lap belongs to what has just been done."""

    def __init__(self) -> None:
        self._seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._mark = time.perf_counter()

    def lap(self, part: Part) -> None:
        now = time.perf_counter()
        self._seconds[part] += now - self._mark
        self._mark = now

    def take(self) -> dict[Part, float]:
        """The seconds of each part since the last call."""
        taken = self._seconds
        self._seconds = dict.fromkeys(PARTS, 0.0)
        return taken


STEPS_SECONDS = 0.25  # between two words of rank 0 on how far the run is
RANK_SECONDS = 1.0  # between two words of each rank on where its time went
MAX_LOSSES = 50  # in one event


class Reports:
    """Collects from step to step; sends little."""

    def __init__(self, ctx: Context, clock: StepClock) -> None:
        self._ctx, self._clock = ctx, clock
        self._losses: list[tuple[int, float]] = []  # since they were last told
        self._steps = self._rows = 0
        self._reported_steps = self._reported_rank = time.monotonic()

    def count(self, step: int, loss: float) -> None:
        """A step's agreed loss."""
        if self._ctx.rank == 0:
            self._losses.append((step, loss))

    def tick(self, epoch: EpochProgress, own_rows: int) -> None:
        """Record a finished step and this rank's number of rows."""
        self._steps += 1
        self._rows += own_rows
        now = time.monotonic()
        if now - self._reported_steps > STEPS_SECONDS:
            self._reported_steps = now
            self.report_steps(epoch)
        if now - self._reported_rank > RANK_SECONDS:
            self._reported_rank = now
            self.report_rank()

    def report_steps(self, epoch: EpochProgress) -> None:
        if not self._losses:
            return
        stride = -(-len(self._losses) // MAX_LOSSES)
        losses = self._losses[::-stride][::-1]  # the last one is always among them
        self._losses = []
        self._ctx.event(
            "steps",
            epoch=epoch.number + 1,
            step=losses[-1][0],
            losses=losses,
            rows=epoch.totals.rows,
            of=self.rows_per_epoch,
            loss=epoch.totals.mean_loss,
        )

    @property
    def rows_per_epoch(self) -> int | None:
        """How many rows all ranks train on, where Spark has counted them."""
        facts = self._ctx.facts
        return None if facts is None else facts["num_rows"] - facts["num_validation_rows"]

    def report_rank(self) -> None:
        num_bytes, messages = self._ctx.traffic.take()
        self._ctx.event(
            "rank",
            steps=self._steps,
            rows=self._rows,
            host=self._ctx.host,
            seconds=self._clock.take(),
            bytes=num_bytes,
            messages=messages,
        )
        self._steps = self._rows = 0
