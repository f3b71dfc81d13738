"""Ranks with a model each: what they begin with, what is kept of them, how far apart they are.

Between the epochs' ends replicas differ. What is validated and saved is their average. Runs in each
worker, on the loop's thread; every rank calls the same functions in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparkdml.checkpoint.state import Entry, State
from sparkdml.comm.base import Communicator
from sparkdml.errors import ParameterError
from sparkdml.training.callbacks import GradientMonitor
from sparkdml.training.task import Task
from sparkdml.training.training import Training, TrainingPlan

if TYPE_CHECKING:
    from sparkdml.strategies.base import Strategy

CONSENSUS_DISTANCE = "consensus_distance"


def refuse_gradient_monitor(strategy: Strategy, plan: TrainingPlan) -> None:
    """At the driver: it shows the gradient that all have agreed on, and there is none."""
    if any(isinstance(callback, GradientMonitor) for callback in plan.callbacks):
        raise ParameterError(
            "callbacks",
            "GradientMonitor",
            f"left out with {type(strategy).__name__}, whose workers agree on no gradient",
        )


def make_alike(task: Task, comm: Communicator) -> None:
    """All ranks begin with rank 0's parameters and buffers."""
    comm.broadcast_(task.params.values)
    for buffer in task.module.buffers():
        comm.broadcast_(buffer)


class Replicas:
    """This rank's model among those of the others."""

    def __init__(self, training: Training) -> None:
        self._training, self._task, self._comm = training, training.task, training.ctx.comm
        self._average = torch.empty_like(self._task.params.values)

    def judge_average(self) -> float:
        """Let the average stand in wherever the model is judged or kept; every rank calls it.

        Returns how far the replicas are from it: the root of the mean squared distance.
        """
        training, values = self._training, self._task.params.values
        self._let_average_stand_in()
        squares = (values.double() - self._average.double()).square().sum().reshape(1)
        self._comm.allreduce_(squares, "mean")
        kept = training.result_values
        if kept is not None and kept is not self._average:
            # A callback's own choice, as EMA's: of each replica; its average is the same on all.
            self._comm.allreduce_(kept, "mean")
        if self._task.loss_scale is not None:
            self._task.loss_scale.agree(self._comm, training.ctx.device)
        return float(squares.sqrt())

    def _let_average_stand_in(self) -> None:
        self._average.copy_(self._task.params.values)
        self._comm.allreduce_(self._average, "mean")
        if self._training.result_values is None:
            self._training.result_values = self._average

    def state(self) -> State:
        """A replica has parameters and optimizers of its own, so the run's state has them twice."""
        state = {
            "replica": Entry(self._task.params.values, "mean"),
            "optimizers": Entry(
                {name: entry.value for name, entry in self._task.optimizers.state().items()}, "mean"
            ),
        }
        kept = self._training.result_values
        if kept is not None and kept is not self._average:
            state["kept"] = Entry(kept, "mean")  # a callback's own, of this replica
        if self._task.loss_scale is not None:
            state["loss_scale"] = Entry(self._task.loss_scale.state(), "reset")
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """After the callbacks have loaded what rank 0 had; every rank calls it."""
        values: Tensor = state["replica"]
        self._task.params.values.copy_(values)
        self._task.optimizers.load(state["optimizers"])
        if "kept" in state and self._training.result_values is not None:
            self._training.result_values.copy_(state["kept"])
        if "loss_scale" in state and self._task.loss_scale is not None:
            self._task.loss_scale.load(state["loss_scale"])
        self._let_average_stand_in()  # now already: there may be nothing left to train
