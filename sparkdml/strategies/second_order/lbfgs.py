"""L-BFGS on the full data: DistBelief's Sandblaster (Dean et al., NIPS 2012), inside one gang.

Gradients are sums over all ranks' rows; every vector is cut into slices, one a rank, and so are the
dot products; the line search is coordinated by giving every rank the same numbers. Sandblaster's
servers are the ranks themselves here, and its coordinator is the arithmetic that all of them do
alike. For smooth losses, convex above all, of models that are small next to their data.

The two-loop recursion of L-BFGS on dot products alone: no vector is touched.

The direction is a combination of the remembered steps s, the changes y of the gradient in them, and
the gradient g. Its coefficients follow from the products of all these vectors with each other, so
ranks that hold slices of the vectors need to add up one small table an iteration, in place of two
scalars for each pair, one after the other. (Nocedal 1980, doi 10.1090/S0025-5718-1980-0572855-7;
on products alone: Chen, Wang and Zhou, Large-scale L-BFGS using MapReduce, NIPS 2014.)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparkdml.checkpoint.state import Entry, State
from sparkdml.errors import ParameterError
from sparkdml.strategies.second_order.base import SecondOrder
from sparkdml.strategies.second_order.full_objective import Evaluation

if TYPE_CHECKING:
    from sparkdml.training.epoch import Epoch


Table = Sequence[Sequence[float]]


def direction_coefficients(products: Table) -> list[float]:
    """Of s_0 … s_m-1, y_0 … y_m-1 and g, from the table of their products; the oldest first."""
    num_pairs = (len(products) - 1) // 2
    coefficients = [0.0] * (2 * num_pairs) + [-1.0]
    if not num_pairs:
        return coefficients

    def along(index: int) -> float:
        """The product of the direction so far with one of the vectors."""
        return sum(c * row[index] for c, row in zip(coefficients, products, strict=True))

    shares = [0.0] * num_pairs
    for pair in reversed(range(num_pairs)):
        s, y = pair, num_pairs + pair
        shares[pair] = along(s) / products[s][y]
        coefficients[y] -= shares[pair]
    newest_s, newest_y = num_pairs - 1, 2 * num_pairs - 1
    scale = products[newest_s][newest_y] / products[newest_y][newest_y]
    coefficients = [scale * c for c in coefficients]
    for pair in range(num_pairs):
        s, y = pair, num_pairs + pair
        coefficients[s] += shares[pair] - along(y) / products[s][y]
    return coefficients


def combined(coefficients: Sequence[float], products: Table, index: int) -> float:
    """The product of a combination of the vectors with one of them."""
    return sum(c * row[index] for c, row in zip(coefficients, products, strict=True))


CURVED = 1e-12  # of |s| |y|: a pair that is flatter would spoil the directions to come


class LBFGS(SecondOrder):
    """Minimise the mean loss over all rows, an epoch of the estimator being one iteration.

    An iteration takes one pass over the data in most cases, and more where the line search asks for
    them: the history has `passes`, `step_length` and `gradient_norm` (the largest element) beside
    the loss of the point that it reached. The run ends before its last epoch when `tolerance` is
    reached, or when no step lowers the loss any more. There is no optimizer= beside it, no learning
    rate, no clipping; batchSize is how many rows are computed at once and changes nothing else.

    Args:
        history: how many steps back the curvature is remembered.
        tolerance: of the gradient's largest element, at which the minimum counts as found.
        l2: adds l2 / 2 times the sum of the squares of all trainable parameters to the loss.
        max_trials: of one line search, each a pass over the data.
        backups: whether a rank that is done with its rows computes those that a slow one has not
            come to, so that no rank waits for more than its current batch. Costs a question to the
            driver for every batch, and then two runs agree to rounding, no longer to the bit.
        backend: "horovod", "torch", "mpi", or "auto" for Horovod where it is installed.
    """

    def __init__(
        self,
        history: int = 10,
        tolerance: float = 1e-5,
        l2: float = 0.0,
        max_trials: int = 20,
        backups: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(tolerance, l2, max_trials=max_trials, backups=backups, backend=backend)
        if history < 1:
            raise ParameterError("history", history, "at least 1")
        self.history = history
        self._pairs: deque[tuple[Tensor, Tensor]] = deque(maxlen=history)

    def iterate(self, epoch: Epoch, here: Evaluation) -> Evaluation | None:
        objective = self.objective
        start = objective.point
        direction, slope = self._direction(here)
        first_step = 1.0
        if not self._pairs:  # the gradient says where to, but not how far
            first_step = min(1.0, 1.0 / math.sqrt(-slope))
        reached = self.search_along(
            epoch, here, direction=direction, slope=slope, first_step=first_step
        )
        if reached is None:
            if not self._pairs:
                return None
            self._pairs.clear()  # once more, down the gradient itself
            return self.iterate(epoch, here)
        self._remember(objective.point - start, reached.gradient - here.gradient)
        return reached

    def _direction(self, here: Evaluation) -> tuple[Tensor, float]:
        """This rank's slice of it, and the slope along it."""
        steps, changes = zip(*self._pairs, strict=True) if self._pairs else ((), ())
        vectors = torch.stack([*steps, *changes, here.gradient])
        products = self.objective.products(vectors)
        coefficients = direction_coefficients(products)
        slope = combined(coefficients, products, len(vectors) - 1)
        return vectors.new_tensor(coefficients) @ vectors, slope

    def _remember(self, step: Tensor, change: Tensor) -> None:
        """Unless the loss does not curve upwards along the step."""
        product, square, change_square = self.objective.dots(
            (step, change), (step, step), (change, change)
        )
        if product > CURVED * (square * change_square) ** 0.5:
            self._pairs.append((step, change))

    def state(self) -> State:
        state = super().state()
        if state:
            steps, changes = zip(*self._pairs, strict=True) if self._pairs else ((), ())
            vectors = {"steps": list(steps), "changes": list(changes)}
            state["pairs"] = Entry(vectors, "reset")  # slices: each rank has its own
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        pairs = state.get("pairs", {"steps": [], "changes": []})
        self._pairs.clear()
        self._pairs.extend(zip(pairs["steps"], pairs["changes"], strict=True))

    def __repr__(self) -> str:
        return (
            f"LBFGS(history={self.history}, tolerance={self.tolerance:g}, l2={self.l2:g}, "
            f"max_trials={self.max_trials}, "
            f"backups={self.backups}, backend={self.backend!r})"
        )
