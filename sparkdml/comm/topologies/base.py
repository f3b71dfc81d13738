"""The topologies' common signature, and the communicator whose allreduce is one of them.

Its messages are a group's point-to-point messages, and may be empty.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sparkdml.comm.base import IN_PLACE, Communicator, PointToPoint, ReduceOp, Work
from sparkdml.comm.composed import Done
from sparkdml.comm.in_order import InOrderOnThread
from sparkdml.comm.own_allreduce import OwnAllreduce
from sparkdml.comm.shared_memory.exchange import DTYPES

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


THREAD_NAME = "sparkdml-allreduce"


class MessagesCommunicator(OwnAllreduce):
    """Allreduce by messages. The base reduces GPU tensors, since NCCL knows its links, and tensors
    of more than `max_bytes`.

    The messages use a group split from the base, so that they are never mixed up with others, and
    because not every backend has messages. Reductions run on a background thread: most of an
    allreduce between hosts is waiting for the network, while backward can compute. An allreduce
    that is awaited at once, as for a small model, runs on the waiting thread.
    """

    def __init__(
        self, base: Communicator, name: str, topology: Topology, max_bytes: int | None = None
    ) -> None:
        super().__init__(base, InOrderOnThread(THREAD_NAME))
        self.topology = name if max_bytes is None else f"{name} up to {max_bytes:,} bytes"
        self._max_bytes = max_bytes
        self._wire = base.split(0)
        messages = self._wire.point_to_point
        assert messages is not None, "a split communicator has point to point"
        self._messages, self._reduce = messages, topology

    def takes(self, tensor: Tensor) -> bool:
        if self._max_bytes is not None and tensor.nbytes > self._max_bytes:
            return False
        return tensor.dtype in DTYPES and tensor.device.type == "cpu"

    def _reduce_flat_(self, flat: Tensor, op: ReduceOp) -> None:
        self._reduce(self._messages, self.rank, self.size, flat, IN_PLACE[op])

    def _release(self) -> None:
        self._wire.close()

    def _release_at_once(self) -> None:
        self._wire.abort()
