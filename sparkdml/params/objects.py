"""Converters of Params that hold modules, functions and sparkdml's own objects. Driver only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sparkdml.checkpoint.checkpoints import Checkpoints
from sparkdml.errors import ParameterError
from sparkdml.history_columns import check_metric
from sparkdml.params.param import function
from sparkdml.strategies.base import Strategy
from sparkdml.training.callbacks import Callback


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
    """Convert the source of a module, or a dict of sources by name."""
    allowed = "an nn.Module, a function of no arguments that returns one, or a dict of these"
    if isinstance(value, Mapping):
        _check_module_names("model", value, allowed)
        for name, source in value.items():
            if not isinstance(source, nn.Module) and not callable(source):
                raise ParameterError(f"model[{name!r}]", source, allowed)
        return dict(value)
    if not isinstance(value, nn.Module) and not callable(value):
        raise ParameterError("model", value, allowed)
    return value


def to_optimizer(value: Any) -> Any:
    """Convert a function that makes an optimizer, or a dict of them by the module's name."""
    if isinstance(value, Mapping):
        _check_module_names("optimizer", value, "a dict of functions by the modules' names")
        return {name: _optimizer(f"optimizer[{name!r}]", value[name]) for name in value}
    return _optimizer("optimizer", value)


def _optimizer(name: str, value: Any) -> Any:
    if isinstance(value, torch.optim.Optimizer):
        raise ParameterError(
            name,
            type(value).__name__,
            "a function that takes the parameters and makes an optimizer, since each worker has "
            "its own parameters",
            f"For instance functools.partial(torch.optim.{type(value).__name__}, lr=0.1).",
        )
    return function(name, "a function that takes the parameters and makes an optimizer")(value)


def _check_module_names(parameter: str, value: Mapping[Any, Any], allowed: str) -> None:
    if not value:
        raise ParameterError(parameter, value, allowed)
    for name in value:
        # Names that nn.ModuleDict accepts, and that attribute access can reach.
        if not isinstance(name, str) or not name.isidentifier() or hasattr(nn.ModuleDict, name):
            raise ParameterError(
                parameter, name, "named by identifiers that aren't attributes of nn.ModuleDict"
            )


def to_metrics(value: Any) -> dict[str, Any] | list[str]:
    """Convert functions by name, or with step= the names of the values that it returns."""
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) and callable(metric) for name, metric in value.items()):
            raise ParameterError(
                "metrics", value, "a dict of functions (outputs, targets) -> value"
            )
        names, found = list(value), dict(value)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        if not all(isinstance(name, str) and name for name in value) or len(set(value)) < len(
            value
        ):
            raise ParameterError("metrics", value, "a list of different names")
        names = found = list(value)  # type: ignore[assignment]
    else:
        raise ParameterError(
            "metrics",
            value,
            "a dict of functions (outputs, targets) -> value, or with step= a list of names",
        )
    for name in names:
        check_metric(name)
    return found


def to_predict(value: Any) -> Any:
    if not callable(value) and not (isinstance(value, str) and value):
        raise ParameterError(
            "predict", value, "a function (modules, batch) -> outputs, or the name of a module"
        )
    return value


def to_thresholds(value: Any) -> list[float]:
    """Convert thresholds as Spark's own classifiers do: one per class, at most one of them 0."""
    allowed = "a list of numbers of at least 0, one for each class, at most one of them 0"
    numbers = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if not numbers or not all(
        isinstance(n, int | float) and not isinstance(n, bool) and n >= 0 for n in numbers
    ):
        raise ParameterError("thresholds", value, allowed)
    if numbers.count(0) > 1:
        raise ParameterError("thresholds", value, allowed)
    return [float(n) for n in numbers]


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
