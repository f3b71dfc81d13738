"""Rows for programs: a worker's rows of a DataFrame as arrays, and redistributing them by owner.

Spark distributes rows by hash, while a program needs them by its blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparkdml.comm.base import Communicator
from sparkdml.errors import ParameterError
from sparkdml.programs.scheduling import Ints
from sparkdml.runtime.worker.context import Context


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
