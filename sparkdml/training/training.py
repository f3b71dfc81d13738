"""The loop over epochs: where it begins, what happens at each epoch's end, and its checkpoints.

Runs in a worker, on the thread of the strategy, which loops over `Training.epochs`. The strategy
passes itself to that call, and is not kept: data flows from the strategy down, and back as batches
and counted steps. The state that a checkpoint holds of a training refers to live tensors; the
caller copies them if it keeps them, as the checkpointer does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from sparkdml.checkpoint.manifest import Kind
from sparkdml.checkpoint.state import Entry, State
from sparkdml.errors import CheckpointError
from sparkdml.feed.batch import Batch
from sparkdml.feed.order import nothing_read, owned
from sparkdml.feed.randomness import random_state, restore_random_state, seed_rank
from sparkdml.training.callbacks.base import Callback, overriding
from sparkdml.training.epoch import Epoch
from sparkdml.training.epoch_row import make_row
from sparkdml.training.plan import Schedule, TaskPlan
from sparkdml.training.run import TrainingRun
from sparkdml.training.totals import EpochProgress


class Stateful(Protocol):
    """What a checkpoint holds beside the run's own state: that of the strategy."""

    def state(self) -> State:
        """On this rank, after a step."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; called once the ranks are alike, before the first step."""
        ...


def take_state(
    training: TrainingRun, epoch: EpochProgress, callbacks: Sequence[Callback], strategy: Stateful
) -> State:
    """Everything that the next step depends on, but for the position in the data."""
    task = training.task
    rank_rows = float(epoch.own_rows)
    return {
        **task.state(),
        **{f"strategy.{name}": entry for name, entry in strategy.state().items()},
        "buffers": Entry(dict(task.module.named_buffers()), "mean", rank_rows),
        "random": Entry(random_state(training.ctx.device), "reset"),
        "own_rows": Entry(rank_rows, "mean"),
        "callbacks": Entry([callback.state() for callback in callbacks]),
        "progress": Entry(
            {
                "step": training.step,
                "history": training.history,
                # An interrupted run resumes from here, as after a failure.
                "stopped": None if training.is_interrupted else training.stopped,
                "output_shape": task.forward.output_shape,
                "epoch": epoch.state(),
            }
        ),
    }


def load_state(
    training: TrainingRun,
    callbacks: Sequence[Callback],
    strategy: Stateful,
    state: Mapping[str, Any],
) -> None:
    """Put it back, but for the epoch that it was taken in."""
    ctx, task = training.ctx, training.task
    task.load(state, ctx.rank)
    if lost := task.forward.metric_objects.lost:
        training.note(
            f"the number of workers changed in the middle of an epoch, so {', '.join(lost)} of "
            "this epoch will be of the rows from here on"
        )
    with torch.no_grad():
        for name, buffer in task.module.named_buffers():
            buffer.copy_(state["buffers"][name])
    if len(callbacks) != len(state["callbacks"]):
        raise CheckpointError(
            f"the checkpoint has the state of {len(state['callbacks'])} callbacks, and there "
            f"are {len(callbacks)}: give the same ones, or use a new path"
        )
    for callback, saved in zip(callbacks, state["callbacks"], strict=True):
        callback.load(saved)
    # After the callbacks, whose state is rank 0's: a strategy may know this rank's own.
    prefix = "strategy."
    strategy.load(
        {name.removeprefix(prefix): v for name, v in state.items() if name.startswith(prefix)}
    )
    progress = state["progress"]
    training.step, training.history = progress["step"], progress["history"]
    training.stopped = progress["stopped"]
    ctx.reached(training.step)
    if "random" in state:
        restore_random_state(state["random"], ctx.device)
    else:
        seed_rank(ctx.seed, ctx.rank, training.step)
    task.forward.output_shape = progress["output_shape"]


def frozen(state: State) -> State:
    """The state as it is now, whatever happens to its tensors."""
    return {name: Entry(deepcopy(e.value), e.rule, e.weight) for name, e in state.items()}


@dataclass(frozen=True)
class TrainingPlan:
    """What is trained, how long, and with which callbacks, as it is shipped to the workers.

    Everything but the strategy, which may look at it before any job: see `Strategy.check`.
    """

    task: TaskPlan
    schedule: Schedule
    callbacks: tuple[Callback, ...] = ()


class Algorithm(Stateful, Protocol):
    """What the loop asks of the strategy that runs it."""

    def batches(self, training: Training, epoch: Epoch) -> Iterator[Batch]:
        """The rows of an epoch that this rank computes."""
        ...


