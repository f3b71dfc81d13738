"""The Spark ML Params of estimator and model: one place for their names, docs, checks, defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from pyspark.ml.param import Param, Params
from torch import nn

from sparkdml.checkpoint.checkpoints import Checkpoints
from sparkdml.errors import ParameterError
from sparkdml.observe.trackers import check_tracker
from sparkdml.strategies.base import Strategy
from sparkdml.training.callbacks import Callback

Converter = Callable[[Any], Any]


def whole(name: str, least: int) -> Converter:
    def convert(value: Any) -> int:
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
            raise ParameterError(name, value, f"a whole number of at least {least}")
        return int(value)

    return convert


def number(name: str, allowed: str, test: Callable[[float], bool]) -> Converter:
    def convert(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not test(value):
            raise ParameterError(name, value, allowed)
        return float(value)

    return convert


def one_of(name: str, *choices: object) -> Converter:
    def convert(value: Any) -> Any:
        if value not in choices or isinstance(value, bool):
            raise ParameterError(name, value, f"one of {', '.join(map(repr, choices))}")
        return value

    return convert


def text(name: str) -> Converter:
    def convert(value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise ParameterError(name, value, "the name of a column")
        return value

    return convert


def path(name: str) -> Converter:
    def convert(value: Any) -> str:
        if not isinstance(value, str | os.PathLike) or not os.fspath(value):
            raise ParameterError(name, value, "the path of a file")
        return str(os.fspath(value))

    return convert


def function(name: str, what: str) -> Converter:
    def convert(value: Any) -> Any:
        if not callable(value):
            raise ParameterError(name, value, what)
        return value

    return convert


def flag(name: str) -> Converter:
    def convert(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ParameterError(name, value, "True or False")
        return value

    return convert


def to_columns(value: Any) -> str | list[str]:
    if isinstance(value, str) and value:
        return value
    names = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ParameterError(
            "featuresCol", value, "a column's name, or a list of names: one for each model input"
        )
    return names


def to_model(value: Any) -> Any:
    if not isinstance(value, nn.Module) and not callable(value):
        raise ParameterError(
            "model", value, "an nn.Module, or a function of no arguments that makes one"
        )
    return value


def to_optimizer(value: Any) -> Any:
    import torch

    if isinstance(value, torch.optim.Optimizer):
        raise ParameterError(
            "optimizer",
            type(value).__name__,
            "a function that takes the parameters and makes an optimizer, since each worker has "
            "parameters of its own",
            f"For instance functools.partial(torch.optim.{type(value).__name__}, lr=0.1).",
        )
    return function("optimizer", "a function that takes the parameters and makes an optimizer")(
        value
    )


def to_metrics(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and callable(metric) for name, metric in value.items()
    ):
        raise ParameterError("metrics", value, "a dict of functions (outputs, targets) -> value")
    for name in value:
        if name in RESERVED or name.startswith("val_"):
            raise ParameterError(
                "metrics", name, "named otherwise: the history has a column of that name"
            )
    return dict(value)


def to_callbacks(value: Any) -> list[Callback]:
    if not isinstance(value, Sequence) or not all(isinstance(c, Callback) for c in value):
        raise ParameterError("callbacks", value, "a list of dml.Callback objects")
    return list(value)


def to_strategy(value: Any) -> Strategy:
    if not isinstance(value, Strategy):
        raise ParameterError("strategy", value, "a strategy, for instance dml.AllReduce()")
    return value


def to_checkpoints(value: Any) -> Checkpoints:
    if isinstance(value, str):
        return Checkpoints(value)
    if not isinstance(value, Checkpoints):
        raise ParameterError("checkpoint", value, "a path, or dml.Checkpoints(path, every=, …)")
    return value


def to_validation(value: Any) -> float | str:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ParameterError(
            "validation", value, "a fraction between 0 and 1, or the name of a boolean column"
        )
    return float(value)


RESERVED = {"epoch", "loss", "rows", "steps", "seconds", "rows_per_second"}
_SECONDS = "a number of seconds above 0"


def _param(name: str, doc: str, convert: Converter) -> Param[Any]:
    return Param(Params._dummy(), name, doc, convert)


class AccessibleParams(Params):
    """Spark's `setX` and `getX` for every Param that a class has, without writing out each."""

    DEFAULTS: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in [name for name, value in vars(cls).items() if isinstance(value, Param)]:
            _add_accessors(cls, name)

    def value(self, name: str) -> Any:
        """A Param's value, or None if it has none."""
        param = self.getParam(name)
        return self.getOrDefault(param) if self.isDefined(param) else None


