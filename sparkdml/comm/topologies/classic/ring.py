"""A ring: each rank sends to the next and receives from the one before.

The tensor is cut into n parts. In n-1 steps every part travels once round, added to by each rank,
and in n-1 more the finished parts do. Each rank sends 2(n-1) messages and 2(n-1)/n · S bytes, which
is the least that is possible; but a short tensor pays for 2(n-1) messages one after the other.
(Patarasuk and Yuan 2009; brought to deep learning by Baidu, Gibiansky 2017.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdml.comm.base import PointToPoint
from sparkdml.comm.topologies.base import Combine, Sends


def ring(messages: PointToPoint, rank: int, size: int, tensor: Tensor, combine: Combine) -> None:
    sends, parts = Sends(messages), torch.tensor_split(tensor, size)
    after, before = (rank + 1) % size, (rank - 1) % size
    buffer = torch.empty_like(parts[0])  # the longest

    for step in range(size - 1):
        mine, next_part = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        received = buffer[: next_part.numel()]
        arriving = sends.receive(received, before)
        sends.send(mine, after)
        arriving.wait()
        combine(next_part, received)

    for step in range(size - 1):
        mine, next_part = parts[(rank + 1 - step) % size], parts[(rank - step) % size]
        arriving = sends.receive(next_part, before)
        sends.send(mine, after)
        arriving.wait()
    sends.finish()
