"""Recursive halving, then doubling: partners at distance 1, 2, 4, … exchange halves.

At each step a rank keeps one half of what it holds and sends the other to its partner, so that
after log2(n) steps it has one finished part of n; then the same partners, backwards, exchange what
is finished. As many bytes as a ring, 2(n-1)/n · S, in only 2·log2(n) messages.

Where n is not a power of two, the ranks beyond the largest one, p, first give their tensor to a
partner and get the result in the end: for each such pair S bytes and one message more in each
direction. (Rabenseifner 2004; Thakur, Rabenseifner and Gropp 2005; used by Caffe2 in Goyal et al.
2017, arXiv 1706.02677.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdml.comm.base import PointToPoint
from sparkdml.comm.topologies.base import Combine, Sends


def halving_doubling(
    messages: PointToPoint, rank: int, size: int, tensor: Tensor, combine: Combine
) -> None:
    power = 1 << (size.bit_length() - 1)
    sends = Sends(messages)
    if rank >= power:
        sends.send(tensor, rank - power)
        sends.receive(tensor, rank - power).wait()
        sends.finish()
        return
    folded = rank + power if rank + power < size else None
    buffer = torch.empty_like(tensor if folded is not None else tensor[: -(-tensor.numel() // 2)])
    if folded is not None:
        sends.receive(buffer, folded).wait()
        combine(tensor, buffer)

    steps: list[tuple[int, Tensor, Tensor]] = []
    held, distance = tensor, 1
    while distance < power:
        low, high = torch.tensor_split(held, 2)
        kept, given = (high, low) if rank & distance else (low, high)
        partner = rank ^ distance
        received = buffer[: kept.numel()]
        arriving = sends.receive(received, partner)
        sends.send(given, partner)
        arriving.wait()
        combine(kept, received)
        steps.append((partner, kept, given))
        held, distance = kept, 2 * distance

    for partner, finished, missing in reversed(steps):
        arriving = sends.receive(missing, partner)
        sends.send(finished, partner)
        arriving.wait()
    if folded is not None:
        sends.send(tensor, folded)
    sends.finish()
