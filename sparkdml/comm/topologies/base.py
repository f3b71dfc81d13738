"""The topologies' common signature, and messages that may be empty."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sparkdml.comm.base import PointToPoint, Work
from sparkdml.comm.composed import Done

Combine = Callable[[Tensor, Tensor], object]
Topology = Callable[[PointToPoint, int, int, Tensor, Combine], None]


class Sends:
    """Sent messages that are awaited together at the end."""

    def __init__(self, messages: PointToPoint, tag: int = 0) -> None:
        self._messages, self._tag = messages, tag
        self._works: list[Work] = []

    def send(self, tensor: Tensor, to: int) -> None:
        if tensor.numel() > 0:
            self._works.append(self._messages.isend(tensor, to, self._tag))

    def receive(self, tensor: Tensor, source: int) -> Work:
        """Receive a message; both sides know its length, so an empty one is never sent."""
        if tensor.numel() == 0:
            return Done()
        return self._messages.irecv_(tensor, source, self._tag)

    def finish(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
