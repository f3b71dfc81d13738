"""The forward pass on this rank's rows alone: losses and metrics as sums.

They come of `loss=` or of `step=fn(modules, batch, ctx)`. A step returns a loss, or a dict of
losses by optimizer, and beside it, if it likes, a dict of numbers whose names were declared by
`metrics=`. A loss is a scalar, the batch's mean, or one value a row.

With it, autocast, and the loss scale that keeps half-precision gradients from vanishing. The scale
is a function of the agreed gradients alone, so all ranks have the same one without communication;
ranks that take steps of their own agree on one when they average, or at an epoch's end.
(Micikevicius et al. 2018, arXiv 1710.03740.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sparkdml.comm.base import Communicator
from sparkdml.errors import DataError, ParameterError
from sparkdml.feed.batch import Batch
from sparkdml.training.metric_objects import MetricObjects
from sparkdml.training.objective import Objective, metric_sum, sum_rows
from sparkdml.training.plan import Precision, StepContext, TaskPlan
from sparkdml.training.totals import NUM_FIXED_STATS, Sums, Totals


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


_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GROWTH_INTERVAL = 2000  # good steps before a larger scale is tried


class Autocast:
    """A context for forward passes: the operations that bear it run in half precision."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._kind = _TYPES.get(precision)
        self._device = device.type
        self.is_on = self._kind is not None

    def __call__(self) -> AbstractContextManager[Any]:
        if self._kind is None:
            return nullcontext()
        return torch.autocast(self._device, dtype=self._kind)


