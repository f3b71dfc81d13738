"""TorchModel: a fitted module as a Spark ML Model. Driver only; workers run `inference`."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from pyspark import cloudpickle
from pyspark.ml import Model
from torch import Tensor, nn

from sparkdml.errors import DataError, ParameterError
from sparkdml.export import ModelToExport, save_exported, save_onnx
from sparkdml.feed.columns.base import Column
from sparkdml.feed.plan import FeedPlan
from sparkdml.history import History
from sparkdml.inference.apply import add_predictions, make_udf
from sparkdml.inference.evaluation import evaluate
from sparkdml.inference.outputs import SINGLE, Encoder, Output, choose_columns
from sparkdml.inference.predictor import PredictionPlan
from sparkdml.inference.probe import find_outputs
from sparkdml.inference.reading import plan_inputs, plan_reading
from sparkdml.inference.structure import Inseparable, fill, make_skeleton
from sparkdml.inference.weights import ShippedModel, Weights
from sparkdml.params import PredictionParams
from sparkdml.persistence import ModelPersistence
from sparkdml.session import find_session
from sparkdml.training.forward import OutputShape
from sparkdml.training.modules import Modules, floating_type
from sparkdml.training.objective import CLASS_INDEX, LossFunction
from sparkdml.training.plan import Metric, ModelSource, StepFunction, TaskPlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class TorchModel(Model, PredictionParams, ModelPersistence):
    """What `TorchEstimator.fit` returns.

    `transform` adds `predictionCol`, or `outputCols`. Only the columns that the model reads are
    sent to Python, and each row is predicted once. It uses the GPU if Spark assigns one to tasks.

    Weights of more than a few megabytes are a memory-mapped file, at the driver and on the workers:
    Spark copies it to each host once. On Spark Connect it is an artifact of the session.
    """

    history: History
    _source: ModelSource
    _weights: Weights
    _loss: LossFunction | None
    _step: StepFunction | None
    _metrics: Mapping[str, Metric] | Sequence[str]
    _loss_names: tuple[str, ...]
    _features: tuple[Column, ...]
    _inputs: tuple[Column, ...]
    _output_shape: OutputShape | None
    _probed: tuple[Any, tuple[Output, ...]] | None  # the value of predict, and what it returned
    _skeleton: nn.Module | None
    _own_module: nn.Module | None

    def __init__(self) -> None:
        super().__init__()
        self._set_defaults()

    @classmethod
    def _make(
        cls,
        module: nn.Module,
        source: ModelSource,
        weights: Weights | bytes | Mapping[str, Tensor],
        loss: LossFunction | None,
        metrics: Mapping[str, Metric] | Sequence[str],
        features: tuple[Column, ...],
        output_shape: OutputShape | None,
        history: History,
        step: StepFunction | None = None,
        loss_names: tuple[str, ...] = (),
        inputs: tuple[Column, ...] = (),
    ) -> Any:
        """Only the structure of `module` is used; `inputs` are the columns of preprocess."""
        model = cls()
        model._source, model._weights = source, Weights.of(weights)
        model._loss, model._step, model._loss_names = loss, step, loss_names
        model._metrics, model._features, model._inputs = metrics, features, inputs
        model._output_shape, model._probed = output_shape, None
        model.history = history
        model._skeleton = model._own_module = None
        try:
            model._skeleton = make_skeleton(module)
        except Inseparable:
            model._own_module = copy.deepcopy(module)
            model._own_module.load_state_dict(model._weights.state())
            model._own_module.eval()
        return model

    @property
    def module(self) -> nn.Module:
        """The trained nn.Module, in eval mode, on the CPU."""
        if self._own_module is None:
            assert self._skeleton is not None
            self._own_module = fill(self._skeleton, self._weights.state()).eval()
        return self._own_module

    def evaluate(self, dataset: DataFrame) -> dict[str, float]:
        """Return the mean loss and metrics over a DataFrame; with step=, the values it declares."""
        feed = self._reading(dataset, with_targets=True)
        return evaluate(dataset, self._plan(find_session(dataset), feed, ()), self._task())

    def udf(self, column: str | None = None, spark: SparkSession | None = None) -> Any:
        """Return the model as a function of columns, for SQL and for `select`.

        Its arguments are the columns that the model reads, in the order of `featuresCol` (or of
        `inputCols`, with preprocess). `column` names one of the columns that `transform` adds; by
        default it is the prediction, or with `outputCols` a struct of all of them.

        >>> spark.udf.register("predict", fitted.udf())
        >>> spark.sql("SELECT id, predict(features) FROM visits")
        """
        from pyspark.sql import SparkSession as Session

        session = spark or Session.active()
        columns = self._columns(self._known_outputs())
        names = [name for name, _ in columns]
        wanted = column
        if column is None and self.value("predictionCol") in names:
            wanted = self.value("predictionCol")
        if wanted is not None:
            if wanted not in names:
                raise ParameterError("column", wanted, f"one of {', '.join(names)}")
            columns = (columns[names.index(wanted)],)
        feed = plan_inputs(self, self._features, self._inputs, self._floating)
        return make_udf(self._plan(session, feed, columns))

    def save_onnx(
        self, path: str | os.PathLike[str], example: Any, tolerance: float = 1e-4, **options: Any
    ) -> None:
        """Write the module as ONNX, and compare it in onnxruntime: see `export.save_onnx`."""
        save_onnx(self._to_export(), path, example, tolerance, **options)

    def save_exported(
        self, path: str | os.PathLike[str], example: Any, tolerance: float = 1e-5
    ) -> None:
        """Write the module with torch.export, and compare it: see `export.save_exported`."""
        save_exported(self._to_export(), path, example, tolerance)

    def _to_export(self) -> ModelToExport:
        self._check_predict()
        return ModelToExport(
            self.module,
            self.value("predict"),
            feature_columns=self.feature_columns(),
            prediction_column=self.value("predictionCol"),
            plan_reading=partial(self._reading, with_targets=False),
        )

    def _transform(self, dataset: DataFrame) -> DataFrame:
        return add_predictions(dataset, [self._prediction_plan(dataset)])

    def _prediction_plan(self, dataset: DataFrame) -> PredictionPlan:
        spark = find_session(dataset)
        feed = self._reading(dataset, with_targets=False)
        if self.value("predict") is None and self._output_shape is not None:
            outputs = self._known_outputs()
        else:
            self._check_predict()
            if self._found_outputs is None:
                found = find_outputs(dataset, self._plan(spark, feed, ()))
                self._probed = (self.value("predict"), found)
            outputs = self._known_outputs()
        return self._plan(spark, feed, self._columns(outputs))

    def _known_outputs(self) -> tuple[Output, ...]:
        """Return what the model returns for a row, if that is known without running it."""
        if self.value("predict") is None and self._output_shape is not None:
            kind = self._floating
            if isinstance(self._output_shape, dict):
                shapes = self._output_shape.items()
                return tuple(Output(name, tuple(shape), kind) for name, shape in shapes)
            return (Output(SINGLE, tuple(self._output_shape), kind),)
        if self._found_outputs is None:
            self._check_predict()
            raise DataError(
                "the outputs of predict= are unknown before the first transform: call it once on "
                "a DataFrame with some rows"
            )
        return self._found_outputs

    @property
    def _found_outputs(self) -> tuple[Output, ...] | None:
        """Return what a run of `predict` returned; another function may return other outputs."""
        if self._probed is None or self._probed[0] is not self.value("predict"):
            return None
        return self._probed[1]

    def _check_predict(self) -> None:
        names = list(self._skeleton_or_module) if self._has_several else []
        predict = self.value("predict")
        if predict is None and names:
            raise ParameterError(
                "predict",
                None,
                f"a function (modules, batch) -> outputs, or one of {', '.join(names)}",
                "There are several modules, and transform must know what to compute: "
                "fitted.setPredict(…).",
            )
        if isinstance(predict, str) and predict not in names:
            allowed = f"one of {', '.join(names)}" if names else "a function (module, batch)"
            raise ParameterError("predict", predict, f"{allowed}, since it names a module")

    def _columns(self, outputs: tuple[Output, ...]) -> tuple[tuple[str, Encoder], ...]:
        """Return the columns that transform adds, and how each is made."""
        return choose_columns(
            outputs,
            self.value("predictionCol"),
            names=self.value("outputCols"),
            wanted=self.value("output"),
            classifies=isinstance(self._loss, CLASS_INDEX),
        )

    def _reading(self, dataset: DataFrame, with_targets: bool) -> FeedPlan:
        return plan_reading(
            self,
            dataset.schema,
            trained=self._features,
            floating=self._floating,
            with_targets=with_targets,
            is_supervised=self._step is None,
        )

    def _plan(
        self, spark: SparkSession, feed: FeedPlan, columns: tuple[tuple[str, Encoder], ...]
    ) -> PredictionPlan:
        names = [column.name for column in (*feed.inputs, *feed.columns)]
        structure = self._structure()
        return PredictionPlan(
            model=ShippedModel(
                self._weights.ship(spark), structure, self._source if structure is None else None
            ),
            inputs=tuple(dict.fromkeys(names)),
            feed=feed,
            features=tuple(self.feature_columns()),
            predict=self.value("predict"),
            batch_size=self.value("batchSize"),
            columns=columns,
        )

    def _task(self) -> TaskPlan:
        """Return the task as in training, as far as evaluate needs it."""
        is_step = self._step is not None
        return TaskPlan(
            model=self._source,
            loss=self._loss,
            optimizer=dict.fromkeys(self._loss_names, torch.optim.SGD) or torch.optim.SGD,
            features=tuple(self.feature_columns()),
            label=None if is_step and not self.isSet("labelCol") else self.value("labelCol"),
            metrics=self._metrics,
            batch_size=max(1024, self.value("batchSize")),
            step=self._step,
            weight=self.value("weightCol"),
        )

    def _structure(self) -> bytes | None:
        """Return the skeleton to ship; None if only the source can be shipped."""
        if self._skeleton is None:
            return None
        try:
            structure: bytes = cloudpickle.dumps(self._skeleton)  # type: ignore[no-untyped-call]
        except Exception:  # parametrized modules refuse, and others may raise anything
            return None
        return structure

    @property
    def _skeleton_or_module(self) -> Any:
        return self._own_module if self._skeleton is None else self._skeleton

    @property
    def _has_several(self) -> bool:
        return isinstance(self._skeleton_or_module, Modules)

    @property
    def _floating(self) -> str:
        return floating_type(self._skeleton_or_module)


def transform_with(models: Sequence[TorchModel], dataset: DataFrame) -> DataFrame:
    """Add the columns of several models in one pass: rows are sent to Python once in all.

    >>> dml.transform_with([churn.setPredictionCol("churn"), value], customers)
    """
    if not models:
        raise ParameterError("models", list(models), "at least one fitted model")
    for model in models:
        if not isinstance(model, TorchModel):
            raise ParameterError(
                "models", type(model).__name__, "a list of fitted models of sparkdml"
            )
    return add_predictions(dataset, [model._prediction_plan(dataset) for model in models])
