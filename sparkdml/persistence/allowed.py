"""What a saved model may name without a pickle: which modules are imported, what of them is used.

The author of a file chooses what is built or called, and with which arguments. An annotation is no
permission: torch alone has a thousand routines that are annotated to return a module or a tensor,
and some of them call their arguments. So the lists here are closed:

- classes of torch's modules, optimizers and schedulers, and the functions of torch.nn.functional;
- the values of Params among sparkdml's own classes;
- of packages that the caller allows, classes of the same kinds, strategies and callbacks, what is
  marked by `@dml.factory`, and plain functions as the value of a Param that sparkdml itself calls,
  with rows and tensors, never with arguments from the file.

A name is checked before the import. `allow_pickle()` turns all checks off. Driver only; pure.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from sparkdml.errors import DataError
from sparkdml.factories import is_factory
from sparkdml.persistence.permission import (
    ALLOW_PACKAGES_VARIABLE,
    is_extendable,
    is_package_allowed,
    is_pickle_allowed,
)
from sparkdml.recorded_names import current_module
from sparkdml.strategies.base import Strategy
from sparkdml.training.callbacks import Callback

# Not all of torch: fx.GraphModule, for one, compiles source text that it is given.
_TORCH = ("torch.nn.functional", "torch.nn.modules", "torch.optim")

_OWN = {
    "sparkdml.checkpoint.checkpoints": ("Checkpoints",),
    "sparkdml.checkpoint.keep": ("Keep",),
    "sparkdml.checkpoint.policy": ("Interval",),
    "sparkdml.compression.half": ("BF16", "FP16"),
    "sparkdml.compression.one_bit": ("OneBit",),
    "sparkdml.compression.power_sgd": ("PowerSGD",),
    "sparkdml.compression.top_k": ("TopK",),
    "sparkdml.feed.ragged": ("pad",),
    "sparkdml.observe.trackers": ("MLflow", "TensorBoard"),
    "sparkdml.parameter_server.consistency": ("ASP", "BSP", "SSP", "TAP", "Expulsion"),
    "sparkdml.parameter_server.downpour": ("Downpour",),
    "sparkdml.parameter_server.filters": ("Largest", "Significant"),
    "sparkdml.parameter_server.hybrid": ("Hybrid",),
    "sparkdml.parameter_server.optimizers": ("SGD", "Adagrad", "Adam", "Add"),
    "sparkdml.parameter_server.strategy": ("ParameterServer",),
    "sparkdml.strategies.adaptive_balance": ("AdaptiveBalance",),
    "sparkdml.strategies.allreduce": ("AllReduce",),
    "sparkdml.strategies.averaging": ("Averaging",),
    "sparkdml.strategies.backup_workers": ("BackupWorkers",),
    "sparkdml.strategies.decentralized.ad_psgd": ("ADPSGD",),
    "sparkdml.strategies.decentralized.gossip": ("Gossip",),
    "sparkdml.strategies.layered_sgd": ("LayeredSGD",),
    "sparkdml.strategies.local.block_momentum": ("BlockMomentum",),
    "sparkdml.strategies.local.easgd": ("EASGD",),
    "sparkdml.strategies.local.hogwild": ("Hogwild",),
    "sparkdml.strategies.local.local_sgd": ("LocalSGD",),
    "sparkdml.strategies.local.slow_mo": ("SlowMo",),
    "sparkdml.strategies.second_order.lbfgs": ("LBFGS",),
    "sparkdml.strategies.second_order.newton_cg": ("NewtonCG",),
    "sparkdml.training.callbacks.best_model": ("BestModel",),
    "sparkdml.training.callbacks.early_stopping": ("EarlyStopping",),
    "sparkdml.training.callbacks.ema": ("EMA",),
    "sparkdml.training.callbacks.gradient_monitor": ("GradientMonitor",),
    "sparkdml.training.callbacks.learning_rate_schedule": ("LearningRateSchedule",),
    "sparkdml.training.callbacks.time_limit": ("TimeLimit",),
}
OWN_VALUES = frozenset(f"{module}:{name}" for module, names in _OWN.items() for name in names)
_OWN_STAGES = frozenset(
    {
        "sparkdml.classification:TorchClassificationModel",
        "sparkdml.model:TorchModel",
        "sparkdml.regression:TorchRegressionModel",
    }
)

# Params whose value sparkdml itself calls, with rows, tensors or modules.
FUNCTION_PARAMS = frozenset(
    {
        "augment",
        "collate",
        "loss",
        "metrics",
        "parameterGroups",
        "predict",
        "preprocess",
        "step",
    }
)

HOW_TO_MARK = (
    "Mark it by @sparkdml.factory where it is defined, if it is harmless whatever it is called with"
)
_TRUST = "If you trust the file: with sparkdml.allow_pickle(): … around the load"


def is_known(path: str) -> bool:
    """Whether this path may be imported without permission."""
    module, _, name = path.partition(":")
    current = current_module(module, name)
    if any(current == one or current.startswith(f"{one}.") for one in _TORCH):
        return True
    return f"{current}:{name}" in OWN_VALUES | _OWN_STAGES


def package_of(path: str) -> str | None:
    """The package that `allow_packages` must name for this path, or None if it can't."""
    module = path.partition(":")[0]
    if not is_extendable(module):
        return None
    first, _, rest = module.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "sparkdml" else first


