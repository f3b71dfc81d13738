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
    from sparkdml.checkpoint.stores.base import CheckpointStore as CheckpointStore
    from sparkdml.classification import TorchClassificationModel as TorchClassificationModel
    from sparkdml.classification import TorchClassifier as TorchClassifier
    from sparkdml.comparison.advise import advise as advise
    from sparkdml.comparison.compare import compare as compare
    from sparkdml.compression.half import BF16 as BF16
    from sparkdml.compression.half import FP16 as FP16
    from sparkdml.compression.one_bit import OneBit as OneBit
    from sparkdml.compression.power_sgd import PowerSGD as PowerSGD
    from sparkdml.compression.top_k import TopK as TopK
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
    from sparkdml.factories import factory as factory
    from sparkdml.feed.dataset import Dataset as Dataset
    from sparkdml.feed.ragged import Ragged as Ragged
    from sparkdml.feed.ragged import pad as pad
    from sparkdml.history import History as History
    from sparkdml.linalg.multiply import multiply as multiply
    from sparkdml.model import TorchModel as TorchModel
    from sparkdml.model import transform_with as transform_with
    from sparkdml.observe.trackers import MLflow as MLflow
    from sparkdml.observe.trackers import TensorBoard as TensorBoard
    from sparkdml.online import OnlineTrainer as OnlineTrainer
    from sparkdml.parameter_server.consistency import ASP as ASP
    from sparkdml.parameter_server.consistency import BSP as BSP
    from sparkdml.parameter_server.consistency import SSP as SSP
    from sparkdml.parameter_server.consistency import TAP as TAP
    from sparkdml.parameter_server.consistency import Expulsion as Expulsion
    from sparkdml.parameter_server.downpour import Downpour as Downpour
    from sparkdml.parameter_server.hybrid import Hybrid as Hybrid
    from sparkdml.parameter_server.kvstore.serving import WithStore as WithStore
    from sparkdml.parameter_server.kvstore.store import KVStore as KVStore
    from sparkdml.parameter_server.kvstore.tables import ArrayTable as ArrayTable
    from sparkdml.parameter_server.kvstore.tables import MatrixTable as MatrixTable
    from sparkdml.parameter_server.kvstore.tables import SparseTable as SparseTable
    from sparkdml.parameter_server.strategy import ParameterServer as ParameterServer
    from sparkdml.persistence import allow_packages as allow_packages
    from sparkdml.persistence import allow_pickle as allow_pickle
    from sparkdml.programs.base import Program as Program
    from sparkdml.programs.base import run_program as run_program
    from sparkdml.regression import TorchRegressionModel as TorchRegressionModel
    from sparkdml.regression import TorchRegressor as TorchRegressor
    from sparkdml.runtime.api import run as run
    from sparkdml.runtime.worker.context import Context as Context
    from sparkdml.server_group import ServerGroup as ServerGroup
    from sparkdml.session import session_builder as session_builder
    from sparkdml.strategies.adaptive_balance import AdaptiveBalance as AdaptiveBalance
    from sparkdml.strategies.allreduce import AllReduce as AllReduce
    from sparkdml.strategies.averaging import Averaging as Averaging
    from sparkdml.strategies.backup_workers import BackupWorkers as BackupWorkers
    from sparkdml.strategies.base import Strategy as Strategy
    from sparkdml.strategies.decentralized.ad_psgd import ADPSGD as ADPSGD
    from sparkdml.strategies.decentralized.gossip import Gossip as Gossip
    from sparkdml.strategies.layered_sgd import LayeredSGD as LayeredSGD
    from sparkdml.strategies.local.block_momentum import BlockMomentum as BlockMomentum
    from sparkdml.strategies.local.easgd import EASGD as EASGD
    from sparkdml.strategies.local.hogwild import Hogwild as Hogwild
    from sparkdml.strategies.local.local_sgd import LocalSGD as LocalSGD
    from sparkdml.strategies.local.slow_mo import SlowMo as SlowMo
    from sparkdml.strategies.second_order.lbfgs import LBFGS as LBFGS
    from sparkdml.strategies.second_order.newton_cg import NewtonCG as NewtonCG
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
    "ADPSGD": "sparkdml.strategies.decentralized.ad_psgd",
    "ASP": "sparkdml.parameter_server.consistency",
    "AdaptiveBalance": "sparkdml.strategies.adaptive_balance",
    "AllReduce": "sparkdml.strategies.allreduce",
    "ArrayTable": "sparkdml.parameter_server.kvstore.tables",
    "Averaging": "sparkdml.strategies.averaging",
    "BF16": "sparkdml.compression.half",
    "BSP": "sparkdml.parameter_server.consistency",
    "BackupWorkers": "sparkdml.strategies.backup_workers",
    "BestModel": "sparkdml.training.callbacks",
    "BlockMomentum": "sparkdml.strategies.local.block_momentum",
    "Callback": "sparkdml.training.callbacks",
    "CheckpointError": "sparkdml.errors",
    "CheckpointStore": "sparkdml.checkpoint.stores.base",
    "Checkpoints": "sparkdml.checkpoint.checkpoints",
    "Context": "sparkdml.runtime.worker.context",
    "DataError": "sparkdml.errors",
    "Dataset": "sparkdml.feed.dataset",
    "EASGD": "sparkdml.strategies.local.easgd",
    "EMA": "sparkdml.training.callbacks",
    "Downpour": "sparkdml.parameter_server.downpour",
    "DryRunError": "sparkdml.errors",
    "EarlyStopping": "sparkdml.training.callbacks",
    "ExportError": "sparkdml.errors",
    "Expulsion": "sparkdml.parameter_server.consistency",
    "FP16": "sparkdml.compression.half",
    "Gossip": "sparkdml.strategies.decentralized.gossip",
    "GradientMonitor": "sparkdml.training.callbacks",
    "History": "sparkdml.history",
    "Hybrid": "sparkdml.parameter_server.hybrid",
    "Hogwild": "sparkdml.strategies.local.hogwild",
    "KVStore": "sparkdml.parameter_server.kvstore.store",
    "Keep": "sparkdml.checkpoint.keep",
    "LBFGS": "sparkdml.strategies.second_order.lbfgs",
    "LayeredSGD": "sparkdml.strategies.layered_sgd",
    "LearningRateSchedule": "sparkdml.training.callbacks",
    "LocalSGD": "sparkdml.strategies.local.local_sgd",
    "MLflow": "sparkdml.observe.trackers",
    "NewtonCG": "sparkdml.strategies.second_order.newton_cg",
    "MatrixTable": "sparkdml.parameter_server.kvstore.tables",
    "NonFiniteLoss": "sparkdml.errors",
    "NotEnoughSlots": "sparkdml.errors",
    "OneBit": "sparkdml.compression.one_bit",
    "OnlineTrainer": "sparkdml.online",
    "ParameterError": "sparkdml.errors",
    "ParameterServer": "sparkdml.parameter_server.strategy",
    "PowerSGD": "sparkdml.compression.power_sgd",
    "Program": "sparkdml.programs.base",
    "Ragged": "sparkdml.feed.ragged",
    "SSP": "sparkdml.parameter_server.consistency",
    "ServerGroup": "sparkdml.server_group",
    "SetupError": "sparkdml.errors",
    "SlowMo": "sparkdml.strategies.local.slow_mo",
    "SparkDMLError": "sparkdml.errors",
    "SparseTable": "sparkdml.parameter_server.kvstore.tables",
    "StoreError": "sparkdml.errors",
    "Strategy": "sparkdml.strategies.base",
    "TAP": "sparkdml.parameter_server.consistency",
    "TensorBoard": "sparkdml.observe.trackers",
    "TimeLimit": "sparkdml.training.callbacks",
    "TopK": "sparkdml.compression.top_k",
    "TorchClassificationModel": "sparkdml.classification",
    "TorchClassifier": "sparkdml.classification",
    "TorchEstimator": "sparkdml.estimator",
    "TorchModel": "sparkdml.model",
    "TorchRegressionModel": "sparkdml.regression",
    "TorchRegressor": "sparkdml.regression",
    "WithStore": "sparkdml.parameter_server.kvstore.serving",
    "WorkerError": "sparkdml.errors",
    "WorkerLost": "sparkdml.errors",
    "advise": "sparkdml.comparison.advise",
    "allow_packages": "sparkdml.persistence",
    "allow_pickle": "sparkdml.persistence",
    "compare": "sparkdml.comparison.compare",
    "factory": "sparkdml.factories",
    "multiply": "sparkdml.linalg.multiply",
    "pad": "sparkdml.feed.ragged",
    "run": "sparkdml.runtime.api",
    "run_program": "sparkdml.programs.base",
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
