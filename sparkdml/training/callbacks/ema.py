"""A moving average of the weights. (Polyak and Juditsky 1992; with decay as in Tarvainen and
Valpola 2017, arXiv 1703.01780.)"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sparkdml.errors import ParameterError
from sparkdml.training.callbacks.base import Callback

if TYPE_CHECKING:
    from sparkdml.training.run import TrainingRun


class EMA(Callback):
    """Validate and end with a moving average of the weights of all steps.

    Training itself continues with the unaveraged weights. Buffers, such as BatchNorm's statistics,
    are not averaged.

    Args:
        decay: how much of the average is kept in each step.
        warmup: let the average follow faster in the first steps, by (1 + n) / (10 + n) where that
            is less than `decay`: else it is mostly initial weights for 1 / (1 - decay) steps.
    """

    def __init__(self, decay: float = 0.999, warmup: bool = True) -> None:
        if not 0 < decay < 1:
            raise ParameterError("decay", decay, "a number between 0 and 1")
        self.decay, self.warmup = decay, warmup
        self._average: Tensor | None = None
        self._kept: Tensor | None = None
        self._num_steps = 0

    def on_run_start(self, training: TrainingRun) -> None:
        self._kept = training.result_values  # a strategy may have put its own in place
        self._average = self._source(training).clone()
        training.result_values = self._average

    def on_step_end(self, training: TrainingRun) -> None:
        assert self._average is not None
        decay = self.decay
        if self.warmup:
            decay = min(decay, (1 + self._num_steps) / (10 + self._num_steps))
        self._num_steps += 1
        self._average.lerp_(self._source(training), 1 - decay)

    def _source(self, training: TrainingRun) -> Tensor:
        """What would be kept without the average; the next step may move the parameters."""
        return training.task.params.values if self._kept is None else self._kept

    def state(self) -> dict[str, Any]:
        return {"average": self._average, "num_steps": self._num_steps}

    def load(self, state: Mapping[str, Any]) -> None:
        assert self._average is not None
        self._average.copy_(state["average"])
        self._num_steps = state["num_steps"]

    def __repr__(self) -> str:
        return f"EMA({self.decay}, warmup={self.warmup})"
