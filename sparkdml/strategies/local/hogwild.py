"""Hogwild: the workers of one host step on the same parameters, in memory, without a lock.

Each worker computes gradients of its own batches and lets its optimizer change the parameters that
all workers share. No worker waits: one may read what another is writing, and two that add to one
number at the same moment may lose one of the additions. Where gradients are sparse or steps are
small that hardly matters. (Niu et al. 2011, "Hogwild!: a lock-free approach to parallelizing
stochastic gradient descent".)

Every `steps` batches the workers meet, to count, to make checkpoints and to be stopped; between two
synchronizations the parameters are in shared memory, at one each worker has its own copy, so
that nothing moves while it is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from sparkdml.comm.base import Communicator
from sparkdml.comm.shared_memory.segment import Offer, Segment
from sparkdml.errors import ParameterError, SetupError
from sparkdml.feed.batch import Batch
from sparkdml.strategies.local.base import LocalStrategy, OptimizerState
from sparkdml.training.training import Training

VALUES_AT = 4096  # the segment's first page has its nonce
NOTHING = Offer(0, -1, 0)


class Hogwild(LocalStrategy):
    """Lock-free steps on parameters in shared memory; for workers of one host, on the CPU.

    Args:
        steps: batches of each worker between two synchronizations. History, callbacks and
            checkpoints see a round as one step.
        optimizer_state: "keep" each worker's own momentum from round to round, or "reset" it.
        backend: of the communicator for synchronizations.
    """

    def __init__(
        self, steps: int = 50, optimizer_state: OptimizerState = "keep", backend: str = "auto"
    ) -> None:
        super().__init__(steps, optimizer_state, backend)
        self.steps = steps

    def start(self, training: Training) -> None:
        super().start(training)
        if training.ctx.device.type != "cpu":
            raise ParameterError(
                "strategy",
                f"Hogwild() on {training.ctx.device}",
                "used on the CPU",
                "Use LocalSGD() or AllReduce() on GPUs.",
            )
        self._shared: Tensor = share(training.task.params.values, training.ctx.comm)

    def run(self, role: str, training: Training) -> None:
        super().run(role, training)
        del self._shared  # the last round has left all workers with a copy

    def _train(self, training: Training, batches: Iterator[Batch]) -> Tensor:
        """A round on the shared parameters; a worker without rows stays on its copy."""
        params = training.task.params
        self._comm.barrier()  # all workers have a copy from the last round
        if self._comm.rank == 0:
            self._shared.copy_(params.values)  # callbacks may have changed it
        self._comm.barrier()
        first = next(batches, None)
        if first is not None:
            params.rebind(self._shared)
            batches = chain([first], batches)
        return super()._train(training, batches)

    def meet(self, share: float) -> None:
        """Called when all workers have stopped."""
        self._task.params.rebind(self._shared.clone())

    def __repr__(self) -> str:
        return (
            f"Hogwild(steps={self.steps}, optimizer_state={self.optimizer_state!r}, "
            f"backend={self.backend!r})"
        )


def share(values: Tensor, comm: Communicator) -> Tensor:
    """A tensor like `values` in memory that all ranks have mapped; every rank calls it.

    Raises SetupError on every rank where one of them can't: it is on another host.
    """
    if comm.size == 1:
        return values.clone()
    num_bytes = VALUES_AT + values.nbytes
    segment, offer = None, NOTHING
    if comm.rank == 0:
        try:
            segment, offer = Segment.create()
            segment.allocate(num_bytes)
        except (OSError, AttributeError):  # no memory, or a platform without such files
            offer = NOTHING
    numbers = comm.broadcast_(torch.tensor([offer.pid, offer.fd, offer.nonce]))
    if comm.rank:
        segment = Segment.open(Offer(*numbers.tolist()))
    mapped = None if numbers[1] < 0 or segment is None else _map(segment, num_bytes, comm.rank)
    found = comm.allgather(torch.tensor([mapped is not None], dtype=torch.int64))
    if segment is not None:
        segment.close()  # the mapping stays
    if mapped is None or not all(found):
        without = next(rank for rank, each in enumerate(found) if not each)
        raise SetupError(
            f"Hogwild() needs all workers in the memory of one host, and rank {without} can't map "
            f"the {num_bytes} bytes of rank 0. Run the workers on one host (one executor, or "
            "local[n]), or use LocalSGD() or AllReduce(), which need no shared memory"
        )
    return mapped[VALUES_AT:num_bytes].view(values.dtype)


def _map(segment: Segment, num_bytes: int, local_rank: int) -> Tensor | None:
    try:
        segment.map(num_bytes, local_rank)
    except OSError:  # no memory, or a limit on it
        return None
    return segment.bytes
