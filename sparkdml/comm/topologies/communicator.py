"""A communicator whose allreduce is one of the topologies, over its own point-to-point messages."""

from __future__ import annotations

from torch import Tensor

from sparkdml.comm.base import IN_PLACE, Communicator, ReduceOp
from sparkdml.comm.in_order import InOrderOnThread
from sparkdml.comm.own_allreduce import OwnAllreduce
from sparkdml.comm.shared_memory.exchange import DTYPES
from sparkdml.comm.topologies.base import Topology

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
