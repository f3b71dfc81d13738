"""Losses as (sum, weight), so that a mean over all ranks is exact and never a mean of means.

Losses that torch brings are asked for their sum, and weighted by what their own mean divides by:
the elements, or for the class losses the weights of the classes, where ignored rows weigh nothing.
Any other callable may give one value a row, or a scalar, which is taken for the batch's mean.

With weights for the rows, the mean is the weighted one: sum of w * l over sum of w, where l is what
torch's own mean would make of the row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparkdml.errors import ParameterError

# Losses that compare numbers element by element: shapes must match, and targets be floating.
ELEMENTWISE = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.PoissonNLLLoss,
    nn.SoftMarginLoss,
)
CLASS_INDEX = (nn.CrossEntropyLoss, nn.NLLLoss)
REDUCTIONS = ("mean", "sum", "none")

LossFunction = Callable[[Any, Any], Tensor]


class Objective:
    """A loss function, as the sum over the rows and the weight that the sum is of."""

    def __init__(self, loss: LossFunction, weighted: bool = False) -> None:
        # With reduction="sum" the user wants the gradient of the sum: nothing divides it.
        self.is_sum = getattr(loss, "reduction", None) == "sum"
        self._is_known = isinstance(loss, (*ELEMENTWISE, *CLASS_INDEX))
        self._loss = loss
        self._is_of_classes = isinstance(loss, CLASS_INDEX)
        # Torch's default ignores a class that no row is of.
        self._keeps_all = (
            isinstance(loss, CLASS_INDEX) and loss.weight is None and loss.ignore_index == -100
        )
        if isinstance(loss, nn.Module) and getattr(loss, "reduction", None) in REDUCTIONS:
            own: Any = copy.deepcopy(loss)
            own.reduction = "sum" if self._is_known and not weighted else "none"
            self._loss = own

    def to(self, device: torch.device) -> None:
        """Move the class weights and the like to where the outputs are."""
        if isinstance(self._loss, nn.Module):
            self._loss.to(device)

    def __call__(
        self, outputs: Any, targets: Any, num_rows: int, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | float]:
        """The sum of the loss over the rows, and its weight."""
        if self._is_known:
            targets = fit_targets(self._loss, outputs, targets)
            values = self._loss(outputs, targets)
            if weights is None:
                return values, self._known_weight(targets, num_rows)
            by_row = values.reshape(num_rows, -1).sum(dim=1)
            return (by_row * weights).sum(), self._known_row_weights(targets, num_rows, weights)
        return sum_rows(
            self._loss(outputs, targets),
            num_rows,
            weights=weights,
            is_sum=self.is_sum,
            parameter="loss",
        )

    def _known_weight(self, targets: Tensor, num_rows: int) -> Tensor | float:
        """What the mean of torch's own loss divides by."""
        if self._is_of_classes:
            if targets.is_floating_point():  # probabilities of the classes
                return float(targets.numel() / targets.shape[1])
            if not self._keeps_all:
                return self._class_weights(targets).sum()
        return float(targets.numel())

    def _known_row_weights(self, targets: Tensor, num_rows: int, weights: Tensor) -> Tensor:
        """The same for each row, times the row's own weight, summed."""
        if self._is_of_classes and not targets.is_floating_point():
            kept = self._class_weights(targets).expand(targets.shape)
            return (kept.reshape(num_rows, -1).sum(dim=1) * weights).sum()
        return weights.sum() * (self._known_weight(targets, num_rows) / num_rows)

    def _class_weights(self, targets: Tensor) -> Tensor:
        loss: Any = self._loss
        kept: Tensor = targets != loss.ignore_index
        if loss.weight is None:
            return kept.float()
        weights: Tensor = loss.weight[torch.where(kept, targets, 0)]
        return weights * kept


def sum_rows(
    values: Any, num_rows: int, weights: Tensor | None, is_sum: bool, parameter: str
) -> tuple[Tensor, Tensor | float]:
    """What a function gave, a scalar or one value a row, as a sum and its weight."""
    if not isinstance(values, Tensor):
        raise ParameterError(parameter, type(values).__name__, "a function that returns a tensor")
    if values.dim() == 0:
        if weights is not None:
            raise ParameterError(
                parameter,
                "a function that returns a scalar",
                "a function that returns one value a row, since weightCol is set",
                "Leave out the mean over the rows, for instance by reduction='none'.",
            )
        return (values if is_sum else values * num_rows), float(num_rows)
    if values.shape[0] != num_rows:
        raise ParameterError(
            parameter,
            f"a result of shape {list(values.shape)}",
            f"a scalar or one value for each of the {num_rows} rows",
        )
    # Several values a row (several outputs) count as their mean, as in torch's own reduction.
    by_row = values.reshape(num_rows, -1)
    by_row = by_row.sum(dim=1) if is_sum else by_row.mean(dim=1)
    if weights is None:
        return by_row.sum(), float(num_rows)
    return (by_row * weights).sum(), weights.sum()


def fit_targets(loss: LossFunction, outputs: Any, targets: Any) -> Any:
    """Labels as torch's own loss wants them: Spark's labels are doubles, even class numbers."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return targets
    if isinstance(loss, CLASS_INDEX):
        is_index = targets.dim() == outputs.dim() - 1 or not targets.is_floating_point()
        return targets.long() if is_index else targets  # else probabilities of the classes
    if not targets.is_floating_point():
        targets = targets.to(outputs.dtype)
    if targets.shape != outputs.shape and targets.numel() == outputs.numel():
        # (rows,) against (rows, 1) would silently broadcast to (rows, rows).
        targets = targets.reshape(outputs.shape)
    if targets.shape != outputs.shape:
        raise ParameterError(
            "loss",
            f"{type(loss).__name__} with outputs of shape {list(outputs.shape)}",
            f"one whose outputs have the labels' shape {list(targets.shape)}",
            "Change the last layer, or the label column.",
        )
    return targets


def metric_sum(value: Any, num_rows: int, name: str) -> Tensor:
    """A metric over the batch as a sum: a scalar is the batch's mean, else one value a row."""
    result = torch.as_tensor(value).detach()
    if result.dim() == 0:
        return result.double() * num_rows
    if result.shape[0] != num_rows:
        raise ParameterError(
            f"metrics[{name!r}]",
            f"a result of shape {list(result.shape)}",
            f"a scalar or one value for each of the {num_rows} rows",
        )
    return result.reshape(num_rows, -1).double().mean(dim=1).sum()
