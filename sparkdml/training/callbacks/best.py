"""The best epoch so far by a column of the history, and the weights that it ended with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sparkdml.errors import ParameterError
from sparkdml.training.callbacks.base import missing_column

if TYPE_CHECKING:
    from sparkdml.training.training import Training


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

    def keep(self, training: Training) -> None:
        self.weights = {name: t.clone() for name, t in training.result_state().items()}

    def restore(self, training: Training) -> None:
        if self.weights is not None:
            training.task.module.load_state_dict(self.weights)

    def describe(self) -> str:
        return f"{self._monitor} was best in epoch {self.epoch} ({self._sign * self.value:.6g})"

    def state(self) -> dict[str, Any]:
        return {"best": self.value, "best_epoch": self.epoch, "best_state": self.weights}

    def load(self, state: Mapping[str, Any]) -> None:
        self.value, self.epoch = state["best"], state["best_epoch"]
        self.weights = state["best_state"]
