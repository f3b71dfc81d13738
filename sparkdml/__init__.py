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
    from sparkdml.classification import TorchClassificationModel as TorchClassificationModel
    from sparkdml.classification import TorchClassifier as TorchClassifier
    from sparkdml.errors import CheckpointError as CheckpointError
    from sparkdml.errors import DataError as DataError
    from sparkdml.errors import DryRunError as DryRunError
    from sparkdml.errors import ExportError as ExportError
    from sparkdml.errors import NonFiniteLoss as NonFiniteLoss
    from sparkdml.errors import NotEnoughSlots as NotEnoughSlots
    from sparkdml.errors import ParameterError as ParameterError
    from sparkdml.errors import SetupError as SetupError
    from sparkdml.errors import SparkDMLError as SparkDMLError
    from sparkdml.errors import StoreError as StoreError
    from sparkdml.errors import WorkerError as WorkerError
    from sparkdml.errors import WorkerLost as WorkerLost
    from sparkdml.estimator import TorchEstimator as TorchEstimator
    from sparkdml.feed.dataset import Dataset as Dataset
    from sparkdml.feed.ragged import Ragged as Ragged
    from sparkdml.feed.ragged import pad as pad
    from sparkdml.history import History as History
    from sparkdml.model import TorchModel as TorchModel
    from sparkdml.model import transform_with as transform_with
    from sparkdml.observe.trackers import MLflow as MLflow
    from sparkdml.observe.trackers import TensorBoard as TensorBoard
    from sparkdml.online import OnlineTrainer as OnlineTrainer
    from sparkdml.persistence import allow_pickle as allow_pickle
    from sparkdml.regression import TorchRegressionModel as TorchRegressionModel
    from sparkdml.regression import TorchRegressor as TorchRegressor
    from sparkdml.runtime.api import run as run
    from sparkdml.runtime.context import Context as Context
    from sparkdml.server.consistency import ASP as ASP
    from sparkdml.server.consistency import BSP as BSP
    from sparkdml.server.consistency import SSP as SSP
    from sparkdml.server.consistency import TAP as TAP
    from sparkdml.session import session_builder as session_builder
    from sparkdml.strategies.allreduce import AllReduce as AllReduce
    from sparkdml.strategies.averaging import Averaging as Averaging
    from sparkdml.strategies.base import Strategy as Strategy
    from sparkdml.strategies.layered_sgd import LayeredSGD as LayeredSGD
    from sparkdml.strategies.parameter_server import ParameterServer as ParameterServer
    from sparkdml.training.callbacks import EMA as EMA
    from sparkdml.training.callbacks import BestModel as BestModel
    from sparkdml.training.callbacks import Callback as Callback
    from sparkdml.training.callbacks import EarlyStopping as EarlyStopping
    from sparkdml.training.callbacks import GradientMonitor as GradientMonitor
    from sparkdml.training.callbacks import LearningRateSchedule as LearningRateSchedule
    from sparkdml.training.callbacks import TimeLimit as TimeLimit

__version__ = "0.1.0"

# Workers import this package too and need little of it, so names are fetched when first used.
_HOMES = {
    "ASP": "sparkdml.server.consistency",
    "AllReduce": "sparkdml.strategies.allreduce",
    "Averaging": "sparkdml.strategies.averaging",
    "BSP": "sparkdml.server.consistency",
    "BestModel": "sparkdml.training.callbacks",
    "Callback": "sparkdml.training.callbacks",
    "CheckpointError": "sparkdml.errors",
    "Checkpoints": "sparkdml.checkpoint.checkpoints",
    "Context": "sparkdml.runtime.context",
    "DataError": "sparkdml.errors",
    "Dataset": "sparkdml.feed.dataset",
    "EMA": "sparkdml.training.callbacks",
    "DryRunError": "sparkdml.errors",
    "EarlyStopping": "sparkdml.training.callbacks",
    "ExportError": "sparkdml.errors",
    "GradientMonitor": "sparkdml.training.callbacks",
    "History": "sparkdml.history",
    "Keep": "sparkdml.checkpoint.keep",
    "LayeredSGD": "sparkdml.strategies.layered_sgd",
    "LearningRateSchedule": "sparkdml.training.callbacks",
    "MLflow": "sparkdml.observe.trackers",
    "NonFiniteLoss": "sparkdml.errors",
    "NotEnoughSlots": "sparkdml.errors",
    "OnlineTrainer": "sparkdml.online",
    "ParameterError": "sparkdml.errors",
    "ParameterServer": "sparkdml.strategies.parameter_server",
    "Ragged": "sparkdml.feed.ragged",
    "SSP": "sparkdml.server.consistency",
    "SetupError": "sparkdml.errors",
    "SparkDMLError": "sparkdml.errors",
    "StoreError": "sparkdml.errors",
    "Strategy": "sparkdml.strategies.base",
    "TAP": "sparkdml.server.consistency",
    "TensorBoard": "sparkdml.observe.trackers",
    "TimeLimit": "sparkdml.training.callbacks",
    "TorchClassificationModel": "sparkdml.classification",
    "TorchClassifier": "sparkdml.classification",
    "TorchEstimator": "sparkdml.estimator",
    "TorchModel": "sparkdml.model",
    "TorchRegressionModel": "sparkdml.regression",
    "TorchRegressor": "sparkdml.regression",
    "WorkerError": "sparkdml.errors",
    "WorkerLost": "sparkdml.errors",
    "allow_pickle": "sparkdml.persistence",
    "pad": "sparkdml.feed.ragged",
    "run": "sparkdml.runtime.api",
    "session_builder": "sparkdml.session",
    "transform_with": "sparkdml.model",
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
