"""TorchEstimator: what a Spark user trains a PyTorch model with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from pyspark import keyword_only
from pyspark.ml import Estimator
from torch import nn

from sparkdml.checkpoint.checkpoints import Checkpoints
from sparkdml.errors import DataError, ParameterError
from sparkdml.feed.columns import Column, describe_columns
from sparkdml.feed.feed import FeedPlan
from sparkdml.history import History
from sparkdml.model import TorchModel
from sparkdml.observe.observers import Observer
from sparkdml.observe.output_printer import OutputPrinter
from sparkdml.observe.progress import Progress
from sparkdml.observe.spark_ui import SparkUi
from sparkdml.observe.stragglers import Stragglers
from sparkdml.observe.timeline.observer import Timeline
from sparkdml.observe.tracker_observer import TrackerObserver
from sparkdml.observe.watching import watched
from sparkdml.params import TrainingParams
from sparkdml.persistence import EstimatorPersistence
from sparkdml.runtime.api import find_resources, find_session
from sparkdml.runtime.plan import Options
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.strategies.base import Strategy
from sparkdml.training.callbacks import Callback
from sparkdml.training.fit import Fit, Fitted
from sparkdml.training.flat import check_parameters
from sparkdml.training.job import TrainingJob
from sparkdml.training.task import Metric, ModelSource, OptimizerSource, TaskPlan, build_module
from sparkdml.training.training import Schedule

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class TorchEstimator(Estimator["TorchModel"], TrainingParams, EstimatorPersistence):
    """Fits a PyTorch module to a DataFrame, in barrier tasks that agree by a strategy.

    The arguments are Spark ML Params: `explainParams()` has a line for each. With `featuresCol` a
    list, the module is called with one argument for each column. Floating-point columns arrive in
    the module's own type, all others as they are (int64 ids stay int64).

    >>> estimator = TorchEstimator(
    ...     model=lambda: nn.Linear(4, 3),
    ...     loss=nn.CrossEntropyLoss(),
    ...     optimizer=partial(torch.optim.SGD, lr=0.1),
    ...     numWorkers=2, epochs=5,
    ... )
    >>> fitted = estimator.fit(df)
    """

    _input_kwargs: dict[str, Any]  # what keyword_only puts there

    @keyword_only
    def __init__(
        self,
        *,
        model: ModelSource | None = None,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer: OptimizerSource | None = None,
        featuresCol: str | Sequence[str] = "features",
        labelCol: str = "label",
        predictionCol: str = "prediction",
        batchSize: int = 64,
        epochs: int = 1,
        numWorkers: int | None = None,
        seed: int = 0,
        validation: float | str | None = None,
        metrics: Mapping[str, Metric] | None = None,
        callbacks: Sequence[Callback] | None = None,
        strategy: Strategy | None = None,
        checkpoint: Checkpoints | str | None = None,
        maxRestarts: int = 3,
        minWorkers: int = 1,
        replacementSeconds: float = 60.0,
        shuffle: bool = True,
        gradientAccumulation: int = 1,
        clipNorm: float | None = None,
        output: str = "auto",
        cpusPerWorker: int | None = None,
        gpusPerWorker: int = 0,
        slotTimeout: float = 60.0,
        heartbeatTimeout: float = 8.0,
        timeline: str | None = None,
        logs: str | None = None,
        tracker: Any = None,
        verbose: int = 1,
    ) -> None:
        super().__init__()
        self._setDefault(**self.DEFAULTS, strategy=AllReduce())
        self._set(**self._input_kwargs)

    def _fit(self, dataset: DataFrame) -> TorchModel:
        called = time.time()
        fit = self._prepare(dataset)
        stragglers = Stragglers()
        observers: list[Observer] = [stragglers, *self._observers(fit.spark)]
        with watched(
            fit.start(),
            observers,
            lambda: {"stragglers": [asdict(straggler) for straggler in stragglers.report()]},
        ) as tell:
            fitted = fit.train(self.value("checkpoint"), tell)
        first = fitted.result.first_step_time
        history = History(
            fitted.result.history, fitted.result.stopped, first - called if first else None
        )
        return self._make_model(fit.module, fitted, history, fit.feed)

    def _observers(self, spark: SparkSession) -> list[Observer]:
        progress = Progress(self.value("epochs"), self.value("verbose"))
        observers: list[Observer] = [progress, SparkUi(spark)]
        if self.value("timeline") is not None:
            observers.append(Timeline(self.value("timeline")))
        if self.value("logs") == "driver":
            observers.append(OutputPrinter())
        if self.value("tracker") is not None:
            observers.append(TrackerObserver(self.value("tracker")))
        return observers

    def _prepare(self, dataset: DataFrame) -> Fit:
        """Everything that can be found out, or found wrong, before any job."""
        spark = find_session(dataset)
        module = self._build_module()
        strategy: Strategy = self.value("strategy")
        return Fit(
            spark=spark,
            dataset=dataset,
            module=module,
            feed=self._plan_feed(dataset, module),
            job=TrainingJob(
                self._plan_task(), self._plan_schedule(), strategy, tuple(self.value("callbacks"))
            ),
            options=Options(
                num_workers=self.value("numWorkers"),
                resources=find_resources(
                    spark, self.value("cpusPerWorker"), self.value("gpusPerWorker")
                ),
                backend=strategy.backend,
                seed=self.value("seed"),
                slot_timeout=self.value("slotTimeout"),
                max_restarts=self.value("maxRestarts"),
                min_workers=self.value("minWorkers"),
                replacement_seconds=self.value("replacementSeconds"),
                heartbeat_timeout=self.value("heartbeatTimeout"),
                forwards_output=self.value("logs") == "driver",
                timeline=self.value("timeline") is not None,
                name=f"sparkdml: fit {type(module).__name__}",
            ),
        )

    def _build_module(self) -> nn.Module:
        """The module at the driver: finds out most mistakes before any job."""
        for name in ("model", "loss", "optimizer"):
            if not self.isDefined(name):
                raise ParameterError(name, None, "given", f"Pass {name}= to TorchEstimator.")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.value("seed"))
            module = build_module(self.value("model"))
        check_parameters(module, [p for p in module.parameters() if p.requires_grad])
        return module

    def _plan_feed(self, dataset: DataFrame, module: nn.Module) -> FeedPlan:
        floating = str(next(module.parameters()).dtype).removeprefix("torch.")
        if floating not in ("float32", "float64"):
            floating = "float32"  # numpy has no bfloat16; the task casts
        names = [*self.feature_columns(), self.value("labelCol")]
        columns = describe_columns(dataset.schema, list(dict.fromkeys(names)))
        validation = self.value("validation")
        if isinstance(validation, str):
            check_boolean(dataset, validation)
        return FeedPlan(
            tuple(column.cast(floating) for column in columns), self.value("seed"), validation
        )

    def _plan_task(self) -> TaskPlan:
        return TaskPlan(
            model=self.value("model"),
            loss=self.value("loss"),
            optimizer=self.value("optimizer"),
            features=tuple(self.feature_columns()),
            label=self.value("labelCol"),
            metrics=self.value("metrics"),
            batch_size=self.value("batchSize"),
            clip_norm=self.value("clipNorm"),
        )

    def _plan_schedule(self) -> Schedule:
        return Schedule(
            epochs=self.value("epochs"),
            batch_size=self.value("batchSize"),
            accumulate=self.value("gradientAccumulation"),
            shuffle=self.value("shuffle"),
            validates=self.value("validation") is not None,
        )

    def _make_model(
        self,
        module: nn.Module,
        fitted: Fitted,
        history: History,
        feed: FeedPlan,
    ) -> TorchModel:
        columns: dict[str, Column] = {column.name: column for column in feed.columns}
        model = TorchModel._make(
            module=module,
            source=self.value("model"),
            weights=fitted.result.weights,
            loss=self.value("loss"),
            metrics=self.value("metrics"),
            features=tuple(columns[name] for name in self.feature_columns()),
            output_shape=fitted.output_shape,
            history=history,
        )
        model._resetUid(self.uid)
        return self._copyValues(model)


def check_boolean(dataset: DataFrame, name: str) -> None:
    kinds = {field.name: field.dataType.simpleString() for field in dataset.schema.fields}
    if name not in kinds:
        raise DataError(f"no column {name!r} for validation=: there is {', '.join(kinds)}")
    if kinds[name] != "boolean":
        raise DataError(f"the validation column {name!r} is {kinds[name]}, not boolean: cast it")
