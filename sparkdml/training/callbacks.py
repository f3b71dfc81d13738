"""Callbacks: they see the same, reduced numbers on every rank, so every rank decides alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from sparkdml.errors import ParameterError

if TYPE_CHECKING:
    from sparkdml.training.training import Training


class Callback:
    """Override what you need. Each worker has an instance of its own."""

    def on_run_start(self, training: Training) -> None:
        """Before the first step; the parameters are the same on every rank."""

    def on_step_end(self, training: Training) -> None:
        """After an optimizer step, before its checkpoint, if one is due: `training.step` has it."""

    def on_epoch_end(self, training: Training, row: dict[str, float]) -> None:
        """After validation. `row` is the epoch's row of the history; it may be added to."""

    def on_run_end(self, training: Training) -> None:
        """After the last epoch, before the weights are taken."""

    def state(self) -> dict[str, Any]:
        """What must survive a restart: tensors, numbers, text. The same on every rank."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned; called after `on_run_start`."""


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
        if mode not in ("min", "max"):
            raise ParameterError("mode", mode, "'min' or 'max'")
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        self.mode, self.restore_best = mode, restore_best
        self.best = math.inf
        self.best_epoch = 0
        self._best_state: dict[str, Tensor] | None = None

    def on_epoch_end(self, training: Training, row: dict[str, float]) -> None:
        if self.monitor not in row:
            raise ParameterError(
                "EarlyStopping(monitor)",
                self.monitor,
                f"a column of the history: {', '.join(row)}",
                "Names that start with val_ need validation=.",
            )
        value = row[self.monitor] if self.mode == "min" else -row[self.monitor]
        epoch = int(row["epoch"])
        if value < self.best - self.min_delta:
            self.best, self.best_epoch = value, epoch
            if self.restore_best:
                state = training.task.module.state_dict()
                self._best_state = {name: tensor.clone() for name, tensor in state.items()}
        elif epoch - self.best_epoch > self.patience:
            best = self.best if self.mode == "min" else -self.best
            training.stop(f"{self.monitor} was best in epoch {self.best_epoch} ({best:.6g})")

    def on_run_end(self, training: Training) -> None:
        if self._best_state is not None:
            training.task.module.load_state_dict(self._best_state)

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "best_epoch": self.best_epoch, "best_state": self._best_state}

    def load(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_epoch = state["best"], state["best_epoch"]
        self._best_state = state["best_state"]

    def __repr__(self) -> str:
        return (
            f"EarlyStopping({self.monitor!r}, patience={self.patience}, "
            f"min_delta={self.min_delta}, mode={self.mode!r}, restore_best={self.restore_best})"
        )
