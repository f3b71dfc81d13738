"""A run's state: what a checkpoint holds of a training, and how it is restored.

Runs in each worker, on the loop's thread. The state refers to live tensors; the caller copies
them if it keeps them, as the checkpointer does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol

import torch

from sparkdml.checkpoint.state import Entry, State
from sparkdml.errors import CheckpointError
from sparkdml.feed.randomness import random_state, restore_random_state, seed_rank
from sparkdml.training.callbacks.base import Callback
from sparkdml.training.epoch_progress import EpochProgress
from sparkdml.training.run import TrainingRun


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
