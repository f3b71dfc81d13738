"""Messages between two ranks, counted: what a scheme really sends, against its formula."""

from __future__ import annotations

from torch import Tensor

from sparkdml.comm.base import PointToPoint, Work


class CountingMessages:
    """The same as the messages within, and how many were sent and received, with their bytes."""

    def __init__(self, inner: PointToPoint) -> None:
        self._inner = inner
        self.num_sent = self.bytes_sent = 0
        self.num_received = self.bytes_received = 0

    def _sent(self, tensor: Tensor) -> None:
        self.num_sent += 1
        self.bytes_sent += tensor.nbytes

    def _received(self, tensor: Tensor) -> None:
        self.num_received += 1
        self.bytes_received += tensor.nbytes

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        self._sent(tensor)
        self._inner.send(tensor, to, tag)

    def recv_(self, tensor: Tensor, source: int | None = None, tag: int = 0) -> int:
        self._received(tensor)
        return self._inner.recv_(tensor, source, tag)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        self._sent(tensor)
        return self._inner.isend(tensor, to, tag)

    def irecv_(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        self._received(tensor)
        return self._inner.irecv_(tensor, source, tag)
