"""Params that a fitted model has as well: columns, types, and what prepares the rows."""

from __future__ import annotations

from sparkdml.params.objects import to_columns, to_predict, to_thresholds
from sparkdml.params.param import (
    AccessibleParams,
    Fingerprint,
    columns,
    function,
    one_of,
    param,
    text,
    whole,
)


class PredictionParams(AccessibleParams):
    """Params that estimators and fitted models share."""

    featuresCol = param(
        "featuresCol",
        "column of the model's input, or a list: one for each input",
        to_columns,
        default="features",
        fingerprint=Fingerprint.ALWAYS,
    )
    labelCol = param(
        "labelCol",
        "column of the targets; with step= read only if it is set",
        text("labelCol"),
        default="label",
        fingerprint=Fingerprint.ALWAYS,
    )
    weightCol = param(
        "weightCol",
        "column of the rows' weights in the loss",
        text("weightCol"),
        fingerprint=Fingerprint.WHEN_USED,
    )
    predictionCol = param(
        "predictionCol",
        "column that transform adds",
        text("predictionCol"),
        default="prediction",
        fingerprint=Fingerprint.NEVER,
    )
    outputCols = param(
        "outputCols",
        "columns that transform adds instead of predictionCol: one for each of several outputs",
        columns("outputCols"),
        fingerprint=Fingerprint.NEVER,
    )
    predict = param(
        "predict",
        "what transform computes, if not model(*features): a function (modules, batch) -> outputs, "
        "or the name of one of several modules",
        to_predict,
        fingerprint=Fingerprint.NEVER,
        is_object=True,
    )
    batchSize = param(
        "batchSize",
        "rows that a worker processes at once",
        whole("batchSize", 1),
        default=64,
        fingerprint=Fingerprint.ALWAYS,
    )
    output = param(
        "output",
        "what predictionCol holds: 'raw' outputs, the 'class' with the largest output, or 'auto': "
        "the class for CrossEntropyLoss and NLLLoss, else raw",
        one_of("output", "auto", "raw", "class"),
        default="auto",
        fingerprint=Fingerprint.NEVER,
    )
    preprocess = param(
        "preprocess",
        "function (Arrow record batch) -> columns by name (arrays, tensors), called on the worker "
        "once per row, before training and in transform",
        function("preprocess", "a function of an Arrow record batch that returns columns by name"),
        fingerprint=Fingerprint.WHEN_USED,
        is_object=True,
    )
    inputCols = param(
        "inputCols",
        "columns, of any type, that preprocess is given; default: those of features, label and "
        "weight that the DataFrame has",
        columns("inputCols"),
        fingerprint=Fingerprint.WHEN_USED,
    )
    collate = param(
        "collate",
        "function (columns by name, ragged ones too) -> tensors by name: makes a batch of rows of "
        "different lengths; dml.pad() is one",
        function("collate", "a function of columns by name that returns tensors by name"),
        fingerprint=Fingerprint.WHEN_USED,
        is_object=True,
    )

    def feature_columns(self) -> list[str]:
        value = self.value("featuresCol")
        return [value] if isinstance(value, str) else list(value)


class ClassificationParams(AccessibleParams):
    """Params of classifiers, named as in Spark's own."""

    rawPredictionCol = param(
        "rawPredictionCol",
        "column of the model's outputs, a vector",
        text("rawPredictionCol"),
        default="rawPrediction",
        fingerprint=Fingerprint.NEVER,
    )
    probabilityCol = param(
        "probabilityCol",
        "column of the classes' probabilities, a vector",
        text("probabilityCol"),
        default="probability",
        fingerprint=Fingerprint.NEVER,
    )
    thresholds = param(
        "thresholds",
        "one for each class: the class with the largest probability/threshold is predicted",
        to_thresholds,
        fingerprint=Fingerprint.NEVER,
    )
