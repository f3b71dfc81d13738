"""Stop when a number no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from sparkdml.errors import ParameterError
from sparkdml.training.callbacks.base import Callback, RunFacts
from sparkdml.training.callbacks.best_model import Best, check_mode

if TYPE_CHECKING:
    from sparkdml.training.run import TrainingRun


class EarlyStopping(Callback):
    """Stop when a number of the history has not improved for `patience` epochs.

    Args:
        monitor: a column of the history, for instance "val_loss" or "val_accuracy".
        patience: how many epochs without an improvement are let pass.
        min_delta: how much counts as an improvement.
        mode: whether smaller ("min") or larger ("max") is better.
        restore_best: end with the weights of the best epoch, not of the last.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 2,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        restore_best: bool = False,
    ) -> None:
        if patience < 0:
            raise ParameterError("patience", patience, "0 or more epochs")
        if min_delta < 0:
            raise ParameterError("min_delta", min_delta, "0 or more")
        check_mode(mode)
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        self.mode, self.restore_best = mode, restore_best
        self._best = Best("EarlyStopping", monitor, mode, min_delta)

    def check(self, facts: RunFacts) -> None:
        facts.check_monitor("EarlyStopping", self.monitor)

    def on_epoch_end(self, training: TrainingRun, row: dict[str, float]) -> None:
        if self._best.improves(row):
            if self.restore_best:
                self._best.keep(training)
        elif int(row["epoch"]) - self._best.epoch > self.patience:
            training.stop(self._best.describe())

    def on_run_end(self, training: TrainingRun) -> None:
        self._best.restore(training)

    def state(self) -> dict[str, Any]:
        return self._best.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._best.load(state)

    def __repr__(self) -> str:
        return (
            f"EarlyStopping({self.monitor!r}, patience={self.patience}, "
            f"min_delta={self.min_delta}, mode={self.mode!r}, restore_best={self.restore_best})"
        )