@dataclass
class Training(TrainingRun):
    """One rank's view of a run. `epochs(self)` is what a strategy loops over.

    Attributes:
        callbacks: which `epochs` calls at the beginnings and ends of run, epochs and steps.
    """

    callbacks: Sequence[Callback] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.begins_at: EpochProgress | None = None  # where the strategy knows that
        self.replayed: State | None = None  # the state at the step that a replay was to reach
        self._last_saved: int | None = None  # the step of the last checkpoint, if of its kind
        for callback in overriding(self.callbacks, "on_gradient"):
            self.task.on_agreed.append(partial(callback.on_gradient, self))
        for callback in overriding(self.callbacks, "on_step_start"):
            self.on_step_start.append(partial(callback.on_step_start, self))
        for callback in overriding(self.callbacks, "on_step_end"):
            self.on_step_end.append(partial(callback.on_step_end, self))

    def epochs(self, algorithm: Algorithm) -> Iterator[Epoch]:
        """Epoch after epoch; validation, history and callbacks come as each one ends."""
        for callback in self.callbacks:
            callback.on_run_start(self)
        epoch = self._begin(algorithm)
        self.epoch = epoch
        while epoch.number < self.schedule.epochs and self.stopped is None:
            self.epoch = epoch
            if not epoch.steps:
                for callback in self.callbacks:
                    callback.on_epoch_start(self)
            yield epoch
            if self.is_replayed:
                self.replayed = self.state(epoch, algorithm)
                return
            if (
                self.is_interrupted
                and self.checkpoint is not None
                and self._last_saved != self.step
            ):
                self._save(algorithm, epoch, "step")  # from which the next fit resumes
            self._close(epoch)
            epoch = self._open(algorithm, EpochProgress(epoch.number + 1))
            is_last = epoch.number == self.schedule.epochs or self.stopped is not None
            checkpoint = None if is_last else self.checkpoint  # the end has one of its own
            if checkpoint is not None and checkpoint.due_after_epoch(epoch.number):
                self._save(algorithm, epoch, "epoch")
        self.finish(epoch, algorithm)

    def _open(self, algorithm: Algorithm, at: EpochProgress) -> Epoch:
        return Epoch(
            self,
            at,
            batches=partial(algorithm.batches, self),
            save=partial(self._save, algorithm, kind="step"),
        )

    def _begin(self, algorithm: Algorithm) -> Epoch:
        """The epoch to begin with: the first one, or the one that a checkpoint was taken in."""
        if self.begins_at is not None:
            seed_rank(self.ctx.seed, self.ctx.rank, self.step)
            return self._open(algorithm, self.begins_at)
        if self.checkpoint is not None:
            _ = self.ctx.data  # opened first: rows that are not the run's are refused here
        entries = None if self.checkpoint is None else self.checkpoint.load_entries()
        if entries is None:
            seed_rank(self.ctx.seed, self.ctx.rank)
            epoch = self._open(algorithm, EpochProgress(0))
            if self.checkpoint is not None:
                self._save(algorithm, epoch, "root")
            return epoch
        state = {name: entry.value for name, entry in entries.items()}
        load_state(self, self.callbacks, algorithm, state)
        position = owned(state["position"], self.ctx.rank, self.ctx.size)
        start = position if position.any() else None
        reached = state["progress"]["epoch"]
        epoch = self._open(
            algorithm, EpochProgress(reached["number"], start, rows_before=state["own_rows"])
        )
        epoch.load(reached)
        return epoch

    def finish(self, epoch: Epoch, algorithm: Algorithm) -> None:
        """The run's end; `epochs` comes here by itself."""
        state = None
        if self.checkpoint is not None and self.checkpoint.writes and not self.is_interrupted:
            state = self.state(epoch, algorithm)
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
            self._write(state, epoch, "final")
            assert self.checkpoint is not None
            self.checkpoint.wait()
        if self.schedule.stop_at_step is not None and self.epoch is not None:
            self.replayed = self.state(self.epoch, algorithm)

    # -- checkpoints ----------------------------------------------------------------------------

    def state(self, epoch: EpochProgress, algorithm: Stateful) -> State:
        """Everything that the next step depends on, but for the position in the data."""
        return take_state(self, epoch, self.callbacks, algorithm)

    def _save(self, algorithm: Algorithm, epoch: EpochProgress, kind: Kind) -> None:
        """Take a checkpoint. Every rank does, after the same step."""
        assert self.checkpoint is not None
        self._last_saved = self.step if kind == "step" else None
        self._write(self.state(epoch, algorithm), epoch, kind)

    def _write(self, state: State, epoch: EpochProgress, kind: Kind) -> None:
        assert self.checkpoint is not None
        own_rows, request = epoch.rows_read, self.request(epoch)
        start = nothing_read() if epoch.start is None else epoch.start

        def position() -> State:  # on the checkpoint's thread
            if not own_rows:
                return {"position": Entry(start, "sum")}
            return {"position": Entry(self.ctx.data.position_after(own_rows, request), "sum")}

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
