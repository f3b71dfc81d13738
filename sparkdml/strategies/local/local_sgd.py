"""Local SGD: some steps of each worker's own, then the mean of all models.

(McDonald et al. 2010; Zhou and Cong 2018, arXiv 1708.01012; Stich 2019, arXiv 1805.09767.) Workers
talk once in `steps` steps, and send a model each time, as large as a gradient.
"""

from __future__ import annotations

from sparkdml.strategies.local.base import LocalStrategy, OptimizerState


class LocalSGD(LocalStrategy):
    """Average the models of all workers every few steps.

    With `steps=1` and an optimizer without memory it equals `AllReduce`.

    Args:
        steps: steps of each worker between two averages. More of them cost less communication,
            and let the models drift further apart.
        optimizer_state: "keep" or "reset" the momentum of each worker's own optimizer when the
            models are averaged.
        backend: "horovod", "torch", "mpi", or "auto" for Horovod where it is installed.
    """

    def __init__(
        self, steps: int = 8, optimizer_state: OptimizerState = "keep", backend: str = "auto"
    ) -> None:
        super().__init__(steps, optimizer_state, backend)
        self.steps = steps

    def meet(self, share: float) -> None:
        self.average(share)

    def __repr__(self) -> str:
        return (
            f"LocalSGD(steps={self.steps}, optimizer_state={self.optimizer_state!r}, "
            f"backend={self.backend!r})"
        )
