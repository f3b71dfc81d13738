"""The `ctx` of a step function: the worker's context, and how far the run is.

In a worker it is made once for each run; in `fitted.evaluate` there is one without a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class StepContext:
    """The worker's context, and where the run is. `fitted.evaluate` has no worker: see below.

    `step` counts the optimizer steps that were made before this one, `epoch` the epochs; both
    begin with 0. `training` is False where the rows are only looked at: in validation, and in
    `fitted.evaluate`, where there is no run to talk to. A step must not call collectives: ranks
    that have no rows left don't call it.
    """

    def __init__(
        self,
        device: torch.device,
        worker: Any = None,
        progress: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self.device = device
        self.training = False
        self._worker = worker
        self._progress = progress

    @property
    def step(self) -> int:
        return self._progress()[0]

    @property
    def epoch(self) -> int:
        return self._progress()[1]

    @property
    def rank(self) -> int:
        return 0 if self._worker is None else int(self._worker.rank)

    @property
    def size(self) -> int:
        return 1 if self._worker is None else int(self._worker.size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._worker is None:
            raise AttributeError(f"ctx.{name} is there in a training run only: ask ctx.training")
        return getattr(self._worker, name)
