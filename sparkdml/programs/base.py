"""Petuum's programming model: a program implements `schedule`, `push` and `pull`, over its rows.

`schedule` assigns each worker the parameters that it may change in this round, so that workers
don't interfere; `push` computes on a worker's own rows with these parameters; `pull` combines the
workers' results. The parameters are in tables on the servers, and a worker holds only those of its
round. (Lee et al. 2014, "On model parallelization and scheduling
strategies for distributed machine learning"; Xing et al. 2015, "Petuum".)

A worker has its rows of a DataFrame as arrays. Spark distributes rows by hash, while a program
needs them by its blocks: so they are redistributed by owner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparkdml.comm.base import Communicator
from sparkdml.errors import ParameterError
from sparkdml.programs.scheduling import Ints
from sparkdml.runtime.worker.context import Context


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


def deal(comm: Communicator, owner: Ints, *columns: NDArray[Any]) -> list[NDArray[Any]]:
    """Send entry i of every column to rank `owner[i]`; return the received ones, in rank order.

    Every rank calls it, with columns of the same dtypes.
    """
    order = np.argsort(owner, kind="stable")
    borders = np.cumsum(np.bincount(owner, minlength=comm.size))[:-1]
    dealt = []
    for column in columns:
        parts = np.split(np.ascontiguousarray(column[order]), borders)
        received = comm.alltoall([torch.from_numpy(part) for part in parts])
        dealt.append(np.concatenate([part.numpy() for part in received]))
    return dealt


def sum_over_ranks(comm: Communicator, *values: float | NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum each value over the ranks, and return all sums in one vector."""
    flat = np.concatenate([np.atleast_1d(np.asarray(value, dtype=np.float64)) for value in values])
    return comm.allreduce_(torch.from_numpy(flat)).numpy()


ROWS_AT_ONCE = 1 << 16


def read_columns(ctx: Context, *names: str) -> list[NDArray[Any]]:
    """Read these columns of this worker's rows into memory; empty arrays if it has no rows."""
    kinds = {column.name: column.dtype for column in ctx.data.plan.columns}
    for name in names:
        if name not in kinds:
            raise ParameterError("names", name, f"columns of the data ({', '.join(kinds)})")
    parts: dict[str, list[NDArray[Any]]] = {
        name: [np.empty(0, dtype=kinds[name])] for name in names
    }
    for batch in ctx.feed(ROWS_AT_ONCE, shuffle=False):
        for name in names:
            array = batch[name].cpu().numpy()
            if array.ndim > 1 and parts[name][0].ndim == 1:
                parts[name][0] = np.empty((0, *array.shape[1:]), dtype=kinds[name])
            parts[name].append(array.copy())  # the feed uses its buffers again
    return [np.concatenate(parts[name]) for name in names]
