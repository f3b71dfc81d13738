"""The loop of strategies whose workers take steps of their own, and meet now and then.

A round is up to `steps` batches of each rank, with the rank's own optimizer and no communication,
and then a synchronization. To all else (the history's `steps`, callbacks, checkpoints, requests to
stop) a round is one step, counted at its synchronization, which all ranks enter. A rank that has
run out of rows waits there; a synchronization to which no rank brings a row is the end of the
epoch. Models are averaged by the rows that each rank has trained on since the last one, so
a rank without rows has no say, and equal parts have equal ones, as in the papers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from sparkdml.checkpoint.state import Entry, State
from sparkdml.errors import ParameterError
from sparkdml.feed.batch import Batch
from sparkdml.runtime.protocol.plan import Role
from sparkdml.strategies.base import Strategy, check_backend
from sparkdml.strategies.replicas import make_alike
from sparkdml.training.callbacks import GradientMonitor
from sparkdml.training.task import Task
from sparkdml.training.totals import VOTES
from sparkdml.training.training import Training, TrainingPlan

OptimizerState = Literal["keep", "reset"]


class LocalStrategy(Strategy):
    """Local steps of each rank, then a synchronization.

    Args:
        steps: batches of each rank between two synchronizations.
        optimizer_state: "keep" what the rank's own optimizer has gathered (momentum, Adam's
            moments) from one round to the next, or "reset" it at each round. It is never
            averaged; in a run that resumes with another number of workers all begin with the mean.
        backend: of the communicator.
    """

    steps_name = "steps"  # what a subclass calls that argument

    def __init__(self, steps: int, optimizer_state: OptimizerState, backend: str) -> None:
        if not isinstance(steps, int) or steps < 1:
            raise ParameterError(self.steps_name, steps, "a whole number of at least 1")
        if optimizer_state not in ("keep", "reset"):
            raise ParameterError("optimizer_state", optimizer_state, "'keep' or 'reset'")
        self.optimizer_state, self.backend = optimizer_state, check_backend(backend)
        self._steps = steps

    def roles(self, num_workers: int) -> list[Role]:
        return [Role("worker", num_workers)]

    def check(self, plan: TrainingPlan) -> None:
        if any(isinstance(callback, GradientMonitor) for callback in plan.callbacks):
            raise ParameterError(
                "callbacks",
                "GradientMonitor",
                f"left out with {type(self).__name__}, whose workers agree on no gradient",
            )

    def run(self, role: str, training: Training) -> None:
        self._task: Task = training.task
        with self.open_wire(training.ctx) as self._comm:
            self._run(training)

    def _run(self, training: Training) -> None:
        task, clock, spans = training.task, training.clock, training.spans
        self.start(training)
        for epoch in training.epochs(self):
            for batches in epoch.rounds(self._steps):
                own = self._train(training, batches)
                rows = task.totals(own).rows
                totals = task.totals(self._comm.allreduce_(own))
                if not epoch.count(totals):
                    break  # no rank had a row left
                self.meet(rows / totals.rows)
                self._end_round(training)
                clock.lap("communication")
                spans.lap("communication")
                epoch.tick()

    def _train(self, training: Training, batches: Iterator[Batch]) -> Tensor:
        """A round of this rank alone; the sums of its steps' stats."""
        task = training.task
        sums = torch.zeros_like(task.params.stats, dtype=torch.float64)
        for batch in batches:
            task.grad(batch)
            sums += task.params.stats
            own = task.totals()
            if not math.isfinite(own.loss):
                break  # raised on all ranks at the synchronization
            task.apply(own)
            training.clock.lap("compute")
            training.spans.lap("optimizer")
        sums[VOTES] = sums.new_tensor(task.vote)  # those of now, and once, not once a step
        return sums

    def _end_round(self, training: Training) -> None:
        task = training.task
        if task.loss_scale is not None:
            task.loss_scale.agree(self._comm, training.ctx.device)
        if self.optimizer_state == "reset":
            for optimizer in task.optimizers.values():
                optimizer.state.clear()

    def start(self, training: Training) -> None:
        """Make all ranks alike before the first step."""
        make_alike(training.task, self._comm)

    @abstractmethod
    def meet(self, share: float) -> None:
        """Bring this rank's parameters, with its share of the round's rows, to the others'."""

    def average(self, share: float) -> Tensor:
        """This rank's parameters become the mean of all ranks', weighted by their shares."""
        values = self._task.params.values
        values.mul_(share)
        self._comm.allreduce_(values)
        return values

    def rates(self, share: float) -> Tensor:
        """The learning rates of the round, the same on every rank.

        A rank that took no step may not have been told of them by its callbacks.
        """
        rates = learning_rates(self._task).mul_(share)
        return self._comm.allreduce_(rates)

    def state(self) -> State:
        """Each rank's optimizer is its own; parameters are the same when checkpoints are taken."""
        if self.optimizer_state == "reset":
            return {}
        own = {name: entry.value for name, entry in self._task.optimizers.state().items()}
        return {"optimizers": Entry(own, "mean")}

    def load(self, state: Mapping[str, Any]) -> None:
        if "optimizers" in state:
            self._task.optimizers.load(state["optimizers"])


def learning_rates(task: Task) -> Tensor:
    """That of each trained parameter: of one element, where all have the same."""
    groups = [group for one in task.optimizers.values() for group in one.param_groups]
    if any("lr" not in group for group in groups):
        raise ParameterError("optimizer", "one without lr", "an optimizer with a learning rate")
    values = task.params.values
    rates = {float(group["lr"]) for group in groups}
    if len(rates) == 1:
        return values.new_tensor([rates.pop()])
    by_parameter = {id(p): float(group["lr"]) for group in groups for p in group["params"]}
    return torch.cat(
        [values.new_full((p.numel(),), by_parameter[id(p)]) for p in task.params.parameters]
    )