def _add_accessors(cls: type, name: str) -> None:
    title = name[0].upper() + name[1:]

    def setter(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    def getter(self: Any) -> Any:
        return self.value(name)

    setter.__doc__ = f"Set `{name}`."
    getter.__doc__ = f"The value of `{name}`, or None."
    for prefix, method in (("set", setter), ("get", getter)):
        method.__name__ = f"{prefix}{title}"
        if not hasattr(cls, method.__name__):
            setattr(cls, method.__name__, method)


class PredictionParams(AccessibleParams):
    """What a fitted model needs to know, too."""

    featuresCol = _param(
        "featuresCol", "column of the model's input, or a list: one for each input", to_columns
    )
    labelCol = _param("labelCol", "column of the targets", text("labelCol"))
    predictionCol = _param("predictionCol", "column that transform adds", text("predictionCol"))
    batchSize = _param(
        "batchSize", "rows a worker takes through the model at once", whole("batchSize", 1)
    )
    output = _param(
        "output",
        "what predictionCol holds: 'raw' outputs, the 'class' with the largest output, or 'auto': "
        "the class for CrossEntropyLoss and NLLLoss, else raw",
        one_of("output", "auto", "raw", "class"),
    )

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "featuresCol": "features",
        "labelCol": "label",
        "predictionCol": "prediction",
        "batchSize": 64,
        "output": "auto",
    }

    def feature_columns(self) -> list[str]:
        value = self.value("featuresCol")
        return [value] if isinstance(value, str) else list(value)


class TrainingParams(PredictionParams):
    """What only training needs to know."""

    model = _param("model", "an nn.Module, or a function that makes one", to_model)
    loss = _param(
        "loss",
        "(outputs, targets) -> a scalar, the batch's mean, or one value a row",
        function("loss", "a function (outputs, targets) -> loss"),
    )
    optimizer = _param("optimizer", "(parameters) -> torch optimizer", to_optimizer)
    metrics = _param(
        "metrics",
        "name -> (outputs, targets) -> a scalar, the batch's mean, or one value a row",
        to_metrics,
    )
    callbacks = _param("callbacks", "dml.Callback objects, called on every rank", to_callbacks)
    strategy = _param("strategy", "how the workers agree", to_strategy)
    epochs = _param("epochs", "passes over the data", whole("epochs", 1))
    numWorkers = _param(
        "numWorkers", "barrier tasks; unset: as many as there are slots", whole("numWorkers", 1)
    )
    seed = _param("seed", "of initial weights, shards, shuffling and dropout", whole("seed", 0))
    validation = _param(
        "validation", "fraction of rows to hold out, or a boolean column", to_validation
    )
    shuffle = _param("shuffle", "shuffle anew each epoch", flag("shuffle"))
    gradientAccumulation = _param(
        "gradientAccumulation",
        "batches whose gradients are added up before a step",
        whole("gradientAccumulation", 1),
    )
    clipNorm = _param(
        "clipNorm",
        "largest norm of the agreed gradient",
        number("clipNorm", "a number above 0", lambda value: value > 0),
    )
    cpusPerWorker = _param(
        "cpusPerWorker", "torch threads a worker; unset: spark.task.cpus", whole("cpusPerWorker", 1)
    )
    gpusPerWorker = _param("gpusPerWorker", "GPUs a worker, 0 or 1", whole("gpusPerWorker", 0))
    slotTimeout = _param(
        "slotTimeout",
        "seconds to wait for executors that are still registering",
        number("slotTimeout", "0 or more seconds", lambda value: value >= 0),
    )
    heartbeatTimeout = _param(
        "heartbeatTimeout",
        "silent seconds after which a worker is given up",
        number("heartbeatTimeout", _SECONDS, lambda value: value > 0),
    )
    checkpoint = _param(
        "checkpoint", "a dml.Checkpoints, or its path: where the run is saved", to_checkpoints
    )
    maxRestarts = _param(
        "maxRestarts",
        "with checkpoint=: failures that are let pass without a new checkpoint in between",
        whole("maxRestarts", 0),
    )
    minWorkers = _param(
        "minWorkers", "workers to go on with after a failure, at least", whole("minWorkers", 1)
    )
    replacementSeconds = _param(
        "replacementSeconds",
        "seconds to wait for an executor in place of a lost one, before going on with fewer",
        number("replacementSeconds", "0 or more seconds", lambda value: value >= 0),
    )
    timeline = _param(
        "timeline", "file at the driver for a Chrome/Perfetto trace of all ranks", path("timeline")
    )
    logs = _param(
        "logs",
        "'driver': what workers print and log is shown at the driver, with rank and host",
        one_of("logs", "driver"),
    )
    tracker = _param(
        "tracker",
        "where numbers are logged: dml.MLflow(…), dml.TensorBoard(…), or anything with "
        "log(step, metrics) and close()",
        check_tracker,
    )
    verbose = _param(
        "verbose", "0: silent, 1: a line of progress, 2: details", one_of("verbose", 0, 1, 2)
    )

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **PredictionParams.DEFAULTS,
        "metrics": {},
        "callbacks": [],
        "epochs": 1,
        "seed": 0,
        "shuffle": True,
        "gradientAccumulation": 1,
        "gpusPerWorker": 0,
        "slotTimeout": 60.0,
        "heartbeatTimeout": 8.0,
        "maxRestarts": 3,
        "minWorkers": 1,
        "replacementSeconds": 60.0,
        "verbose": 1,
    }
