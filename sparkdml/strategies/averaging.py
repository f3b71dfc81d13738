"""Averaging: every worker trains by itself on its own rows, and the models are averaged once.

The MapReduce way, for clusters that can't run all workers at the same time: workers are ordinary
tasks that exchange nothing, and Spark retries them one by one, also under dynamic allocation. Their
models, weighted by rows, are added up in a tree on the executors, as Spark's treeAggregate does.
(Chu et al. 2006; Zinkevich et al. 2010, "Parallelized Stochastic Gradient Descent".) The average of
models that have diverged may be poor: it is good for convex problems, and a baseline for deep
networks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdml.errors import ParameterError
from sparkdml.runtime.protocol.roles import Role
from sparkdml.strategies.base import Strategy
from sparkdml.training.callbacks import LearningRateSchedule
from sparkdml.training.callbacks.base import overriding
from sparkdml.training.contribution import Contribution, EpochSums
from sparkdml.training.training import Training, TrainingPlan


class Averaging(Strategy):
    """Train on each worker alone; average the models in the end, weighted by their rows.

    The history adds up what all workers measured, each on its own model; `validation=` is of the
    averaged model, in the last row. No checkpoints, and no callback that looks at an epoch's row:
    there is no moment at which workers could agree on one.
    """

    communicates = False

    def roles(self, num_workers: int) -> list[Role]:
        return [Role("worker", num_workers, gang=False, at_once=False)]

    def check(self, plan: TrainingPlan) -> None:
        for callback in overriding(plan.callbacks, "on_epoch_end"):
            monitors = getattr(callback, "monitor", None) is not None
            if not isinstance(callback, LearningRateSchedule) or monitors:
                raise ParameterError(
                    "callbacks",
                    type(callback).__name__,
                    "left out with Averaging, whose workers have no epoch in common",
                    "Use AllReduce() or LocalSGD(), or a callback without on_epoch_end.",
                )
        if plan.task.metric_objects:
            raise ParameterError(
                "metrics",
                ", ".join(plan.task.metric_objects),
                "plain functions with Averaging, whose workers never meet to merge such objects",
            )

    def run(self, role: str, training: Training) -> None:
        task, epochs = training.task, []
        for epoch in training.epochs(self):
            for batch in epoch:
                task.grad(batch)
                training.clock.lap("compute")
                totals = task.totals()
                if not epoch.count(totals):
                    break
                task.apply(totals)
                epoch.tick()
            epochs.append(EpochSums(epoch.totals, float(epoch.steps), epoch.seconds))
        training.contribution = contribute(training, epochs)

    def __repr__(self) -> str:
        return "Averaging()"


def contribute(training: Training, epochs: list[EpochSums]) -> Contribution:
    task = training.task
    rows = sum(epoch.totals.rows for epoch in epochs)  # not all workers may have made all epochs
    state = {
        name: _times(tensor.detach().cpu(), rows)
        for name, tensor in training.result_state().items()
    }
    contribution = Contribution(
        rows,
        state,
        epochs=tuple(epochs),
        first_step_time=training.first_step_time,
        stopped=training.stopped,
        output_shape=task.forward.output_shape,
    )
    if training.ctx.size > 1:
        # It leaves as the task's result, behind all that training tells of itself.
        training.ctx.traffic.sent(contribution.num_bytes)
        training.reports.report_rank()
    return contribution


def _times(tensor: Tensor, rows: float) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.clone()
    # Infinities, as in masks, would become NaN times 0.
    return tensor.double() * rows if rows else torch.zeros_like(tensor, dtype=torch.float64)
