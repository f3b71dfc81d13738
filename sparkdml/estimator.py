"""TorchEstimator: the Spark ML estimator that trains a PyTorch model. Driver only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from pyspark import keyword_only
from pyspark.ml import Estimator
from torch import nn

from sparkdml.checkpoint.checkpoints import Checkpoints
from sparkdml.dry_run import try_rows
from sparkdml.errors import ParameterError
from sparkdml.feed.plan import FeedPlan, FeedWishes, plan_feed
from sparkdml.fitting.fit import Fit, Fitted, check_run
from sparkdml.history import History
from sparkdml.model import TorchModel
from sparkdml.network.timeouts import HEARTBEAT_TIMEOUT
from sparkdml.observe.observers import (
    Communication,
    Evaluations,
    Observer,
    OutputPrinter,
    RestartWarnings,
    watched,
)
from sparkdml.observe.progress import Progress
from sparkdml.observe.spark_ui import SparkUi
from sparkdml.observe.stragglers import Stragglers
from sparkdml.observe.timeline.trace import Timeline
from sparkdml.observe.trackers import TrackerObserver
from sparkdml.params import TrainingParams
from sparkdml.persistence import EstimatorPersistence
from sparkdml.runtime.api import find_resources
from sparkdml.runtime.protocol.plan import Options
from sparkdml.session import find_session
from sparkdml.strategies.base import Strategy
from sparkdml.training.callbacks import Callback
from sparkdml.training.flat import check_parameters
from sparkdml.training.modules import floating_type
from sparkdml.training.optimizers import NoOptimizer
from sparkdml.training.plan import Schedule
from sparkdml.training.task import Metric, ModelSource, OptimizerSource, TaskPlan, build_module
from sparkdml.training.training import TrainingPlan
from sparkdml.training.weights import describe_state
from sparkdml.warm_start import starting_state

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_BUILDING = threading.Lock()


class TorchEstimator(Estimator["TorchModel"], TrainingParams, EstimatorPersistence):
    """Fits a PyTorch module to a DataFrame, in barrier tasks that synchronize by a strategy.

    The arguments are Spark ML Params: `explainParams()` has a line for each. If `featuresCol` is a
    list, the module is called with one argument for each column. Floating-point columns are
    converted to the module's own type, all others keep theirs (int64 ids stay int64).

    >>> estimator = TorchEstimator(
    ...     model=lambda: nn.Linear(4, 3),
    ...     loss=nn.CrossEntropyLoss(),
    ...     optimizer=partial(torch.optim.SGD, lr=0.1),
    ...     numWorkers=2, epochs=5,
    ... )
    >>> fitted = estimator.fit(df)
    """

    _model_class: type[TorchModel] = TorchModel
    _input_kwargs: dict[str, Any]  # what keyword_only puts there

    @keyword_only
    def __init__(
        self,
        *,
        model: ModelSource | Mapping[str, ModelSource] | None = None,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        step: Callable[[Any, Any, Any], Any] | None = None,
        optimizer: OptimizerSource | Mapping[str, OptimizerSource] | None = None,
        parameterGroups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
        featuresCol: str | Sequence[str] = "features",
        labelCol: str = "label",
        weightCol: str | None = None,
        predictionCol: str = "prediction",
        outputCols: Sequence[str] | None = None,
        predict: Callable[[Any, Any], Any] | str | None = None,
        output: str = "auto",
        batchSize: int = 64,
        epochs: int = 1,
        numWorkers: int | None = None,
        seed: int = 0,
        validation: float | str | None = None,
        stratifyCol: str | None = None,
        samplingCol: str | None = None,
        shuffle: bool = True,
        dropLast: bool = False,
        preprocess: Callable[[Any], Mapping[str, Any]] | None = None,
        inputCols: Sequence[str] | None = None,
        augment: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
        collate: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
        checkFinite: bool = False,
        metrics: Mapping[str, Metric] | Sequence[str] | None = None,
        callbacks: Sequence[Callback] | None = None,
        strategy: Strategy | None = None,
        warmStart: TorchModel | Mapping[str, torch.Tensor] | None = None,
        gradientAccumulation: int = 1,
        clipNorm: float | None = None,
        precision: str = "float32",
        compile: bool | Mapping[str, Any] = False,
        syncBatchNorm: bool = False,
        checkpoint: Checkpoints | str | None = None,
        maxRestarts: int = 3,
        minWorkers: int = 1,
        replacementSeconds: float = 60.0,
        onInterrupt: str = "raise",
        dryRun: bool = False,
        cpusPerWorker: int | None = None,
        gpusPerWorker: int = 0,
        slotTimeout: float = 60.0,
        heartbeatTimeout: float = HEARTBEAT_TIMEOUT,
        timeline: str | None = None,
        logs: str | None = None,
        tracker: Any = None,
        verbose: int = 1,
    ) -> None:
        super().__init__()
        self._set_defaults()
        self._set(**self._input_kwargs)

    def _fit(self, dataset: DataFrame) -> TorchModel:
        return self.fit_watched(dataset)

    def fit_watched(self, dataset: DataFrame, *others: Observer) -> TorchModel:
        """Like `fit`, with additional observers of the events in docs/reference-events.md."""
        called = time.time()
        fit = self._prepare(dataset)
        if self.value("dryRun"):
            try_rows(fit)
        stragglers, evaluations, communication = Stragglers(), Evaluations(), Communication()
        final_fields: dict[str, Any] = {"stopped": None}

        def end() -> dict[str, Any]:
            slow = [asdict(straggler) for straggler in stragglers.report()]
            return {**final_fields, "stragglers": slow}

        observers: list[Observer] = [stragglers, evaluations, communication]
        observers += [*self._observers(fit.spark), *others]
        with watched(fit.start(), observers, end) as tell:
            fitted = fit.train(self.value("checkpoint"), tell)
            final_fields["stopped"] = fitted.result.stopped
        first = fitted.result.first_step_time
        history = History(
            fitted.result.history,
            fitted.result.stopped,
            first - called if first else None,
            evaluations.rows,
            backend=communication.backend,
            topology=communication.topology,
        )
        return self._make_model(fit.module, fitted, history, fit.feed)

    def _observers(self, spark: SparkSession) -> list[Observer]:
        verbose = self.value("verbose")
        progress = Progress(self.value("epochs"), verbose) if verbose else RestartWarnings()
        observers: list[Observer] = [progress, SparkUi(spark)]
        if self.value("timeline") is not None:
            observers.append(Timeline(self.value("timeline")))
        if self.value("logs") == "driver":
            observers.append(OutputPrinter())
        if self.value("tracker") is not None:
            observers.append(TrackerObserver(self.value("tracker")))
        return observers

    def _prepare(self, dataset: DataFrame) -> Fit:
        """Prepare the fit: find what can be known, and most mistakes, before any job."""
        spark = find_session(dataset)
        strategy: Strategy = self.value("strategy")
        self._check_strategy(strategy)
        module = self._build_module()
        plan = TrainingPlan(
            replace(self._plan_task(), warm_start=starting_state(self.value("warmStart"), module)),
            self._plan_schedule(),
            tuple(self.value("callbacks")),
        )
        strategy.check(plan)
        check_run(plan, module, strategy)
        feed = self._plan_feed(dataset, module)
        fit = Fit(
            spark=spark,
            dataset=dataset,
            module=module,
            feed=feed,
            plan=plan,
            strategy=strategy,
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
                keeps_on_interrupt=self.value("onInterrupt") == "stop-and-keep",
                name=f"sparkdml: fit {type(module).__name__}",
            ),
            fingerprint=self._describe_run(module, plan.task, feed),
        )
        fit.check()
        return fit

    def _build_module(self) -> nn.Module:
        """Build the module at the driver, which finds most mistakes before any job."""
        strategy: Strategy = self.value("strategy")
        needed = ("model",) if strategy.has_own_optimizer else ("model", "optimizer")
        for name in needed:
            if not self.isDefined(name):
                raise ParameterError(name, None, "given", f"Pass {name}= to TorchEstimator.")
        # CrossValidator may fit on several threads, and torch's random state is global.
        with _BUILDING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.value("seed"))
            module = build_module(self.value("model"))
        check_parameters(module, [p for p in module.parameters() if p.requires_grad])
        return module

    def _describe_run(self, module: nn.Module, task: TaskPlan, feed: FeedPlan) -> dict[str, str]:
        """Return the fingerprint, with the values that the run derives from open Params."""
        weights = task.warm_start
        return self._fingerprint(
            {
                "model": module,
                "optimizer": task.optimizer,
                "featuresCol": task.features,
                "labelCol": task.label,
                "compile": task.compile or None,
                "warmStart": None if weights is None else describe_state(weights),
                "inputCols": tuple(column.name for column in feed.inputs) or None,
            }
        )

    def _plan_feed(self, dataset: DataFrame, module: nn.Module) -> FeedPlan:
        return plan_feed(
            dataset.schema,
            FeedWishes(
                features=self.feature_columns(),
                label=self.label_column(),
                weight=self.value("weightCol"),
                is_step=self.value("step") is not None,
                floating=floating_type(module),
                seed=self.value("seed"),
                validation=self.value("validation"),
                stratify=self.value("stratifyCol"),
                sampling=self.value("samplingCol"),
                preprocess=self.value("preprocess"),
                inputs=self.value("inputCols"),
                collate=self.value("collate"),
                augment=self.value("augment"),
                drop_last=self.value("dropLast"),
                check_finite=self.value("checkFinite"),
            ),
        )

    def _plan_task(self) -> TaskPlan:
        return TaskPlan(
            model=self.value("model"),
            loss=self.value("loss"),
            optimizer=self.value("optimizer") or NoOptimizer,
            features=tuple(self.feature_columns()),
            label=self.label_column(),
            metrics=self.value("metrics"),
            batch_size=self.value("batchSize"),
            clip_norm=self.value("clipNorm"),
            step=self.value("step"),
            weight=self.value("weightCol"),
            parameter_groups=self.value("parameterGroups"),
            precision=self.value("precision"),
            compile=self.value("compile"),
            sync_batch_norm=self.value("syncBatchNorm"),
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
        model: TorchModel = self._model_class._make(
            module=module,
            source=self.value("model"),
            weights=fitted.result.weights,
            loss=self.value("loss"),
            metrics=self.value("metrics"),
            features=feed.known(self.feature_columns()),
            output_shape=fitted.output_shape,
            history=history,
            step=self.value("step"),
            loss_names=self._plan_task().loss_names,
            inputs=feed.inputs,
        )
        model._resetUid(self.uid)
        return self._copyValues(model)
