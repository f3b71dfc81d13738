"""Entries to the workers that own them: Spark spreads rows by hash, a program by its blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparkdml.comm.base import Communicator
from sparkdml.programs.scheduling import Ints


def deal(comm: Communicator, owner: Ints, *columns: NDArray[Any]) -> list[NDArray[Any]]:
    """Send entry i of every column to rank `owner[i]`; this rank's own, in an order of ranks.

    Every rank calls it, with columns of the same kinds.
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
    """All values in one vector, each added up over the ranks."""
    flat = np.concatenate([np.atleast_1d(np.asarray(value, dtype=np.float64)) for value in values])
    return comm.allreduce_(torch.from_numpy(flat)).numpy()
