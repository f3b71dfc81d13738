"""`step=fn(modules, batch, ctx)`: what it is called with, and what its results mean.

It returns a loss, or a dict of losses by optimizer, and beside it, if it likes, a dict of numbers
whose names were declared by `metrics=`. A loss is a scalar, the batch's mean, or one value a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sparkdml.errors import ParameterError
from sparkdml.training.objective import metric_sum, sum_rows
from sparkdml.training.plan import TaskPlan


class StepResult:
    """What a step returned, as sums: the losses by optimizer, and the declared numbers."""

    def __init__(
        self, returned: Any, plan: TaskPlan, num_rows: int, weights: Tensor | None
    ) -> None:
        losses: Any = returned
        values: Mapping[str, Any] = {}
        if isinstance(returned, tuple):
            if len(returned) != 2 or not isinstance(returned[1], Mapping):
                raise ParameterError(
                    "step",
                    f"a function that returns a tuple of {len(returned)}",
                    "a function that returns a loss, a dict of losses, or (loss, values)",
                )
            losses, values = returned
        self.sums: Tensor | dict[str, Tensor]
        self.weights: dict[str, Tensor | float] = {}
        if isinstance(losses, Mapping):
            self._check_losses(losses, plan)
            pairs = {
                name: sum_rows(
                    loss, num_rows, weights=weights, is_sum=False, parameter=f"step's loss {name!r}"
                )
                for name, loss in losses.items()
            }
            self.sums = {name: pair[0] for name, pair in pairs.items()}
            self.weights = {name: pair[1] for name, pair in pairs.items()}
        else:
            self.sums, weight = sum_rows(
                losses, num_rows, weights=weights, is_sum=False, parameter="step"
            )
            # One loss for all: every optimizer moves by it.
            self.weights = dict.fromkeys(plan.loss_names or ("",), weight)
        self.metrics = self._sum_metrics(values, plan, num_rows)

    @staticmethod
    def _check_losses(losses: Mapping[Any, Any], plan: TaskPlan) -> None:
        if not plan.loss_names:
            raise ParameterError(
                "step",
                f"a function that returns losses for {', '.join(map(str, losses))}",
                "a function that returns one loss, since there is one optimizer",
                "Give model= and optimizer= as dicts of these names.",
            )
        unknown = [name for name in losses if name not in plan.loss_names]
        if unknown or not losses:
            raise ParameterError(
                "step",
                f"a function that returns losses for {', '.join(map(str, losses)) or 'none'}",
                f"a function that returns losses for one or more of {', '.join(plan.loss_names)}",
            )

    @staticmethod
    def _sum_metrics(values: Mapping[str, Any], plan: TaskPlan, num_rows: int) -> list[Tensor]:
        if values.keys() != set(plan.metric_names):
            declared = ", ".join(plan.metric_names) or "nothing"
            raise ParameterError(
                "step",
                f"a function that returns values for {', '.join(values) or 'nothing'}",
                f"a function that returns (loss, values) for what metrics= declares: {declared}",
                "Every step returns all of them.",
            )
        return [metric_sum(values[name], num_rows, name) for name in plan.metric_names]
