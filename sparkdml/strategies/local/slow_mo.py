"""SlowMo: local steps, then a step of momentum along the way that the average has gone.

Block momentum whose memory is in units of gradients, so that it stays right when the learning rate
changes. (Wang, Tantia, Ballas and Rabbat 2020, arXiv 1910.00643.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparkdml.checkpoint.state import Entry, State
from sparkdml.errors import ParameterError
from sparkdml.strategies.local.base import LocalStrategy, OptimizerState, learning_rates
from sparkdml.training.training import Training


def slow_step_(
    buffer: Tensor, start: Tensor, average: Tensor, rates: Tensor, momentum: float, lr: float
) -> None:
    """u' = momentum * u + (start - average) / rate, and start' = start - lr * rate * u', in place.

    A parameter with a rate of 0 hasn't moved, and leaves no trace in the buffer.
    """
    way = torch.where(rates > 0, (start - average) / rates, 0.0)
    buffer.mul_(momentum).add_(way)
    start.sub_(lr * rates * buffer)


class SlowMo(LocalStrategy):
    """Average the models of all workers every few steps, and apply slow momentum.

    With `steps=1`, `momentum=0`, `lr=1` and an optimizer without memory it equals `AllReduce`.

    Args:
        steps: steps of each worker between two averages.
        momentum: of the slow steps, at least 0 and below 1.
        lr: of the slow steps: 1 goes as far as the average went, and momentum on top of it.
        optimizer_state: "keep" or "reset" the momentum of each worker's own optimizer at each slow
            step. The paper resets that of SGD and keeps Adam's.
        backend: "horovod", "torch", "mpi", or "auto" for Horovod where it is installed.
    """

    def __init__(
        self,
        steps: int = 12,
        momentum: float = 0.5,
        lr: float = 1.0,
        optimizer_state: OptimizerState = "keep",
        backend: str = "auto",
    ) -> None:
        super().__init__(steps, optimizer_state, backend)
        if not 0 <= momentum < 1:
            raise ParameterError("momentum", momentum, "at least 0 and below 1")
        if not lr > 0:
            raise ParameterError("lr", lr, "above 0")
        self.steps, self.momentum, self.lr = steps, momentum, lr

    def start(self, training: Training) -> None:
        super().start(training)
        learning_rates(self._task)  # raises where there is none
        self._start = self._task.params.values.clone()
        self._buffer = self._start.new_zeros(self._start.shape)

    def meet(self, share: float) -> None:
        average, rates = self.average(share), self.rates(share)
        slow_step_(
            self._buffer,
            self._start,
            average=average,
            rates=rates,
            momentum=self.momentum,
            lr=self.lr,
        )
        average.copy_(self._start)

    def state(self) -> State:
        return {**super().state(), "buffer": Entry(self._buffer)}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._buffer.copy_(state["buffer"])
        self._start.copy_(self._task.params.values)

    def __repr__(self) -> str:
        return (
            f"SlowMo(steps={self.steps}, momentum={self.momentum}, lr={self.lr}, "
            f"optimizer_state={self.optimizer_state!r}, backend={self.backend!r})"
        )
