"""One rank's run: how far it is, what it has measured and reports, and the requests to end it.

Lives in a worker for one submission, and belongs to the thread of the strategy's loop; only
`request_stop` may be called from any thread. Callbacks are given it, and epochs count into it; the
loop itself is `Training`, which extends it. A clock adds up the laps between the parts of a step;
events go to the driver a few times a second at most, however short the steps are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from sparkdml.checkpoint.checkpointer import Checkpointer
from sparkdml.checkpoint.fingerprint import describe
from sparkdml.feed.epoch_order import BatchRequest
from sparkdml.runtime.worker.context import Context
from sparkdml.training.contribution import Contribution
from sparkdml.training.plan import Schedule, StepContext
from sparkdml.training.sync_batch_norm import BatchNormGroup
from sparkdml.training.task import Task
from sparkdml.training.totals import EpochProgress

if TYPE_CHECKING:
    from sparkdml.runtime.worker.context import Context
    from sparkdml.training.totals import EpochProgress

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


@dataclass
class TrainingRun:
    """What every part of a worker's training shares.

    Attributes:
        ctx: the worker's: `rank`, `size`, `device`, `comm`, `ask`, `event`.
        task: the model, its gradients and its optimizers.
        schedule: `epochs`, `batch_size`, `accumulate`, `shuffle`, …
        history: a row for each epoch that has ended.
        step: optimizer steps so far.
        epoch: the one that is being trained; its `number` counts from 0.
    """

    ctx: Context
    task: Task
    schedule: Schedule
    history: list[dict[str, float]] = field(default_factory=list)
    step: int = 0
    first_step_time: float = 0.0
    stopped: str | None = None  # why it ends before its last epoch
    stop_request: str | None = None  # this rank's wish to end it after a step
    is_interrupted: bool = False  # ended after a step that all ranks agreed on
    losses: list[float] = field(default_factory=list)  # of each step, where a replay wants them
    clock: StepClock = field(default_factory=StepClock)

    def __post_init__(self) -> None:
        self.reports = Reports(self.ctx, self.clock)
        self.spans = self.task.spans = self.ctx.spans
        self.epoch: EpochProgress | None = None  # the one that is being trained
        self.contribution: Contribution | None = None  # of a worker that has trained by itself
        # Called around each step, in this order.
        self.on_step_start: list[Callable[[], None]] = []
        self.on_step_end: list[Callable[[], None]] = []
        # Parameters that stand in for the trained ones wherever the model is judged or kept.
        self.result_values: Tensor | None = None
        self.task.forward.context = StepContext(self.ctx.device, self.ctx, self._progress)
        self.task.forward.context.training = True
        if self.task.plan.sync_batch_norm and self.ctx.size > 1 and self.ctx.is_training_role:
            self.task.batch_norm_group = BatchNormGroup(
                self.task.module, self.ctx.comm, self.ctx.device
            )
        self.ctx.on_stop_request(self.request_stop)
        resumed = None if self.checkpoint is None else self.checkpoint.resumed
        # The rows of one step stay what they were when the run began, however many workers share
        # them now.
        self.global_batch: int = (
            self.ctx.size * self.schedule.batch_size * self.schedule.accumulate
            if resumed is None or self._batch_was_changed(resumed.plan)
            else resumed.global_batch
        )

    def _batch_was_changed(self, plan: Mapping[str, str]) -> bool:
        """Only with resume="force"."""
        now = {
            "batchSize": describe(self.schedule.batch_size),
            "gradientAccumulation": describe(self.schedule.accumulate),
        }
        return any(plan.get(name) != value for name, value in now.items())

    @property
    def checkpoint(self) -> Checkpointer | None:
        return self.ctx.checkpoint

    @property
    def rows_per_step(self) -> int:
        """This rank's share of the global batch."""
        return self.rows_of(self.ctx.rank)

    def rows_of(self, rank: int) -> int:
        share, rest = divmod(self.global_batch, self.ctx.size)
        return max(1, share + (rank < rest))

    def request(self, epoch: EpochProgress) -> BatchRequest:
        """This rank's own rows of an epoch, a step's share at a time."""
        return BatchRequest(
            self.rows_per_step, epoch.number, self.schedule.shuffle, position=epoch.start
        )

    @property
    def rows_per_epoch(self) -> int | None:
        """How many rows all ranks train on, where Spark has counted them."""
        return self.reports.rows_per_epoch

    @property
    def is_replayed(self) -> bool:
        """Whether the step is reached that was asked for."""
        return self.schedule.stop_at_step is not None and self.step >= self.schedule.stop_at_step

    @contextmanager
    def reading(self) -> Iterator[None]:
        """In the midst of communication: this block's time counts as reading."""
        self.clock.lap("communication")
        self.spans.lap("communication")
        yield
        self.clock.lap("data")
        self.spans.lap("feed wait")

    def stop(self, reason: str) -> None:
        """End the run after this epoch. Call it on every rank, or on none."""
        self.stopped = reason

    def request_stop(self, reason: str) -> None:
        """End the run after a step, the same on every rank. One rank that calls it is enough.

        The epoch that is cut short gets its row in the history. From any thread.
        """
        self.stop_request = reason

    def interrupt(self) -> None:
        """All ranks have seen the request of at least one: each learns the reason, and ends."""
        own = (self.stop_request or "").encode()
        texts = [bytes(text.tolist()).decode() for text in self._gather_bytes(own)]
        self.stopped = next(text for text in texts if text)
        self.is_interrupted = True

    def note(self, text: str) -> None:
        """Send one line to the run's observers: from rank 0 alone, so that it comes once."""
        if self.ctx.rank == 0:
            self.ctx.event("note", text=text)

    def result_state(self) -> dict[str, Tensor]:
        """The module's state as it would be kept now."""
        with self.result_values_in_place():
            state = self.task.module.state_dict()
            return {name: tensor.clone() for name, tensor in state.items()}

    @contextmanager
    def result_values_in_place(self) -> Iterator[None]:
        if self.result_values is None:
            yield
            return
        values = self.task.params.values
        trained = values.clone()
        values.copy_(self.result_values)
        try:
            yield
        finally:
            values.copy_(trained)

    def _gather_bytes(self, own: bytes) -> list[Tensor]:
        mine = torch.tensor(list(own), dtype=torch.uint8, device=self.ctx.device)
        return self.ctx.comm.allgather(mine)

    def _progress(self) -> tuple[int, int]:
        return self.step, 0 if self.epoch is None else self.epoch.number
