"""The gradient's norm, epoch by epoch, and a word when it is not a number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparkdml.errors import ParameterError, SparkDMLError
from sparkdml.training.callbacks.base import Callback

if TYPE_CHECKING:
    from sparkdml.training.run import TrainingRun


class NonFiniteGradient(SparkDMLError, ArithmeticError):
    """The agreed gradient has a NaN or an infinity."""


class GradientMonitor(Callback):
    """Measure the norm of the agreed gradient, before it is clipped.

    The history gets `gradient_norm`, the mean over the steps measured, and `gradient_norm_max`.
    A gradient that is not finite ends the run with an error that names the parameters.

    Args:
        every: measure every n-th step.
        by_module: one mean more for each direct child of the module: `gradient_norm_<child>`.
    """

    columns = ("gradient_norm", "gradient_norm_max", "gradient_norm_*")

    def __init__(self, every: int = 1, by_module: bool = False) -> None:
        if every < 1:
            raise ParameterError("every", every, "1 or more steps")
        self.every, self.by_module = every, by_module
        self._reset()

    def _reset(self) -> None:
        self._count, self._sum, self._max = 0, 0.0, 0.0
        self._child_sums: dict[str, float] = {}

    def on_gradient(self, training: TrainingRun) -> None:
        if training.step % self.every:
            return
        norm = float(training.task.params.grads.norm())
        if not math.isfinite(norm):
            self._raise(training)
        self._count += 1
        self._sum += norm
        self._max = max(self._max, norm)
        if self.by_module:
            for name, child in _trained_children(training.task.module).items():
                norms = [p.grad.norm() for p in child.parameters() if p.grad is not None]
                own = float(torch.linalg.vector_norm(torch.stack(norms)))
                self._child_sums[name] = self._child_sums.get(name, 0.0) + own

    def _raise(self, training: TrainingRun) -> None:
        bad = [
            name
            for name, parameter in training.task.module.named_parameters()
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
        ]
        if bad:  # else the squares overflowed, and no gradient did
            raise NonFiniteGradient(
                f"the gradient of {', '.join(bad[:5])} is not finite at step {training.step + 1}. "
                "Lower the learning rate, or look for a division by zero or a root of zero in the "
                "loss"
            )

    def on_epoch_end(self, training: TrainingRun, row: dict[str, float]) -> None:
        count = self._count or math.nan  # no step of a short epoch was measured
        row["gradient_norm"] = self._sum / count
        row["gradient_norm_max"] = self._max if self._count else math.nan
        if self.by_module:
            for name in _trained_children(training.task.module):
                row[f"gradient_norm_{name}"] = self._child_sums.get(name, 0.0) / count
        self._reset()

    def state(self) -> dict[str, Any]:
        return {
            "count": self._count,
            "sum": self._sum,
            "max": self._max,
            "child_sums": dict(self._child_sums),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._count, self._sum, self._max = state["count"], state["sum"], state["max"]
        self._child_sums = dict(state["child_sums"])

    def __repr__(self) -> str:
        return f"GradientMonitor(every={self.every}, by_module={self.by_module})"


def _trained_children(module: nn.Module) -> dict[str, nn.Module]:
    return {
        name: child
        for name, child in module.named_children()
        if any(parameter.requires_grad for parameter in child.parameters())
    }
