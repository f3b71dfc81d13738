"""A training run as its strategy sees it: epochs to loop over, and what happens at their ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sparkdml.checkpoint.checkpointer import Checkpointer
from sparkdml.checkpoint.fingerprint import describe
from sparkdml.checkpoint.manifest import Kind
from sparkdml.checkpoint.state import Entry, State
from sparkdml.errors import CheckpointError, DataError
from sparkdml.feed.position import nothing_read, owned
from sparkdml.observe.step_clock import StepClock
from sparkdml.runtime.context import Context
from sparkdml.runtime.randomness import random_state, restore_random_state, seed_rank
from sparkdml.training.buffers import merge_buffers
from sparkdml.training.callbacks import Callback
from sparkdml.training.epoch import Epoch
from sparkdml.training.reports import Reports
from sparkdml.training.task import Task, Totals

if TYPE_CHECKING:
    from sparkdml.strategies.base import Strategy


@dataclass(frozen=True)
class Schedule:
    """How long to train, and on how many rows at once."""

    epochs: int
    batch_size: int
    accumulate: int = 1  # batches whose gradients are added up before a step
    shuffle: bool = True
    validates: bool = False
    stop_at_step: int | None = None  # a replay ends there, in the middle of an epoch if need be


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
    stopped: str | None = None
    losses: list[float] = field(default_factory=list)  # of each step, where a replay wants them
    clock: StepClock = field(default_factory=StepClock)

    def __post_init__(self) -> None:
        self.reports = Reports(self.ctx, self.clock)
        self.spans = self.task.spans = self.ctx.spans
        self.epoch: Epoch | None = None  # the one that is being trained
        # Those that override it: a call for each step is not free.
        self.step_callbacks = [
            callback
            for callback in self.callbacks
            if type(callback).on_step_end is not Callback.on_step_end
        ]
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
    def rows_a_step(self) -> int:
        """This rank's share of the global batch."""
        share, rest = divmod(self.global_batch, self.ctx.size)
        return max(1, share + (self.ctx.rank < rest))

    @property
    def rows_an_epoch(self) -> int | None:
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
            yield epoch
            if self.is_replayed:
                return
            self._close(epoch)
            epoch = Epoch(self, epoch.number + 1)
            is_last = epoch.number == self.schedule.epochs or self.stopped is not None
            checkpoint = None if is_last else self.checkpoint  # the end has one of its own
            if checkpoint is not None and checkpoint.due_after_epoch(epoch.number):
                self.save(epoch, "epoch")
        self._finish(epoch)

    def stop(self, reason: str) -> None:
        """End the run after this epoch. Call it on every rank, or on none."""
        self.stopped = reason

    # -- checkpoints ----------------------------------------------------------------------------

    def save(self, epoch: Epoch, kind: Kind) -> None:
        """Take a checkpoint. Every rank does, after the same step."""
        assert self.checkpoint is not None
        self._save(self.state(epoch), epoch, kind)

    def _save(self, state: State, epoch: Epoch, kind: Kind) -> None:
        assert self.checkpoint is not None
        own_rows = int(epoch.own_rows - epoch.rows_before)

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
        assert self.strategy is not None
        rank_rows = float(epoch.own_rows)
        return {
            **self.task.state(),
            **{f"strategy.{name}": entry for name, entry in self.strategy.state().items()},
            "buffers": Entry(dict(self.task.module.named_buffers()), "mean", rank_rows),
            "random": Entry(random_state(self.ctx.device), "reset"),
            "own_rows": Entry(rank_rows, "mean"),
            "callbacks": Entry([callback.state() for callback in self.callbacks]),
            "progress": Entry(
                {
                    "step": self.step,
                    "history": self.history,
                    "stopped": self.stopped,
                    "output_shape": self.task.forward.output_shape,
                    "epoch": epoch.state(),
                }
            ),
        }

    def _begin(self) -> Epoch:
        """The epoch to go on with: the first one, or the one that a checkpoint was taken in."""
        if self.checkpoint is not None:
            _ = self.ctx.data  # opened first: rows that are not the run's are refused here
        state = None if self.checkpoint is None else self.checkpoint.load_entries()
        if state is None:
            seed_rank(self.ctx.seed, self.ctx.rank)
            epoch = Epoch(self, 0)
            if self.checkpoint is not None:
                self.save(epoch, "root")
            return epoch
        return self._load({name: entry.value for name, entry in state.items()})

    def _load(self, state: dict[str, Any]) -> Epoch:
        assert self.strategy is not None
        self.task.load(state)
        prefix = "strategy."
        self.strategy.load(
            {name.removeprefix(prefix): v for name, v in state.items() if name.startswith(prefix)}
        )
        with torch.no_grad():
            for name, buffer in self.task.module.named_buffers():
                buffer.copy_(state["buffers"][name])
        if len(self.callbacks) != len(state["callbacks"]):
            raise CheckpointError(
                f"the checkpoint has the state of {len(state['callbacks'])} callbacks, and there "
                f"are {len(self.callbacks)}: give the same ones, or use a new path"
            )
        for callback, saved in zip(self.callbacks, state["callbacks"], strict=True):
            callback.load(saved)
        progress = state["progress"]
        self.step, self.history = progress["step"], progress["history"]
        self.stopped = progress["stopped"]
        self.ctx.reached(self.step)
        if "random" in state:
            restore_random_state(state["random"], self.ctx.device)
        else:
            seed_rank(self.ctx.seed, self.ctx.rank, self.step)
        self.task.forward.output_shape = progress["output_shape"]
        position = owned(state["position"], self.ctx.rank, self.ctx.size)
        return Epoch.load(self, progress["epoch"], position, state["own_rows"])

    def _finish(self, epoch: Epoch) -> None:
        state = None
        if self.checkpoint is not None and self.checkpoint.writes:
            state = self.state(epoch)
            if self.callbacks:
                state = _frozen(state)  # callbacks may now put other weights into the module
        self.reports.tell_rank()
        for callback in self.callbacks:
            callback.on_run_end(self)
        if state is not None:
            state["result"] = Entry(self.task.module.state_dict())
            self._save(state, epoch, "final")
            assert self.checkpoint is not None
            self.checkpoint.wait()

    # -- the end of an epoch --------------------------------------------------------------------

    def _close(self, epoch: Epoch) -> None:
        seconds = epoch.seconds
        self.reports.tell_steps(epoch)
        with self.spans.span("merge buffers"):
            merge_buffers(self.task.module, self.ctx.comm, epoch.own_rows)
        row = {"epoch": float(epoch.number + 1), **epoch.totals.means(self.task.plan.metrics)}
        if self.schedule.validates:
            with self.spans.span("validation"):
                row.update({f"val_{name}": value for name, value in self._validate().items()})
        row["rows"], row["steps"] = epoch.totals.rows, float(epoch.steps)
        row["seconds"], row["rows_per_second"] = seconds, epoch.totals.rows / max(seconds, 1e-9)
        for callback in self.callbacks:
            callback.on_epoch_end(self, row)
        self.history.append(row)
        self.clock.lap("other")
        self.reports.tell_rank()
        if self.ctx.rank == 0:
            self.ctx.event("epoch", row=row)
        self.ctx.flush_events()

    def _validate(self) -> dict[str, float]:
        stats = self.task.forward.evaluate(
            self.ctx.data.validation_batches(self.schedule.batch_size)
        )
        totals = Totals.of(self.ctx.comm.allreduce_(stats).tolist())
        if not totals.rows:
            raise DataError(
                "validation= selected no rows. Use a larger fraction, or a column that is true "
                "for some of them"
            )
        return totals.means(self.task.plan.metrics)


def _frozen(state: State) -> State:
    """The state as it is now, whatever happens to its tensors."""
    return {name: Entry(deepcopy(e.value), e.rule, e.weight) for name, e in state.items()}
