"""A module's buffers (BatchNorm's statistics and the like), which each rank changes by itself."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from sparkdml.comm.base import Communicator


def merge_buffers(module: nn.Module, comm: Communicator, rows: float) -> None:
    """Make buffers alike: the mean, weighted by the rows that each rank saw; integers by rank 0.

    Those that are alike already stay as they are, to the bit: masks, positions, and other
    constants.
    """
    buffers = list(module.buffers())
    if not buffers or comm.size == 1:
        return
    changed = _that_differ(buffers, comm)
    floating = [buffer for buffer in changed if buffer.is_floating_point()]
    if floating:
        total = torch.tensor([rows], dtype=torch.float64, device=floating[0].device)
        total_rows = comm.allreduce_(total).item()
        if total_rows:
            for buffer in floating:
                # Not times 0, by which an infinity would become NaN on all ranks.
                buffer.mul_(rows / total_rows) if rows else buffer.zero_()
            comm.grouped_allreduce_(floating)
    for buffer in changed:
        if not buffer.is_floating_point():
            comm.broadcast_(buffer)


def _that_differ(buffers: list[Tensor], comm: Communicator) -> list[Tensor]:
    """Those of which the ranks have different copies: told by a hash of each, not by the content.

    Every rank finds the same ones.
    """
    mine = torch.tensor([_hash(buffer) for buffer in buffers], device=buffers[0].device)
    hashes = zip(*(theirs.tolist() for theirs in comm.allgather(mine)), strict=True)
    return [buffer for buffer, own in zip(buffers, hashes, strict=True) if len(set(own)) > 1]


def _hash(tensor: Tensor) -> int:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy().data
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
