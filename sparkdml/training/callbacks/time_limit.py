"""A run that ends in time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkdml.errors import ParameterError
from sparkdml.training.callbacks.base import Callback

if TYPE_CHECKING:
    from sparkdml.training.run import TrainingRun


class TimeLimit(Callback):
    """End the run, if necessary in the middle of an epoch, after `seconds` of training.

    The first rank whose time is up is enough. The time counts on through restarts after failures.
    With checkpoints, another fit resumes it for as long again.

    Args:
        seconds: from the start of the first epoch on.
    """

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise ParameterError("seconds", seconds, "a number above 0")
        self.seconds = seconds
        self._before = 0.0  # in submissions of this fit that failed
        self._started = 0.0
        self._is_up = False

    def on_run_start(self, training: TrainingRun) -> None:
        self._started = time.monotonic()
        self._before, self._is_up = 0.0, False

    def on_step_end(self, training: TrainingRun) -> None:
        if not self._is_up and self._elapsed() >= self.seconds:
            self._is_up = True
            training.request_stop(f"the limit of {self.seconds:g} s was reached")

    def _elapsed(self) -> float:
        return self._before + time.monotonic() - self._started

    def state(self) -> dict[str, Any]:
        # A state that is taken because the time is up is for another call of fit.
        return {"seconds": 0.0 if self._is_up else self._elapsed()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._before = state["seconds"]

    def __repr__(self) -> str:
        return "TimeLimit()"  # how long is no part of what is trained: it may change
