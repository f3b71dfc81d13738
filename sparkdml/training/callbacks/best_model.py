"""End with the weights of the best epoch.

The best epoch so far by a column of the history, and the weights that it ended with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from sparkdml.errors import ParameterError
from sparkdml.training.callbacks.base import Callback, RunFacts, missing_column

if TYPE_CHECKING:
    from sparkdml.training.run import TrainingRun


def check_mode(mode: str) -> None:
    if mode not in ("min", "max"):
        raise ParameterError("mode", mode, "'min' or 'max'")


class Best:
    """`value` is the column's best value, turned around where larger is better."""

    def __init__(self, owner: str, monitor: str, mode: str, min_delta: float = 0.0) -> None:
        self._owner, self._monitor, self._min_delta = owner, monitor, min_delta
        self._sign = 1.0 if mode == "min" else -1.0
        self.value = math.inf
        self.epoch = 0
        self.weights: dict[str, Tensor] | None = None

    def improves(self, row: Mapping[str, float]) -> bool:
        """Whether this epoch is the best yet."""
        if self._monitor not in row:
            raise missing_column(self._owner, self._monitor, row)
        value = self._sign * row[self._monitor]
        if not value < self.value - self._min_delta:
            return False
        self.value, self.epoch = value, int(row["epoch"])
        return True

    def keep(self, training: TrainingRun) -> None:
        self.weights = {name: t.clone() for name, t in training.result_state().items()}

    def restore(self, training: TrainingRun) -> None:
        if self.weights is not None:
            training.task.module.load_state_dict(self.weights)

    def describe(self) -> str:
        return f"{self._monitor} was best in epoch {self.epoch} ({self._sign * self.value:.6g})"

    def state(self) -> dict[str, Any]:
        return {"best": self.value, "best_epoch": self.epoch, "best_state": self.weights}

    def load(self, state: Mapping[str, Any]) -> None:
        self.value, self.epoch = state["best"], state["best_epoch"]
        self.weights = state["best_state"]


class BestModel(Callback):
    """Train all epochs, and end with the weights of the best one.

    Args:
        monitor: a column of the history, for instance "val_loss" or "val_accuracy".
        mode: whether smaller ("min") or larger ("max") is better.

    The history gets a column `best_epoch`.
    """

    columns = ("best_epoch",)

    def __init__(self, monitor: str = "val_loss", mode: Literal["min", "max"] = "min") -> None:
        check_mode(mode)
        self.monitor, self.mode = monitor, mode
        self._best = Best("BestModel", monitor, mode)

    def check(self, facts: RunFacts) -> None:
        facts.check_monitor("BestModel", self.monitor)

    def on_epoch_end(self, training: TrainingRun, row: dict[str, float]) -> None:
        if self._best.improves(row):
            self._best.keep(training)
        row["best_epoch"] = float(self._best.epoch)

    def on_run_end(self, training: TrainingRun) -> None:
        self._best.restore(training)

    def state(self) -> dict[str, Any]:
        return self._best.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._best.load(state)

    def __repr__(self) -> str:
        return f"BestModel({self.monitor!r}, mode={self.mode!r})"
