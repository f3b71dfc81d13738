"""A module's buffers (BatchNorm's statistics and the like), which each rank changes by itself."""

from __future__ import annotations

from torch import nn

from sparkdml.comm.base import Communicator


def merge_buffers(module: nn.Module, comm: Communicator, rows: float) -> None:
    """Make buffers alike: the mean, weighted by the rows that each rank saw; integers by rank 0."""
    buffers = list(module.buffers())
    if not buffers or comm.size == 1:
        return
    floating = [buffer for buffer in buffers if buffer.is_floating_point()]
    if floating:
        total = floating[0].new_tensor([rows])
        comm.allreduce_(total)
        share = rows / max(1.0, total.item())
        for buffer in floating:
            buffer.mul_(share)
        comm.grouped_allreduce_(floating)
    for buffer in buffers:
        if not buffer.is_floating_point():
            comm.broadcast_(buffer)
