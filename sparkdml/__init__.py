"""sparkdml: distributed machine learning inside Spark.

Train any PyTorch model where Spark's data already lives. Start with `TorchEstimator`, or with `run`
for a function of your own in every worker.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkdml.checkpoint.checkpoints import Checkpoints as Checkpoints
    from sparkdml.checkpoint.keep import Keep as Keep
    from sparkdml.errors import CheckpointError as CheckpointError
    from sparkdml.errors import DataError as DataError
    from sparkdml.errors import NonFiniteLoss as NonFiniteLoss
    from sparkdml.errors import NotEnoughSlots as NotEnoughSlots
    from sparkdml.errors import ParameterError as ParameterError
    from sparkdml.errors import SetupError as SetupError
    from sparkdml.errors import SparkDMLError as SparkDMLError
    from sparkdml.errors import StoreError as StoreError
    from sparkdml.errors import WorkerError as WorkerError
    from sparkdml.errors import WorkerLost as WorkerLost
    from sparkdml.estimator import TorchEstimator as TorchEstimator
    from sparkdml.history import History as History
    from sparkdml.model import TorchModel as TorchModel
    from sparkdml.observe.trackers import MLflow as MLflow
    from sparkdml.observe.trackers import TensorBoard as TensorBoard
    from sparkdml.persistence import allow_pickle as allow_pickle
    from sparkdml.runtime.api import run as run
    from sparkdml.runtime.context import Context as Context
    from sparkdml.session import session_builder as session_builder
    from sparkdml.strategies.allreduce import AllReduce as AllReduce
    from sparkdml.strategies.base import Strategy as Strategy
    from sparkdml.training.callbacks import Callback as Callback
    from sparkdml.training.callbacks import EarlyStopping as EarlyStopping

__version__ = "0.1.0"

# Workers import this package too and need little of it, so names are fetched when first used.
_HOMES = {
    "AllReduce": "sparkdml.strategies.allreduce",
    "Callback": "sparkdml.training.callbacks",
    "CheckpointError": "sparkdml.errors",
    "Checkpoints": "sparkdml.checkpoint.checkpoints",
    "Context": "sparkdml.runtime.context",
    "DataError": "sparkdml.errors",
    "EarlyStopping": "sparkdml.training.callbacks",
    "History": "sparkdml.history",
    "Keep": "sparkdml.checkpoint.keep",
    "MLflow": "sparkdml.observe.trackers",
    "NonFiniteLoss": "sparkdml.errors",
    "NotEnoughSlots": "sparkdml.errors",
    "ParameterError": "sparkdml.errors",
    "SetupError": "sparkdml.errors",
    "SparkDMLError": "sparkdml.errors",
    "StoreError": "sparkdml.errors",
    "Strategy": "sparkdml.strategies.base",
    "TensorBoard": "sparkdml.observe.trackers",
    "TorchEstimator": "sparkdml.estimator",
    "TorchModel": "sparkdml.model",
    "WorkerError": "sparkdml.errors",
    "WorkerLost": "sparkdml.errors",
    "allow_pickle": "sparkdml.persistence",
    "run": "sparkdml.runtime.api",
    "session_builder": "sparkdml.session",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sparkdml' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
