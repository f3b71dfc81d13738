"""Blockwise model-update filtering: the mean of the models, moved on by a momentum of its own.

Averaging n models takes 1/n of each one's way; the momentum of blocks gives back what is lost.
(BMUF: Chen and Huo, "Scalable training of deep learning machines by incremental block training with
intra-block parallel optimization and blockwise model-update filtering", ICASSP 2016.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sparkdml.checkpoint.state import Entry, State
from sparkdml.errors import ParameterError
from sparkdml.strategies.local.base import LocalStrategy, OptimizerState
from sparkdml.training.training import Training


def filter_update_(
    delta: Tensor, start: Tensor, average: Tensor, momentum: float, lr: float, nesterov: bool
) -> None:
    """One block's update, in place: `start` becomes what the next block starts from.

    With G = average - start and Delta' = momentum * Delta + lr * G, the classical scheme starts
    from W' = W + Delta', Nesterov's from W' + momentum * Delta'. Nesterov's own start already
    holds momentum * Delta more than W, so lr * G + momentum * Delta' is left to be added.
    """
    update = (average - start).mul_(lr)
    delta.mul_(momentum).add_(update)
    if nesterov:
        start.add_(update).add_(delta, alpha=momentum)
    else:
        start.add_(delta)


class BlockMomentum(LocalStrategy):
    """Average the models of all workers after every block, and filter the update by momentum.

    With `block=1`, `momentum=0` and an optimizer without memory it equals `AllReduce`.

    Args:
        block: steps of each worker in a block.
        momentum: of the blocks' updates, at least 0 and below 1. None: 1 - 1/n for n workers,
            which makes up for the averaging, as the paper advises.
        lr: what each block's update is multiplied by.
        nesterov: start the next block where momentum alone would lead to.
        optimizer_state: "keep" or "reset" the momentum of each worker's own optimizer after a
            block. The blocks' momentum takes over, so the default is to reset it; keep Adam's.
        backend: "horovod", "torch", "mpi", or "auto" for Horovod where it is installed.
    """

    steps_name = "block"

    def __init__(
        self,
        block: int = 16,
        momentum: float | None = None,
        lr: float = 1.0,
        nesterov: bool = False,
        optimizer_state: OptimizerState = "reset",
        backend: str = "auto",
    ) -> None:
        super().__init__(block, optimizer_state, backend)
        if momentum is not None and not 0 <= momentum < 1:
            raise ParameterError("momentum", momentum, "None, or at least 0 and below 1")
        if not lr > 0:
            raise ParameterError("lr", lr, "above 0")
        self.block, self.momentum, self.lr, self.nesterov = block, momentum, lr, nesterov

    def start(self, training: Training) -> None:
        super().start(training)
        self._start = self._task.params.values.clone()
        self._delta = self._start.new_zeros(self._start.shape)

    def meet(self, share: float) -> None:
        momentum = 1 - 1 / self._comm.size if self.momentum is None else self.momentum
        average = self.average(share)
        filter_update_(
            self._delta,
            self._start,
            average=average,
            momentum=momentum,
            lr=self.lr,
            nesterov=self.nesterov,
        )
        average.copy_(self._start)

    def state(self) -> State:
        return {**super().state(), "delta": Entry(self._delta)}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._delta.copy_(state["delta"])
        self._start.copy_(self._task.params.values)

    def __repr__(self) -> str:
        return (
            f"BlockMomentum(block={self.block}, momentum={self.momentum}, lr={self.lr}, "
            f"nesterov={self.nesterov}, optimizer_state={self.optimizer_state!r}, "
            f"backend={self.backend!r})"
        )
