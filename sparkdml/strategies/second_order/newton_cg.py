"""Newton's method on the full data, its equations solved by conjugate gradients.

The Hessian is never written down: each conjugate-gradient step needs its product with one vector,
which is one more pass over all ranks' rows, by differentiating the gradient once more. The system
is solved as exactly as it is worth at the present distance from the minimum, and no further.
(Nocedal and Wright, Numerical Optimization, 2nd edition, algorithm 7.1; products by
differentiation: Pearlmutter 1994, doi 10.1162/neco.1994.6.1.147.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from sparkdml.errors import ParameterError
from sparkdml.strategies.second_order.base import SecondOrder
from sparkdml.strategies.second_order.full_objective import Evaluation

if TYPE_CHECKING:
    from torch import Tensor

    from sparkdml.training.epoch import Epoch


class NewtonCG(SecondOrder):
    """Minimise the mean loss over all rows, an epoch of the estimator being one Newton step.

    Fewer iterations than `LBFGS`, each of more passes over the data: for losses that are badly
    scaled, or where a pass is cheap. The history has what that of `LBFGS` has. The model must be
    one that torch can differentiate twice.

    Args:
        tolerance: of the gradient's largest element, at which the minimum counts as found.
        l2: adds l2 / 2 times the sum of the squares of all trainable parameters to the loss.
        max_products: of one iteration with the Hessian, each a pass over the data.
        max_trials: of one line search, each a pass over the data.
        backups: whether a rank that is done with its rows computes those that a slow one has not
            come to, so that no rank waits for more than its current batch. Costs a question to the
            driver for every batch, and then two runs agree to rounding, no longer to the bit.
        backend: "horovod", "torch", "mpi", or "auto" for Horovod where it is installed.
    """

    def __init__(
        self,
        tolerance: float = 1e-5,
        l2: float = 0.0,
        max_products: int = 30,
        max_trials: int = 20,
        backups: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(tolerance, l2, max_trials=max_trials, backups=backups, backend=backend)
        if max_products < 1:
            raise ParameterError("max_products", max_products, "at least 1")
        self.max_products = max_products

    def iterate(self, epoch: Epoch, here: Evaluation) -> Evaluation | None:
        direction = self._solve(epoch, here.gradient)
        (slope,) = self.objective.dots((here.gradient, direction))
        return self.search_along(epoch, here, direction, slope, first_step=1.0)

    def _solve(self, epoch: Epoch, gradient: Tensor) -> Tensor:
        """Find the quadratic model's minimum, or go as far as it curves upwards."""
        objective = self.objective
        found = torch.zeros_like(gradient)
        residual, direction = gradient.clone(), -gradient
        (square,) = objective.dots((residual, residual))
        enough = min(0.25, math.sqrt(square)) * square  # the squares of min(1/2, |g|^1/2) |g|
        for number in range(self.max_products):
            product = objective.curvature(epoch, direction)
            (bend,) = objective.dots((direction, product))
            if bend <= 0:  # no minimum that way: the model ends where it was last known to curve
                return direction if number == 0 else found
            step = square / bend
            found += step * direction
            residual += step * product
            before = square
            (square,) = objective.dots((residual, residual))
            if square <= enough:
                break
            direction = square / before * direction - residual
        return found

    def __repr__(self) -> str:
        return (
            f"NewtonCG(tolerance={self.tolerance:g}, l2={self.l2:g}, "
            f"max_products={self.max_products}, max_trials={self.max_trials}, "
            f"backups={self.backups}, backend={self.backend!r})"
        )
