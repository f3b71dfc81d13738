"""A fit whose workers train alone: contributions become one model, validated in the end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sparkdml.errors import DataError, ParameterError
from sparkdml.runtime.context import Context
from sparkdml.training.contribution import add_all, encode_average, history_of
from sparkdml.training.epoch_row import NO_VALIDATION_ROWS
from sparkdml.training.job import Fitted, TrainingResult, load_weights
from sparkdml.training.task import Task, TaskPlan

if TYPE_CHECKING:
    from sparkdml.checkpoint.checkpoints import Checkpoints
    from sparkdml.runtime.driver import OnEvent
    from sparkdml.training.fit import Fit


def check_alone(fit: Fit, checkpoints: Checkpoints | None) -> None:
    """What takes workers that speak to each other is refused."""
    refused = [
        ("checkpoint", checkpoints),
        ("samplingCol", fit.feed.sampling),
        ("dropLast", fit.feed.drop_last or None),
        ("onInterrupt", "stop-and-keep" if fit.options.keeps_on_interrupt else None),
    ]
    for name, value in refused:
        if value is not None:
            raise ParameterError(
                name,
                value,
                f"left out with {type(fit.job.strategy).__name__}, whose workers train alone",
            )


def train_alone(fit: Fit, on_event: OnEvent) -> Fitted:
    schedule = replace(fit.job.schedule, validates=False)
    job = replace(fit.job, schedule=schedule)
    total = add_all(fit.launch(job, fit.options, on_event, merge=add_all))
    weights = encode_average(total, fit.module.state_dict())
    history = history_of(total, fit.job.task)
    if fit.job.schedule.validates:
        history[-1].update(_validate(fit, weights, on_event))
    result = TrainingResult(weights, history, total.stopped, total.first_step_time)
    return Fitted(result, total.output_shape)


@dataclass(frozen=True)
class ValidationJob:
    """Judges a model that is already there on a worker's held-out rows: the sums of their stats."""

    task: TaskPlan
    weights: bytes
    batch_size: int

    def __call__(self, ctx: Context) -> list[float]:
        task = Task(self.task, ctx.device)
        load_weights(task.module, self.weights)
        batches = ctx.data.validation_batches(self.batch_size)
        stats: list[float] = task.forward.evaluate(batches).tolist()
        return stats


def _validate(fit: Fit, weights: bytes, on_event: OnEvent) -> dict[str, Any]:
    plan = fit.job.task
    job = ValidationJob(plan, weights, fit.job.schedule.batch_size)
    options = replace(fit.options, name=f"{fit.options.name}, validation")
    stats = torch.tensor(fit.launch(job, options, on_event)).double().sum(0)
    totals = Task(plan, torch.device("cpu")).forward.totals(stats)
    if not totals.rows:
        raise DataError(NO_VALIDATION_ROWS)
    means = totals.means(plan.metric_names, plan.loss_names)
    return {f"val_{name}": value for name, value in means.items()}
