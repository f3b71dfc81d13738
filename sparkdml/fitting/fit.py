"""One fit at the driver: checks of the plan, the launch of the job, and the result that comes back.

Runs on the thread that called `fit`. The plan is checked before any job. The job runs with or
without checkpoints. If workers train independently (`Averaging`), their models are combined into
one, which is validated in a job of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import nn

from sparkdml.checkpoint.checkpoints import Checkpoints
from sparkdml.checkpoint.fingerprint import describe_data
from sparkdml.checkpoint.manifest import Manifest
from sparkdml.comm.backends import resolve_backend
from sparkdml.errors import DataError, ParameterError
from sparkdml.feed.feed import FeedPlan
from sparkdml.feed.sharding import count_rows, warn_if_not_deterministic
from sparkdml.fitting.job import Fitted as Fitted
from sparkdml.fitting.job import ReplayJob, TrainingJob, TrainingResult
from sparkdml.history_columns import VALIDATION, check_columns
from sparkdml.runtime.driver.checkpointed_run import CheckpointedRun, open_run
from sparkdml.runtime.driver.launch import launch
from sparkdml.runtime.driver.request import LaunchRequest, OnEvent, ignore_event
from sparkdml.runtime.protocol.plan import Options
from sparkdml.runtime.protocol.results import Merge
from sparkdml.runtime.protocol.roles import Role
from sparkdml.runtime.worker.context import Context
from sparkdml.strategies.base import Strategy
from sparkdml.training.callbacks import (
    BestModel,
    Callback,
    EarlyStopping,
    LearningRateSchedule,
    RunFacts,
)
from sparkdml.training.contribution import add_all, encode_average, history_of
from sparkdml.training.epoch_row import NO_VALIDATION_ROWS
from sparkdml.training.modules import Modules, check_compile_options
from sparkdml.training.optimizers import check_optimizers
from sparkdml.training.plan import TaskPlan
from sparkdml.training.sync_batch_norm import check_batch_norms
from sparkdml.training.task import Task
from sparkdml.training.training import TrainingPlan
from sparkdml.training.weights import load_weights

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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


@dataclass(frozen=True)
class Fit:
    """Everything that the driver knows before the first worker starts."""

    spark: SparkSession
    dataset: DataFrame
    module: nn.Module  # as it was built at the driver
    feed: FeedPlan
    plan: TrainingPlan
    strategy: Strategy
    options: Options
    fingerprint: dict[str, str]  # what the states of this run depend on

    def check(self) -> None:
        """Raise a ParameterError if the strategy can't train with these rows or workers."""
        if self.options.num_workers is not None:  # else `launch` asks Spark for it
            self._roles(self.options.num_workers)

    def _roles(self, num_workers: int) -> list[Role]:
        """Return the strategy's roles; it refuses numbers of workers that it can't use."""
        roles = self.strategy.roles(num_workers)
        if self.feed.sampling is not None and any(role.reads == "leases" for role in roles):
            raise ParameterError(
                "samplingCol",
                self.feed.sampling,
                f"left out with {self.strategy!r}, where rows move between workers",
            )
        return roles

    def train(self, checkpoints: Checkpoints | None, on_event: OnEvent) -> Fitted:
        if not self.strategy.communicates:
            return train_alone(self, on_event)
        if checkpoints is None:
            return collect(self.launch(self.job(), self.options, on_event))
        warn_if_not_deterministic(self.dataset)
        with self._open(checkpoints, on_event) as run:
            ended = run.find_result(
                self.plan.schedule.epochs, lambda: count_rows(self.dataset, self.feed)
            )
            if ended is not None:
                on_event(-1, {"kind": "already-trained", "step": ended[0].step})
                return read_result(ended[1])
            return collect(self.launch(self.job(), self.options, on_event, run))

    def job(self, **schedule: Any) -> TrainingJob:
        """Return the job to ship, with the given fields of its schedule replaced."""
        changed = replace(self.plan.schedule, **schedule)
        return TrainingJob(replace(self.plan, schedule=changed), self.strategy)

    def start(self) -> dict[str, Any]:
        """Return the fields of the run's first event; some depend on Spark's slots."""
        workers, schedule = self.options.num_workers, self.plan.schedule
        return {
            "name": self.options.name,
            "strategy": repr(self.strategy),
            "backend": resolve_backend(self.options.backend, workers or 2),
            "workers": workers,
            "epochs": schedule.epochs,
            "batch_size": schedule.batch_size,
            "global_batch": workers and workers * schedule.batch_size * schedule.accumulate,
            "seed": self.options.seed,
            "plan": self.fingerprint,
        }

    def replay(
        self, checkpoints: Checkpoints, start: Manifest, num_workers: int, step: int
    ) -> tuple[bytes, bytes, list[float]]:
        """Return the encoded state after `step` (shared, and rank 0's own), and the losses."""
        job = ReplayJob(self.job(stop_at_step=step))
        options = replace(self.options, num_workers=num_workers, max_restarts=0)
        with self._open(checkpoints, ignore_event, start) as run:
            returned: list[Any] = self.launch(job, options, ignore_event, run)
        found: tuple[bytes, bytes, list[float]] = returned[0]
        return found

    def _open(
        self, checkpoints: Checkpoints, on_event: OnEvent, replay_from: Manifest | None = None
    ) -> AbstractContextManager[CheckpointedRun]:
        data = describe_data(self.dataset)
        return open_run(
            checkpoints,
            self.spark,
            plan=self.fingerprint,
            data=data,
            on_event=on_event,
            timeouts=self.options.timeouts,
            replay_from=replay_from,
        )

    def launch(
        self,
        job: Any,
        options: Options,
        on_event: OnEvent,
        run: CheckpointedRun | None = None,
        merge: Merge | None = None,
    ) -> list[Any]:
        return launch(
            LaunchRequest(
                self.spark,
                job,
                options=options,
                data=self.dataset,
                feed=self.feed,
                on_event=on_event,
                run=run,
                roles_of=self._roles,
                make_service=self.strategy.driver_service,
                merge=merge,
            )
        )


