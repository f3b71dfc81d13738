"""A communicator whose allreduce is one of the topologies, over messages of a wire of its own."""

from __future__ import annotations

from torch import Tensor

from sparkdml.comm.base import IN_PLACE, Communicator, ReduceOp
from sparkdml.comm.in_order import InOrderOnThread
from sparkdml.comm.own_allreduce import OwnAllreduce
from sparkdml.comm.shared_memory.exchange import DTYPES
from sparkdml.comm.topologies.base import Topology

THREAD_NAME = "sparkdml-allreduce"


class MessagesCommunicator(OwnAllreduce):
    """Allreduce by messages. Tensors on a GPU are left to the base, whose NCCL knows its links,
    and so are those of more than `max_bytes`.

    The wire is split off from the base, so that its messages are never mixed up with others, and
    since not every backend has messages of its own. A thread goes on with what was begun: most of
    an allreduce between hosts is waiting for the network, and meanwhile backward can compute. An
    allreduce that is awaited at once, as that of a small model is, is done without the thread.
    """

    def __init__(
        self, base: Communicator, name: str, topology: Topology, max_bytes: int | None = None
    ) -> None:
        super().__init__(base, InOrderOnThread(THREAD_NAME))
        self.topology = name if max_bytes is None else f"{name} up to {max_bytes:,} bytes"
        self._max_bytes = max_bytes
        self._wire = base.split(0)
        messages = self._wire.point_to_point
        assert messages is not None, "groups have messages, whatever the backend"
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
