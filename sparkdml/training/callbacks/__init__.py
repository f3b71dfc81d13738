"""Callbacks: they see the same, reduced numbers on every rank, so every rank decides alike."""

from sparkdml.training.callbacks.base import Callback as Callback
from sparkdml.training.callbacks.base import RunFacts as RunFacts
from sparkdml.training.callbacks.best_model import BestModel as BestModel
from sparkdml.training.callbacks.early_stopping import EarlyStopping as EarlyStopping
from sparkdml.training.callbacks.ema import EMA as EMA
from sparkdml.training.callbacks.gradient_monitor import GradientMonitor as GradientMonitor
from sparkdml.training.callbacks.learning_rate_schedule import (
    LearningRateSchedule as LearningRateSchedule,
)
from sparkdml.training.callbacks.time_limit import TimeLimit as TimeLimit
