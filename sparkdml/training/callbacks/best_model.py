"""End with the weights of the best epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from sparkdml.training.callbacks.base import Callback, RunFacts
from sparkdml.training.callbacks.best import Best, check_mode

if TYPE_CHECKING:
    from sparkdml.training.training import Training


class BestModel(Callback):
    """Train all epochs, and end with the weights of the best one.

    Args:
        monitor: a column of the history, for instance "val_loss" or "val_accuracy".
        mode: whether smaller ("min") or larger ("max") is better.

    The history gets a column `best_epoch`.
    """

    def __init__(self, monitor: str = "val_loss", mode: Literal["min", "max"] = "min") -> None:
        check_mode(mode)
        self.monitor, self.mode = monitor, mode
        self._best = Best("BestModel", monitor, mode)

    def check(self, facts: RunFacts) -> None:
        facts.check_monitor("BestModel", self.monitor)

    def on_epoch_end(self, training: Training, row: dict[str, float]) -> None:
        if self._best.improves(row):
            self._best.keep(training)
        row["best_epoch"] = float(self._best.epoch)

    def on_run_end(self, training: Training) -> None:
        self._best.restore(training)

    def state(self) -> dict[str, Any]:
        return self._best.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._best.load(state)

    def __repr__(self) -> str:
        return f"BestModel({self.monitor!r}, mode={self.mode!r})"
