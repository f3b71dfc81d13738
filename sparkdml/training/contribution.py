"""The contribution of a worker that has trained by itself, and how contributions add up.

Only sums, so that they can be added in any order, first on executors, then at the driver: the
weights times the rows that they were trained on, and each epoch's totals.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor

from sparkdml.errors import DataError
from sparkdml.runtime.worker.context import NO_ROWS
from sparkdml.training.totals import Totals

if TYPE_CHECKING:
    from sparkdml.training.forward import OutputShape
    from sparkdml.training.plan import TaskPlan


@dataclass(frozen=True)
class EpochSums:
    """One epoch of some workers."""

    totals: Totals
    steps: float  # of the one that made the most
    seconds: float  # of the slowest

    def __add__(self, other: EpochSums) -> EpochSums:
        return EpochSums(
            self.totals + other.totals,
            max(self.steps, other.steps),
            max(self.seconds, other.seconds),
        )


@dataclass(frozen=True)
class Contribution:
    """Of one worker, or of several."""

    rows: float  # that the weights are weighted by
    state: dict[str, Tensor]  # floats times rows, in double precision; of others the largest
    epochs: tuple[EpochSums, ...]
    first_step_time: float
    stopped: str | None
    output_shape: OutputShape | None

    def __add__(self, other: Contribution) -> Contribution:
        return Contribution(
            self.rows + other.rows,
            {
                name: tensor + other.state[name]
                if tensor.is_floating_point()
                else torch.maximum(tensor, other.state[name])
                for name, tensor in self.state.items()
            },
            epochs=_add_epochs(self.epochs, other.epochs),
            first_step_time=min(
                filter(None, (self.first_step_time, other.first_step_time)), default=0.0
            ),
            stopped=self.stopped or other.stopped,
            output_shape=self.output_shape or other.output_shape,
        )

    @property
    def num_bytes(self) -> int:
        """The size of the tensors that are sent."""
        return sum(tensor.nbytes for tensor in self.state.values())

    def average(self) -> dict[str, Tensor]:
        """The module's state, weighted by rows, but for its types."""
        if not self.rows:
            raise DataError(NO_ROWS)
        return {
            name: tensor / self.rows if tensor.is_floating_point() else tensor
            for name, tensor in self.state.items()
        }


def add_all(contributions: list[Contribution]) -> Contribution:
    return reduce(lambda one, other: one + other, contributions)


def encode_average(contribution: Contribution, like: dict[str, Tensor]) -> bytes:
    """As safetensors, in the types of the module's own state."""
    average = contribution.average()
    return safetensors.torch.save(
        {name: average[name].to(tensor.dtype).contiguous() for name, tensor in like.items()}
    )


def history_of(contribution: Contribution, plan: TaskPlan) -> list[dict[str, float]]:
    """One row an epoch, over all workers."""
    rows: list[dict[str, Any]] = []
    for number, epoch in enumerate(contribution.epochs):
        totals = epoch.totals
        rows.append(
            {
                "epoch": float(number + 1),
                **totals.means(plan.metric_names, plan.loss_names),
                "rows": totals.rows,
                "steps": epoch.steps,
                "seconds": epoch.seconds,
                "rows_per_second": totals.rows / max(epoch.seconds, 1e-9),
            }
        )
    return rows


def _add_epochs(one: tuple[EpochSums, ...], other: tuple[EpochSums, ...]) -> tuple[EpochSums, ...]:
    """A worker that stopped early has fewer of them."""
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    both = tuple(a + b for a, b in zip(longer, shorter, strict=False))
    return both + longer[len(shorter) :]
