"""The objective over the rows of all ranks, as second-order methods want it: exact, and repeatable.

Each rank passes over its own rows and adds up in double precision; the sums of the gradients are
scattered, so that a rank holds one slice of every vector. Numbers that decide anything come out of
`add_up`, which gives the same bits on every rank, whatever the backend's order of additions is.
Randomness is the same in every pass: the objective is one function, not another one each time.
With backups a rank that is done computes what a slow one has not come to (Sandblaster's scheme):
sums of the same numbers, in an order that depends on timing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparkdml.errors import DataError
from sparkdml.feed.batch import Batch
from sparkdml.feed.leased import LeasedBatch
from sparkdml.feed.randomness import seed_rank
from sparkdml.training.totals import LOSS, VOTES, Sums, Totals

if TYPE_CHECKING:
    from sparkdml.training.epoch import Epoch
    from sparkdml.training.training import Training


@dataclass(frozen=True)
class Evaluation:
    """The objective at a point."""

    value: float  # the regularisation included; infinite where it or the gradient is not finite
    gradient: Tensor  # this rank's slice
    steepness: float  # the largest element of the gradient, over all slices
    slope: float  # along the direction that was asked for
    totals: Totals  # of the rows alone


class FullObjective:
    """The mean loss over all rows, plus l2 / 2 times the square of all parameters."""

    def __init__(self, training: Training, l2: float) -> None:
        self._training, self._task, self._l2 = training, training.task, l2
        self._comm = training.ctx.comm
        self._values = training.task.params.values
        count, size = self._values.numel(), self._comm.size
        lengths = [len(part) for part in torch.tensor_split(torch.empty(count), size)]
        start = sum(lengths[: self._comm.rank])
        self._slice = slice(start, start + lengths[self._comm.rank])
        self._gradient = torch.zeros_like(self._values, dtype=torch.float64)
        self._stats = torch.zeros_like(training.task.params.stats, dtype=torch.float64)
        self.own_loss = 0.0  # of this rank's rows in the last pass, to tell who has a NaN
        # Relative to the value: differences that may be nothing but rounding in a sum of rows.
        self.precision = 10 * torch.finfo(self._values.dtype).eps
        self._comm.broadcast_(self._values)
        for buffer in training.task.module.buffers():
            self._comm.broadcast_(buffer)

    @property
    def point(self) -> Tensor:
        """A copy of this rank's slice of the parameters."""
        return self._values[self._slice].to(torch.float64, copy=True)

    def move(self, point: Tensor) -> None:
        """Every rank brings its slice; all have all parameters afterwards."""
        pieces = self._comm.allgather(point.to(self._values.dtype))
        self._values.copy_(torch.cat(pieces))
        self._training.clock.lap("communication")

    def add_up(self, numbers: Tensor) -> list[float]:
        """The sums over all ranks, the same bits on each."""
        return [sum(column) for column in zip(*self._rows(numbers), strict=True)]

    def dots(self, *pairs: tuple[Tensor, Tensor]) -> list[float]:
        """Products of vectors of which each rank holds a slice."""
        return self.add_up(torch.stack([one @ other for one, other in pairs]))

    def products(self, vectors: Tensor) -> list[list[float]]:
        """Of each vector with each: one small table that all ranks add up."""
        count = len(vectors)
        sums = self.add_up((vectors @ vectors.T).reshape(-1))
        return [sums[row * count : (row + 1) * count] for row in range(count)]

    def evaluate(self, epoch: Epoch, direction: Tensor | None = None) -> Evaluation:
        """One pass over all rows at the present parameters, and its slope along a direction."""
        totals = self._pass(epoch)
        gradient = self._comm.reduce_scatter(self._gradient)
        divisor = self._divisor(totals)
        gradient /= divisor
        point = self.point
        gradient += self._l2 * point
        along = gradient if direction is None else direction
        largest = gradient.abs().max() if len(gradient) else gradient.new_zeros(())
        mine = torch.stack([gradient @ along, point @ point, largest])
        rows = self._rows(mine)
        slope, square = (sum(row[column] for row in rows) for column in (0, 1))
        value = totals.loss / divisor + 0.5 * self._l2 * square
        is_finite = math.isfinite(value) and all(math.isfinite(row[2]) for row in rows)
        self._training.clock.lap("communication")
        return Evaluation(
            value=value if is_finite else math.inf,
            gradient=gradient,
            steepness=max(row[2] for row in rows),
            slope=slope,
            totals=totals,
        )

    def curvature(self, epoch: Epoch, direction: Tensor) -> Tensor:
        """This rank's slice of the Hessian times a vector of slices: one more pass."""
        task, params = self._task, self._task.params.parameters
        whole = torch.cat(self._comm.allgather(direction.to(self._values.dtype)))
        parts = torch.split(whole, [parameter.numel() for parameter in params])
        along = [part.view(one.shape) for part, one in zip(parts, params, strict=True)]
        stats = torch.zeros_like(task.params.stats)
        self._begin_pass()
        for batch in epoch.whole_pass():
            self._seed(batch)
            added, measured = torch.zeros_like(self._gradient), torch.zeros_like(stats)
            sums = Sums(measured)
            for piece in task.pieces(batch):
                loss = task.forward(piece, sums)
                products = _hessian_product(loss, params, along)
                added += torch.cat([product.reshape(-1) for product in products])
            if self._counts(batch, epoch):
                self._gradient += added
                stats += measured
            self._training.clock.lap("compute")
        totals = task.totals(stats.new_tensor(self.add_up(stats.double())))
        product = self._comm.reduce_scatter(self._gradient)
        product /= self._divisor(totals)
        product += self._l2 * direction
        self._training.clock.lap("communication")
        return product

    def _begin_pass(self) -> None:
        """The same randomness in every pass, and sums of nothing."""
        seed_rank(self._training.ctx.seed, self._training.ctx.rank)
        self._task.forward.metric_objects.reset()
        self._gradient.zero_()
        self._stats.zero_()

    def _pass(self, epoch: Epoch) -> Totals:
        """All rows' stats; the gradients of this rank's own are left in the buffer."""
        training, task = self._training, self._task
        self._begin_pass()
        for batch in epoch.whole_pass():
            self._seed(batch)
            task.grad(batch)
            if self._counts(batch, epoch):
                self._gradient += task.params.grads
                self._stats += task.params.stats
            training.clock.lap("compute")
        self.own_loss = float(self._stats[LOSS])
        self._stats[VOTES] = self._stats.new_tensor(task.vote)  # once, however many batches
        sums = self._stats.new_tensor(self.add_up(self._stats))
        return task.totals(sums)

    def _seed(self, batch: Batch) -> None:
        """Rows that may come to any rank have the same randomness on each."""
        if isinstance(batch, LeasedBatch):
            owner, rows_before = batch.place
            seed_rank(self._training.ctx.seed, owner, rows_before)

    def _counts(self, batch: Batch, epoch: Epoch) -> bool:
        """Whether this rank is the first that has computed these rows."""
        if not isinstance(batch, LeasedBatch) or batch.confirm():
            return True
        epoch.rows_here -= batch.num_rows
        return False

    def _divisor(self, totals: Totals) -> float:
        if not totals.rows or not totals.weight:
            raise DataError("no row has a weight in the loss, so there is nothing to train on")
        objective = self._task.forward.objective
        return 1.0 if objective is not None and objective.is_sum else totals.weight

    def _rows(self, numbers: Tensor) -> list[list[float]]:
        """Gather all ranks' numbers, exactly: as a sum of tables with one nonzero row each."""
        table = numbers.new_zeros(self._comm.size, numbers.numel())
        table[self._comm.rank] = numbers
        rows: list[list[float]] = self._comm.allreduce_(table).tolist()
        return rows


def _hessian_product(
    loss: Any, parameters: Sequence[Tensor], along: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The gradient of the slope along a vector."""
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
    slopes = [(one * other).sum() for one, other in zip(gradients, along, strict=True)]
    slope = torch.stack(slopes).sum()
    if not slope.requires_grad:
        return [torch.zeros_like(parameter) for parameter in parameters]  # the loss is linear
    return torch.autograd.grad(slope, parameters, materialize_grads=True)