def check_import(path: Any, wanted_by: str) -> None:
    """Raise unless this path may be imported; nothing has been imported yet."""
    if is_pickle_allowed():
        return
    parts = path.split(":") if isinstance(path, str) else []
    if len(parts) != 2 or not all(one.isidentifier() for text in parts for one in text.split(".")):
        raise DataError(f"{wanted_by} is saved as {path!r}, which is no name of a module's member")
    if is_known(path) or is_package_allowed(current_module(*parts)):
        return
    package = package_of(path)
    raise DataError(
        f"{wanted_by} is saved as {path}, and load imports nothing but torch's layers and "
        "optimizers and sparkdml's own values unless it is allowed. "
        + (
            f"{_TRUST}"
            if package is None
            else f"If you trust the package: with sparkdml.allow_packages({package!r}): … around "
            f"the load, or set {ALLOW_PACKAGES_VARIABLE}={package}"
        )
    )


def check_found(path: str, value: Any, wanted_by: str) -> None:
    """Raise unless the value is defined under this very path: a module may import anything."""
    module, _, name = path.partition(":")
    where = (getattr(value, "__module__", None), getattr(value, "__qualname__", None))
    if where != (current_module(module, name), name) and not is_pickle_allowed():
        raise DataError(
            f"{wanted_by} is saved as {path}, but what has that name is defined as "
            f"{where[0]}:{where[1]}. Save the model again. {_TRUST}"
        )


def is_module_class(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, nn.Module)


def is_functional(value: Any) -> bool:
    """Whether it is a function of torch.nn.functional, by identity."""
    name = getattr(value, "__qualname__", "")
    return (
        inspect.isroutine(value)
        and getattr(nn.functional, name, None) is value
        and (value.__module__ == "torch.nn.functional")
    )


def may_be_called(value: Any) -> bool:
    """Whether it may be called with arguments from a file, and be an argument itself."""
    if inspect.isclass(value) and issubclass(
        value, nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler
    ):
        return True
    return is_functional(value) or is_factory(value)


def may_be_value(value: Any, param: str) -> bool:
    """Whether it may be the value of a Param by itself."""
    if may_be_called(value):
        return True
    return (
        param in FUNCTION_PARAMS and inspect.isfunction(value) and is_extendable(value.__module__)
    )


def may_be_built(kind: Any) -> bool:
    """Whether its objects may be rebuilt from their attributes."""
    if not inspect.isclass(kind):
        return False
    own = f"{kind.__module__}:{kind.__qualname__}" in OWN_VALUES
    theirs = issubclass(kind, Strategy | Callback) and is_extendable(kind.__module__)
    return own or theirs or is_factory(kind)


def makes_module(source: Any) -> bool:
    """Whether it may be called, at load, to make the module."""
    while type(source) is functools.partial:
        source = source.func
    return isinstance(source, nn.Module) or is_module_class(source) or is_factory(source)


def refuse(wanted_by: str, path: str, kind: str) -> DataError:
    """The error about something that is neither of the allowed kinds nor marked."""
    return DataError(
        f"{wanted_by} is saved as {kind} {path}, which is no class of a module, an optimizer or a "
        "scheduler, none of torch.nn.functional, no value of a Param, and not marked. "
        f"{HOW_TO_MARK}. {_TRUST}"
    )
