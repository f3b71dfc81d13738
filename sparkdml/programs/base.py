"""Petuum's programming model: a program implements `schedule`, `push` and `pull`.

`schedule` assigns each worker the parameters that it may change in this round, so that workers
don't interfere; `push` computes on a worker's own rows with these parameters; `pull` combines the
workers' results. The parameters are in tables on the servers, and a worker holds only those of its
round. (Lee et al. 2014, "On model parallelization and scheduling
strategies for distributed machine learning"; Xing et al. 2015, "Petuum".)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from sparkdml.comm.base import Communicator
from sparkdml.errors import ParameterError


class Program(ABC):
    """One rank's part. Rank 0 is the scheduler beside its own work as a worker."""

    @abstractmethod
    def schedule(self, round: int, num_workers: int) -> Sequence[Tensor] | None:
        """On rank 0: return each worker's work as a flat int64 tensor, or None at the end."""

    @abstractmethod
    def push(self, work: Tensor) -> Tensor:
        """In every worker: compute on its own rows; return the result for rank 0, in float64."""

    @abstractmethod
    def pull(self, works: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """On rank 0: combine the workers' results."""

    def finish(self) -> None:
        """In every worker, after the last round: release what it still holds."""
        return


def run_program(program: Program, comm: Communicator, max_rounds: int | None = None) -> int:
    """Run until the scheduler ends the program, or for `max_rounds`; called on every rank.

    A round is a barrier: no rank begins the next one before `pull` has seen all ranks' parts.
    """
    if max_rounds is not None and max_rounds < 0:
        raise ParameterError("max_rounds", max_rounds, "at least 0, or None for no limit")
    round = 0
    while max_rounds is None or round < max_rounds:
        works = program.schedule(round, comm.size) if comm.rank == 0 else None
        work = _hand_out(works, comm)
        if work is None:
            break
        parts = comm.gather(program.push(work))
        if parts is not None:
            assert works is not None
            program.pull(works, parts)
        round += 1
    program.finish()
    comm.barrier()
    return round


def _hand_out(works: Sequence[Tensor] | None, comm: Communicator) -> Tensor | None:
    """Return this rank's work, or None on all ranks if the program is over."""
    messages = None
    if comm.rank == 0:
        parts = [torch.empty(0, dtype=torch.int64)] * comm.size if works is None else works
        goes_on = torch.tensor([works is not None], dtype=torch.int64)
        messages = [torch.cat([goes_on, part]) for part in parts]
    message = comm.scatter(messages)
    return message[1:] if message[0] else None