def collect(returned: list[Any]) -> Fitted:
    """Make the result from what every rank returned."""
    result = next(result for _, result in returned if result is not None)
    shape = next((shape for shape, _ in returned if shape is not None), None)
    return Fitted(result, shape)


def read_result(state: Mapping[str, Any]) -> Fitted:
    """Make the result from the last checkpoint of a run that has ended."""
    progress = state["progress"]
    weights = {name: tensor.clone() for name, tensor in state["result"].items()}
    return Fitted(
        TrainingResult(
            weights=safetensors.torch.save(weights),
            history=progress["history"],
            stopped=progress["stopped"],
            first_step_time=0.0,
        ),
        progress["output_shape"],
    )


def train_alone(fit: Fit, on_event: OnEvent) -> Fitted:
    job = fit.job(validates=False)
    total = add_all(fit.launch(job, fit.options, on_event, merge=add_all))
    weights = encode_average(total, fit.module.state_dict())
    history = history_of(total, fit.plan.task)
    if fit.plan.schedule.validates:
        history[-1].update(_validate(fit, weights, on_event))
    result = TrainingResult(weights, history, total.stopped, total.first_step_time)
    return Fitted(result, total.output_shape)


@dataclass(frozen=True)
class ValidationJob:
    """Evaluates a trained model on a worker's held-out rows, and returns the sums of its stats."""

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
    task = fit.plan.task
    job = ValidationJob(task, weights, fit.plan.schedule.batch_size)
    options = replace(fit.options, name=f"{fit.options.name}, validation")
    stats = torch.tensor(fit.launch(job, options, on_event)).double().sum(0)
    totals = Task(task, torch.device("cpu")).totals(stats)
    if not totals.rows:
        raise DataError(NO_VALIDATION_ROWS)
    means = totals.means(task.metric_names, task.loss_names)
    return {f"{VALIDATION}{name}": value for name, value in means.items()}
