"""TorchModel: a fitted module as a Spark ML Model."""

from __future__ import annotations

import copy
import hashlib
from functools import partial
from typing import TYPE_CHECKING, Literal

from pyspark.ml import Model
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, StructField, StructType
from torch import nn

from sparkdml.errors import DataError
from sparkdml.feed.columns import Column, describe_columns
from sparkdml.history import History
from sparkdml.params import PredictionParams
from sparkdml.persistence import ModelPersistence
from sparkdml.predict import ModelSpec, evaluate_batches, predict_batches
from sparkdml.training.job import load_weights
from sparkdml.training.objective import CLASS_INDEX, LossFunction
from sparkdml.training.task import Metric, ModelSource, Totals

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class TorchModel(Model, PredictionParams, ModelPersistence):
    """What `TorchEstimator.fit` returns. `transform` adds `predictionCol`, streaming by Arrow."""

    history: History
    _module: nn.Module
    _source: ModelSource
    _weights: bytes
    _loss: LossFunction
    _metrics: dict[str, Metric]
    _features: tuple[Column, ...]
    _output_shape: list[int]

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**self.DEFAULTS)

    @classmethod
    def _make(
        cls,
        module: nn.Module,
        source: ModelSource,
        weights: bytes,
        loss: LossFunction,
        metrics: dict[str, Metric],
        features: tuple[Column, ...],
        output_shape: list[int],
        history: History,
    ) -> TorchModel:
        model = cls()
        model._module = load_weights(copy.deepcopy(module), weights).eval()
        model._source, model._weights = source, weights
        model._loss, model._metrics = loss, metrics
        model._features, model._output_shape = features, output_shape
        model.history = history
        return model

    @property
    def module(self) -> nn.Module:
        """The trained nn.Module, in eval mode, on the CPU."""
        return self._module

    def evaluate(self, dataset: DataFrame) -> dict[str, float]:
        """The mean loss and metrics over the rows of a DataFrame."""
        features = self._checked_features(dataset)
        label = describe_columns(dataset.schema, [self.value("labelCol")])[0]
        label = label.cast(self._floating)
        names = list(dict.fromkeys([*(column.name for column in features), label.name]))
        function = partial(evaluate_batches, self._spec(features), self._loss, self._metrics, label)
        rows = dataset.select(*(f"`{name}`" for name in names)).mapInArrow(
            function, "stats array<double>"
        )
        totals = Totals()
        for row in rows.collect():
            totals += Totals.of(row.stats)
        if not totals.rows:
            raise DataError("the data has no rows, so there is nothing to evaluate")
        return totals.means(self._metrics)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        features = self._checked_features(dataset)
        name = self.value("predictionCol")
        if name in dataset.columns:
            raise DataError(
                f"the DataFrame has a column {name!r} already: drop it, or set predictionCol"
            )
        schema = StructType([*dataset.schema.fields, StructField(name, self._prediction_type())])
        kind: Literal["raw", "class"] = "class" if self._predicts_class() else "raw"
        return dataset.mapInArrow(
            partial(predict_batches, self._spec(features), name, kind), schema
        )

    def _checked_features(self, dataset: DataFrame) -> tuple[Column, ...]:
        """The feature columns of this DataFrame, read as they were in training."""
        found = describe_columns(dataset.schema, self.feature_columns())
        for column, trained in zip(found, self._features, strict=True):
            if column.is_floating != trained.is_floating or (column.depth != trained.depth):
                raise DataError(
                    f"column {column.name!r} is {_describe(column)}, but the model was trained on "
                    f"{_describe(trained)}"
                )
        return tuple(column.cast(self._floating) for column in found)

    @property
    def _floating(self) -> str:
        kind = str(next(self._module.parameters()).dtype).removeprefix("torch.")
        return kind if kind in ("float32", "float64") else "float32"

    def _predicts_class(self) -> bool:
        wanted = self.value("output")
        if wanted == "auto":
            return isinstance(self._loss, CLASS_INDEX) and len(self._output_shape) == 1
        if wanted == "class" and not self._output_shape:
            raise DataError("output='class' needs a model with one output for each class")
        return bool(wanted == "class")

    def _prediction_type(self) -> DataType:
        shape = self._output_shape[:-1] if self._predicts_class() else self._output_shape
        if shape in ([], [1]):
            return DoubleType()
        kind: DataType = FloatType()
        for _ in shape:
            kind = ArrayType(kind, containsNull=False)
        return kind

    def _spec(self, features: tuple[Column, ...]) -> ModelSpec:
        digest = hashlib.sha256(self._weights).hexdigest()
        return ModelSpec(
            key=f"{self.uid}-{digest}",
            model=self._source,
            weights=self._weights,
            features=features,
            batch_size=max(1024, self.value("batchSize")),
        )


def _describe(column: Column) -> str:
    return f"{column.kind} of {column.dtype}" + (f" (depth {column.depth})" * (column.depth > 1))
