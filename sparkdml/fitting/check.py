"""Checks of a training plan at the driver, before any job."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from sparkdml.errors import ParameterError
from sparkdml.history_columns import check_columns
from sparkdml.strategies.base import Strategy
from sparkdml.training.callbacks import (
    BestModel,
    Callback,
    EarlyStopping,
    LearningRateSchedule,
    RunFacts,
)
from sparkdml.training.modules import Modules, check_compile_options
from sparkdml.training.optimizers import check_optimizers
from sparkdml.training.plan import TaskPlan
from sparkdml.training.sync_batch_norm import check_batch_norms
from sparkdml.training.training import TrainingPlan


def check_objective(plan: TaskPlan, module: nn.Module) -> None:
    """Check that exactly one of loss and step is given, and the Params that depend on it."""
    if plan.loss is not None and plan.step is not None:
        raise ParameterError("step", plan.step, "left out if loss= is given, or vice versa")
    if plan.loss is None and plan.step is None:
        raise ParameterError("loss", None, "given, or step= in its place")
    if plan.step is None:
        if isinstance(module, Modules):
            raise ParameterError(
                "loss",
                f"a loss for the modules {', '.join(module)}",
                "left out if model= is a dict: only step= can combine several modules",
                "Give step=fn(modules, batch, ctx).",
            )
        if not isinstance(plan.metrics, Mapping):
            raise ParameterError(
                "metrics",
                list(plan.metrics),
                "a dict of functions (outputs, targets) -> value; a list of names goes with step=",
            )
    elif isinstance(plan.metrics, Mapping) and plan.metrics:
        raise ParameterError(
            "metrics",
            f"a dict of {', '.join(plan.metrics)}",
            "with step= a list of the names of the values that it returns besides the loss",
        )


def check_run(plan: TrainingPlan, module: nn.Module, strategy: Strategy) -> None:
    """Raise a ParameterError for what would fail in the workers, or be ignored there."""
    task, callbacks = plan.task, plan.callbacks
    check_objective(task, module)
    check_optimizers(task.optimizer, module, task.parameter_groups)
    kind = next(module.parameters()).dtype
    if task.precision != "float32" and kind != torch.float32:
        raise ParameterError(
            "precision",
            task.precision,
            f"left at 'float32' for a module of {kind}",
            "Autocast keeps float32 parameters: convert the module with module.float().",
        )
    check_compile_options(task.compile)
    if task.sync_batch_norm:
        check_batch_norms(module)
    if sum(isinstance(callback, LearningRateSchedule) for callback in callbacks) > 1:
        raise ParameterError(
            "callbacks",
            "several of LearningRateSchedule",
            "a list with one at most, since they would set the same learning rate",
            "Use torch.optim.lr_scheduler.SequentialLR or ChainedScheduler.",
        )
    # A torchmetrics object may give several columns under its name.
    is_complete = not task.metric_objects and not any(map(_adds_columns, callbacks))
    facts = RunFacts(task, module, _columns_of(plan, strategy), is_complete)
    for callback in callbacks:
        callback.check(facts)


def _columns_of(plan: TrainingPlan, strategy: Strategy) -> frozenset[str]:
    """Return the history's columns, without those of callbacks."""
    task = plan.task
    of_strategy = {f"strategy {type(strategy).__name__}": strategy.columns}
    of_callbacks = {f"callbacks {type(one).__name__}": one.columns for one in plan.callbacks}
    columns = check_columns(
        task.metrics, task.loss_names, plan.schedule.validates, {**of_strategy, **of_callbacks}
    )
    return columns.union(strategy.columns)


def _adds_columns(callback: Callback) -> bool:
    """Whether other callbacks may monitor the columns that it writes."""
    if type(callback).on_epoch_end is Callback.on_epoch_end:
        return False
    return type(callback) not in (EarlyStopping, BestModel, LearningRateSchedule)
