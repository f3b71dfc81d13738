"""A training run as its strategy sees it: epochs to loop over, and what happens at their ends."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import NoReturn

import torch

from sparkdml.errors import DataError, NonFiniteLoss
from sparkdml.feed.batch import Batch
from sparkdml.runtime.context import Context
from sparkdml.training.buffers import merge_buffers
from sparkdml.training.callbacks import Callback
from sparkdml.training.task import Task, Totals

PROGRESS_SECONDS = 0.25


@dataclass(frozen=True)
class Schedule:
    """How long to train, and on how many rows at once."""

    epochs: int
    batch_size: int
    accumulate: int = 1  # batches whose gradients are added up before a step
    shuffle: bool = True
    validates: bool = False


@dataclass
class Training:
    """One rank's view of a run. `epochs()` is what a strategy loops over."""

    ctx: Context
    task: Task
    schedule: Schedule
    callbacks: Sequence[Callback] = ()
    history: list[dict[str, float]] = field(default_factory=list)
    step: int = 0  # optimizer steps so far
    first_step_time: float = 0.0
    stopped: str | None = None

    def epochs(self) -> Iterator[Epoch]:
        """Epoch after epoch; validation, history and callbacks come as each one ends."""
        for callback in self.callbacks:
            callback.on_run_start(self)
        for number in range(self.schedule.epochs):
            epoch = Epoch(self, number)
            yield epoch
            self._close(epoch)
            if self.stopped is not None:
                break
        for callback in self.callbacks:
            callback.on_run_end(self)

    @property
    def rows_an_epoch(self) -> int | None:
        """How many rows all ranks train on, where Spark has counted them."""
        facts = self.ctx.facts
        return None if facts is None else facts["num_rows"] - facts["num_validation_rows"]

    def stop(self, reason: str) -> None:
        """End the run after this epoch. Call it on every rank, or on none."""
        self.stopped = reason

    def _close(self, epoch: Epoch) -> None:
        seconds = time.perf_counter() - epoch.started
        merge_buffers(self.task.module, self.ctx.comm, epoch.own_rows)
        row = {"epoch": float(epoch.number + 1), **epoch.totals.means(self.task.plan.metrics)}
        if self.schedule.validates:
            row.update({f"val_{name}": value for name, value in self._validate().items()})
        row["rows"], row["steps"] = epoch.totals.rows, float(epoch.steps)
        row["seconds"], row["rows_per_second"] = seconds, epoch.totals.rows / max(seconds, 1e-9)
        for callback in self.callbacks:
            callback.on_epoch_end(self, row)
        self.history.append(row)
        if self.ctx.rank == 0:
            self.ctx.event("epoch", row=row)
            self.ctx.flush_events()

    def _validate(self) -> dict[str, float]:
        stats = self.task.forward.evaluate(
            self.ctx.data.validation_batches(self.schedule.batch_size)
        )
        totals = Totals.of(self.ctx.comm.allreduce_(stats))
        if not totals.rows:
            raise DataError(
                "validation= selected no rows. Use a larger fraction, or a column that is true "
                "for some of them"
            )
        return totals.means(self.task.plan.metrics)


class Epoch:
    """One pass over the data. Iterate over it for batches; it never ends by itself."""

    def __init__(self, training: Training, number: int) -> None:
        self._training = training
        self.number = number
        self.totals = Totals()
        self.steps = 0
        self.own_rows = 0
        self.started = time.perf_counter()
        self._reported = 0.0

    def __iter__(self) -> Iterator[Batch]:
        """This rank's batches, then empty ones: other ranks may have more."""
        schedule = self._training.schedule
        rows_a_step = schedule.batch_size * schedule.accumulate
        own = self._training.ctx.feed(rows_a_step, self.number, schedule.shuffle)
        for batch in chain(own, repeat(Batch.empty())):
            self.own_rows += batch.num_rows
            yield batch

    def count(self, totals: Totals) -> bool:
        """Account for the agreed totals of a step; False when no rank had a row: it is over."""
        if not totals.rows:
            return False
        if not math.isfinite(totals.loss):
            self._not_finite(totals.loss)
        self.totals += totals
        self.steps += 1
        return True

    def tick(self) -> None:
        """A step is done."""
        training = self._training
        training.step += 1
        now = time.time()
        if training.step == 1:
            training.first_step_time = now
        if training.ctx.rank == 0 and now - self._reported > PROGRESS_SECONDS:
            self._reported = now
            training.ctx.event(
                "progress",
                epoch=self.number + 1,
                step=training.step,
                rows=self.totals.rows,
                of=training.rows_an_epoch,
                loss=self.totals.loss / max(self.totals.weight, 1e-30),
            )

    def _not_finite(self, loss: float) -> NoReturn:
        """Every rank sees the same total, so every rank asks whose it is, and says the same."""
        training = self._training
        own = training.task.forward.last_loss
        mine = torch.tensor([0.0 if own is None else float(own)], device=training.ctx.device)
        losses = torch.cat(training.ctx.comm.allgather(mine)).tolist()
        rank = next((r for r, value in enumerate(losses) if not math.isfinite(value)), 0)
        raise NonFiniteLoss(loss, self.number + 1, training.step + 1, rank)