class LossScale:
    """Doubles after many good steps; halves after a step whose gradients overflowed."""

    def __init__(self, batch_size: int) -> None:
        # Gradients are summed over the rows, not averaged, so a batch needs a smaller scale.
        self.value = 2.0 ** max(0, 16 - math.ceil(math.log2(batch_size)))
        self.good_steps = 0
        self.skipped_steps = 0  # in the whole run

    def accepts(self, grads: Tensor) -> bool:
        """Whether the agreed gradients can be applied; adapts the scale for the next step."""
        if not bool(torch.isfinite(grads).all()):
            self.value = max(self.value / 2, 2.0**-24)
            self.good_steps = 0
            self.skipped_steps += 1
            return False
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value = min(self.value * 2, 2.0**24)
            self.good_steps = 0
        return True

    def agree(self, comm: Communicator, device: torch.device) -> None:
        """Continue with the smallest scale of all ranks, if each has made its own steps."""
        numbers = [self.value, self.good_steps, -self.skipped_steps]
        own = torch.tensor(numbers, dtype=torch.float64, device=device)
        value, good, skipped = comm.allreduce_(own, "min").tolist()
        self.value, self.good_steps, self.skipped_steps = value, int(good), -int(skipped)

    def state(self) -> dict[str, Any]:
        return dict(vars(self))

    def load(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


# The shape of one row's output; of several outputs, theirs by name or number.
OutputShape = list[int] | dict[str, list[int]]


class Forward:
    """The module and its loss, or the user's step, as sums over rows."""

    def __init__(self, module: nn.Module, plan: TaskPlan, device: torch.device) -> None:
        self.module = module
        self.plan = plan
        self.device = device
        self.context = StepContext(device)  # the training puts its own here
        self.objective: Objective | None = None
        if plan.step is None:
            assert plan.loss is not None, "a plan has a loss or a step"
            self.objective = Objective(plan.loss, weighted=plan.weight is not None)
            self.objective.to(device)
        self.num_stats = NUM_FIXED_STATS + len(plan.metric_names) + 2 * len(plan.loss_names)
        self.output_shape: OutputShape | None = None  # once the module has run
        self.last_loss: Tensor | None = None  # of this rank alone, to tell who has a NaN
        self.metric_objects = MetricObjects(plan.metric_objects, device)
        self._functions = plan.metric_functions
        self._dtype = next(module.parameters()).dtype
        self._autocast = Autocast(plan.precision, device)

    def __call__(self, batch: Batch, sums: Sums) -> Tensor | dict[str, Tensor]:
        """The summed loss of a batch, or losses by optimizer; its stats are added to `sums`."""
        if self.plan.step is not None:
            return self._step(batch, sums)
        if self._autocast.is_on:
            with self._autocast():
                return self._supervised(batch, sums)
        return self._supervised(batch, sums)

    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """The stats of all rows, without training on them; metric objects keep their states."""
        stats = torch.zeros(self.num_stats, dtype=torch.float64, device=self.device)
        sums = Sums(stats)
        was_training, context_was = self.module.training, self.context.training
        self.module.eval()
        self.context.training = False
        with torch.no_grad():
            for batch in batches:
                for piece in batch.split(self.plan.batch_size):
                    self(piece, sums)
        self.module.train(was_training)
        self.context.training = context_was
        return stats

    def totals(self, stats: Tensor) -> Totals:
        return Totals.of(stats.tolist(), len(self.plan.loss_names))

    def means(self, totals: Totals) -> dict[str, float]:
        """As the history has them, but for metric objects."""
        return totals.means(self.plan.metric_names, self.plan.loss_names)

    def _supervised(self, batch: Batch, sums: Sums) -> Tensor:
        assert self.objective is not None
        inputs = [self._input(batch[name]) for name in self.plan.features]
        outputs = self.module(*inputs)
        if self.output_shape is None:
            self.output_shape = output_row_shape(outputs, batch.num_rows)
        targets = self._input(batch[self.plan.label]) if self.plan.label else None
        weights = self._weights(batch) if self.plan.weight else None
        loss, weight = self.objective(outputs, targets, batch.num_rows, weights)
        self.last_loss = loss.detach()
        metrics: list[Tensor] = []
        if self._functions or self.metric_objects:
            metrics = self._measure(outputs, targets, batch.num_rows)
        sums.add([weight, batch.num_rows, self.last_loss, 0.0, 0.0, 0.0, *metrics])
        return loss

    def _measure(self, outputs: Any, targets: Any, num_rows: int) -> list[Tensor]:
        if self._autocast.is_on and isinstance(outputs, Tensor):
            outputs = outputs.float()
        with torch.no_grad():
            self.metric_objects.update(outputs, targets)
            return [
                metric_sum(metric(outputs, targets), num_rows, name)
                for name, metric in self._functions.items()
            ]

    def _step(self, batch: Batch, sums: Sums) -> Tensor | dict[str, Tensor]:
        assert self.plan.step is not None
        weights = self._weights(batch) if self.plan.weight else None
        typed = Batch({name: self._input(batch[name]) for name in batch}, batch.num_rows)
        with self._autocast():
            returned = self.plan.step(self.module, typed, self.context)
            result = StepResult(returned, self.plan, batch.num_rows, weights)
        found = result.sums
        losses = list(found.values()) if isinstance(found, dict) else [found]
        self.last_loss = torch.stack([loss.detach() for loss in losses]).sum()
        named: list[Tensor | float] = []
        for name in self.plan.loss_names:
            own: Tensor | float = self.last_loss
            if isinstance(found, dict):
                own = found[name].detach() if name in found else 0.0
            named += [result.weights.get(name, 0.0), own]
        # Several losses have no weight in common: their means are added up, not their sums.
        weight = 0.0 if isinstance(found, dict) else next(iter(result.weights.values()))
        fixed: list[Tensor | float] = [weight, batch.num_rows, self.last_loss, 0.0, 0.0, 0.0]
        sums.add([*fixed, *result.metrics, *named])
        return found

    def _weights(self, batch: Batch) -> Tensor:
        assert self.plan.weight is not None
        weights = self._input(batch[self.plan.weight]).reshape(-1)
        if weights.shape[0] != batch.num_rows or not bool((weights >= 0).all()):
            raise DataError(
                f"weightCol {self.plan.weight!r} must hold one number of 0 or more in each row, "
                f"and has {weights.min().item():g} among {weights.shape[0]:,} values of "
                f"{batch.num_rows:,} rows"
            )
        return weights.to(self._dtype)

    def _input(self, tensor: Tensor) -> Tensor:
        """Floating-point columns in the module's own type; all else as it is."""
        if tensor.dtype == self._dtype or not tensor.is_floating_point():
            return tensor
        return tensor.to(self._dtype)


def output_row_shape(outputs: Any, num_rows: int) -> OutputShape:
    """Of one tensor, or of each in a tuple, list or dict."""
    if isinstance(outputs, dict) and outputs:
        return {str(name): _row_shape(value, num_rows) for name, value in outputs.items()}
    if isinstance(outputs, tuple | list) and outputs:
        return {str(index): _row_shape(value, num_rows) for index, value in enumerate(outputs)}
    return _row_shape(outputs, num_rows)


def _row_shape(outputs: Any, num_rows: int) -> list[int]:
    if not isinstance(outputs, Tensor) or outputs.dim() == 0 or outputs.shape[0] != num_rows:
        got = f"shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs)
        raise ParameterError(
            "model",
            f"a module whose output is of {got}",
            f"one that returns a tensor with a first dimension of {num_rows}, the rows, or several",
        )
    return list(outputs.shape[1:])
