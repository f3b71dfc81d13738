"""A training run as its strategy sees it: epochs to loop over, and what happens at their ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparkdml.checkpoint.checkpointer import Checkpointer
from sparkdml.checkpoint.fingerprint import describe
from sparkdml.checkpoint.manifest import Kind
from sparkdml.checkpoint.state import Entry, State
from sparkdml.feed.position import nothing_read
from sparkdml.feed.randomness import seed_rank
from sparkdml.runtime.worker.context import Context
from sparkdml.training.callbacks.base import Callback, overriding
from sparkdml.training.epoch import Epoch
from sparkdml.training.epoch_row import make_row
from sparkdml.training.plan import Schedule as Schedule
from sparkdml.training.reports import Reports, StepClock
from sparkdml.training.run_state import frozen, load_state, take_state
from sparkdml.training.step_function import StepContext
from sparkdml.training.sync_batch_norm import BatchNormGroup
from sparkdml.training.task import Task

if TYPE_CHECKING:
    from sparkdml.strategies.base import Strategy
    from sparkdml.training.contribution import Contribution


@dataclass
class Training:
    """One rank's view of a run. `epochs()` is what a strategy loops over."""

    ctx: Context
    task: Task
    schedule: Schedule
    callbacks: Sequence[Callback] = ()
    strategy: Strategy | None = None
    history: list[dict[str, float]] = field(default_factory=list)
    step: int = 0  # optimizer steps so far
    first_step_time: float = 0.0
    stopped: str | None = None  # why it ends before its last epoch
    stop_request: str | None = None  # this rank's wish to end it after a step
    is_interrupted: bool = False  # ended after a step that all ranks agreed on
    losses: list[float] = field(default_factory=list)  # of each step, where a replay wants them
    clock: StepClock = field(default_factory=StepClock)

    def __post_init__(self) -> None:
        self.reports = Reports(self.ctx, self.clock)
        self.spans = self.task.spans = self.ctx.spans
        self.epoch: Epoch | None = None  # the one that is being trained
        self.contribution: Contribution | None = None  # of a worker that has trained by itself
        self.first_epoch: Epoch | None = None  # to begin with, where a strategy knows that
        self._last_saved: int | None = None  # the step of the last checkpoint, if of its kind
        self.step_callbacks: list[Callback] = overriding(self.callbacks, "on_step_end")
        self.step_start_callbacks: list[Callback] = overriding(self.callbacks, "on_step_start")
        for callback in overriding(self.callbacks, "on_gradient"):
            self.task.on_agreed.append(partial(callback.on_gradient, self))
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
        """Only by force."""
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

    @property
    def rows_per_epoch(self) -> int | None:
        """How many rows all ranks train on, where Spark has counted them."""
        facts = self.ctx.facts
        return None if facts is None else facts["num_rows"] - facts["num_validation_rows"]

    @property
    def is_replayed(self) -> bool:
        """Whether the step is reached that was asked for."""
        return self.schedule.stop_at_step is not None and self.step >= self.schedule.stop_at_step

    def epochs(self) -> Iterator[Epoch]:
        """Epoch after epoch; validation, history and callbacks come as each one ends."""
        for callback in self.callbacks:
            callback.on_run_start(self)
        epoch = self._begin()
        self.epoch = epoch
        while epoch.number < self.schedule.epochs and self.stopped is None:
            self.epoch = epoch
            if not epoch.steps:
                for callback in self.callbacks:
                    callback.on_epoch_start(self)
            yield epoch
            if self.is_replayed:
                return
            if (
                self.is_interrupted
                and self.checkpoint is not None
                and self._last_saved != self.step
            ):
                self.save(epoch, "step")  # the next fit goes on from here, as after a failure
            self._close(epoch)
            epoch = Epoch(self, epoch.number + 1)
            is_last = epoch.number == self.schedule.epochs or self.stopped is not None
            checkpoint = None if is_last else self.checkpoint  # the end has one of its own
            if checkpoint is not None and checkpoint.due_after_epoch(epoch.number):
                self.save(epoch, "epoch")
        self.finish(epoch)

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
        """One line for whoever watches the run, said once: not by every rank."""
        if self.ctx.rank == 0:
            self.ctx.event("note", text=text)

    def result_state(self) -> dict[str, Tensor]:
        """The module's state as it would be kept now."""
        with self.result_values_in_place():
            state = self.task.module.state_dict()
            return {name: tensor.clone() for name, tensor in state.items()}

    def _gather_bytes(self, own: bytes) -> list[Tensor]:
        mine = torch.tensor(list(own), dtype=torch.uint8, device=self.ctx.device)
        return self.ctx.comm.allgather(mine)

    def _progress(self) -> tuple[int, int]:
        return self.step, 0 if self.epoch is None else self.epoch.number

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

    # -- checkpoints ----------------------------------------------------------------------------

    def save(self, epoch: Epoch, kind: Kind) -> None:
        """Take a checkpoint. Every rank does, after the same step."""
        assert self.checkpoint is not None
        self._last_saved = self.step if kind == "step" else None
        self._save(self.state(epoch), epoch, kind)

    def _save(self, state: State, epoch: Epoch, kind: Kind) -> None:
        assert self.checkpoint is not None
        own_rows = epoch.rows_read

        def position() -> State:
            start = nothing_read() if epoch.start is None else epoch.start
            if not own_rows:
                return {"position": Entry(start, "sum")}
            reached = self.ctx.data.position_after(
                own_rows, epoch.number, self.schedule.shuffle, start
            )
            return {"position": Entry(reached, "sum")}

        with self.spans.span("checkpoint copy", kind=kind):
            self.checkpoint.save(
                self.step,
                state,
                epoch=epoch.number,
                kind=kind,
                metrics=self.history[-1] if self.history else {},
                global_batch=self.global_batch,
                later=position,
            )

    def state(self, epoch: Epoch) -> State:
        """Everything that the next step depends on, but for the position in the data."""
        return take_state(self, epoch)

    def _begin(self) -> Epoch:
        """The epoch to go on with: the first one, or the one that a checkpoint was taken in."""
        if self.first_epoch is not None:
            seed_rank(self.ctx.seed, self.ctx.rank, self.step)
            return self.first_epoch
        if self.checkpoint is not None:
            _ = self.ctx.data  # opened first: rows that are not the run's are refused here
        state = None if self.checkpoint is None else self.checkpoint.load_entries()
        if state is None:
            seed_rank(self.ctx.seed, self.ctx.rank)
            epoch = Epoch(self, 0)
            if self.checkpoint is not None:
                self.save(epoch, "root")
            return epoch
        return load_state(self, {name: entry.value for name, entry in state.items()})

    def finish(self, epoch: Epoch) -> None:
        """The run's end; `epochs()` comes here by itself."""
        state = None
        if self.checkpoint is not None and self.checkpoint.writes and not self.is_interrupted:
            state = self.state(epoch)
            if self.callbacks or self.result_values is not None:
                state = frozen(state)  # the module may be given other weights before it is saved
        self.reports.report_rank()
        if self.result_values is not None:
            self.task.params.values.copy_(self.result_values)
        for callback in self.callbacks:
            callback.on_run_end(self)
        if self.is_interrupted and self.checkpoint is not None:
            self.checkpoint.wait()
        if state is not None:
            state["result"] = Entry(self.task.module.state_dict())
            self._save(state, epoch, "final")
            assert self.checkpoint is not None
            self.checkpoint.wait()

    # -- the end of an epoch --------------------------------------------------------------------

    def _close(self, epoch: Epoch) -> None:
        self.reports.report_steps(epoch)
        row = make_row(self, epoch)
        for callback in self.callbacks:
            callback.on_epoch_end(self, row)
        self.history.append(row)
        self.clock.lap("other")
        self.reports.report_rank()
        if self.ctx.rank == 0:
            self.ctx.event("epoch", row=row)
        self.ctx.flush_events()
