"""Elastic averaging SGD: each worker explores on its own, tied to a common centre by a spring.

The synchronous form over allreduce: every `steps` steps each worker's model is drawn to the centre,
and the centre to the mean of the models. With a momentum optimizer it is the paper's EAMSGD.
(Zhang, Choromanska and LeCun 2015, arXiv 1412.6651.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sparkdml.checkpoint.state import Entry, State
from sparkdml.errors import ParameterError
from sparkdml.strategies.local.base import LocalStrategy, OptimizerState, learning_rates
from sparkdml.training.training import Training

BETA = 0.9  # of the centre's way to the mean; the paper's own choice


def draw_together_(
    own: Tensor, centre: Tensor, mean: Tensor, alpha: Tensor | float, beta: Tensor | float
) -> None:
    """own' = own - alpha * (own - centre) and centre' = centre + beta * (mean - centre), in place.

    Both see the other as it was before. With beta = n * alpha and equal shares the spring pulls as
    much on the centre as on the n models: their sum stays what it was.
    """
    pull = (own - centre) * alpha
    centre.add_((mean - centre) * beta)
    own.sub_(pull)


class EASGD(LocalStrategy):
    """Let the workers' models differ, pulled to a center every few steps; the center is the result.

    With one worker, `steps=1` and `rho` = 1/2 of the inverse learning rate, it equals SGD with half
    the rate.

    Args:
        steps: steps of each worker between two synchronizations.
        rho: how hard the spring pulls: alpha = learning rate * rho of the way between a model and
            the centre, and n * alpha, which must be at most 1, of the centre's way to the mean of
            n models. None: the paper's choice, 0.9 / n and 0.9.
        optimizer_state: "keep" or "reset" the momentum of each worker's own optimizer at each
            synchronization.
        backend: "horovod", "torch", "mpi", or "auto" for Horovod where it is installed.
    """

    def __init__(
        self,
        steps: int = 10,
        rho: float | None = None,
        optimizer_state: OptimizerState = "keep",
        backend: str = "auto",
    ) -> None:
        super().__init__(steps, optimizer_state, backend)
        if rho is not None and not rho > 0:
            raise ParameterError("rho", rho, "None or a number above 0")
        self.steps, self.rho = steps, rho

    def start(self, training: Training) -> None:
        super().start(training)
        self._centre = self._task.params.values.clone()
        training.result_values = self._centre
        if self.rho is not None:
            self._alpha(self.rho, learning_rates(self._task))  # raises before the first step

    def _alpha(self, rho: float, rates: Tensor) -> Tensor:
        size, alpha = self._comm.size, rates * rho
        if float(alpha.max()) * size > 1 + 1e-6:  # a rounding error is none of the user's
            raise ParameterError(
                "rho",
                rho,
                f"at most 1 / (learning rate * workers) = {rho / float(alpha.max()) / size:g}",
                "The centre would jump over the mean of the models.",
            )
        return alpha

    def meet(self, share: float) -> None:
        own = self._task.params.values
        alpha: Tensor | float = BETA / self._comm.size
        if self.rho is not None:
            alpha = self._alpha(self.rho, self.rates(share))
        mean = own * share
        self._comm.allreduce_(mean)
        draw_together_(own, self._centre, mean=mean, alpha=alpha, beta=alpha * self._comm.size)

    def state(self) -> State:
        """A model each, and the centre. Other numbers of workers begin with the models' mean."""
        own = Entry(self._task.params.values, "mean")
        return {**super().state(), "own": own, "centre": Entry(self._centre)}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._task.params.values.copy_(state["own"])
        self._centre.copy_(state["centre"])

    def __repr__(self) -> str:
        return (
            f"EASGD(steps={self.steps}, rho={self.rho}, "
            f"optimizer_state={self.optimizer_state!r}, backend={self.backend!r})"
        )
