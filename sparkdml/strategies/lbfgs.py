"""L-BFGS on the full data: DistBelief's Sandblaster (Dean et al., NIPS 2012), inside one gang.

Gradients are sums over all ranks' rows; every vector is cut into slices, one a rank, and so are the
dot products; the line search is coordinated by giving every rank the same numbers. Sandblaster's
servers are the ranks themselves here, and its coordinator is the arithmetic that all of them do
alike. For smooth losses, convex above all, of models that are small next to their data.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparkdml.checkpoint.state import Entry, State
from sparkdml.errors import ParameterError
from sparkdml.strategies.full_objective import Evaluation
from sparkdml.strategies.second_order import SecondOrder
from sparkdml.strategies.two_loop import combined, direction_coefficients

if TYPE_CHECKING:
    from sparkdml.training.epoch import Epoch

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
            come to, so that nobody waits for more than the batch it is at. Costs a question to the
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
        super().__init__(tolerance, l2, max_trials, backups, backend)
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
        reached = self.search_along(epoch, here, direction, slope, first_step)
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
