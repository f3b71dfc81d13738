"""Two levels: reduce within each host, then among one rank per host, then broadcast in each host.

Between hosts it sends as much as another topology with one rank per host; within a host, it copies
memory. (Jia et al. 2018, arXiv 1807.11205.)
"""

from __future__ import annotations

from torch import Tensor

from sparkdml.comm.base import Communicator, ReduceOp
from sparkdml.comm.in_order import InOrderOnThread
from sparkdml.comm.own_allreduce import OwnAllreduce
from sparkdml.comm.shared_memory.exchange import DTYPES
from sparkdml.comm.topologies.base import THREAD_NAME


def hierarchical(
    inside: Communicator, across: Communicator | None, tensor: Tensor, op: ReduceOp
) -> None:
    """Allreduce `inside` this host, leader first, and `across` the leaders (None elsewhere)."""
    if inside.size > 1:
        inside.reduce_(tensor, 0, op)
    if across is not None:
        across.allreduce_(tensor, op)
    if inside.size > 1:
        inside.broadcast_(tensor, 0)


class HierarchicalCommunicator(OwnAllreduce):
    """It owns `inside` and `across`. Reductions run on a background thread, as for messages."""

    topology = "hierarchical"

    def __init__(
        self, base: Communicator, inside: Communicator, across: Communicator | None
    ) -> None:
        super().__init__(base, InOrderOnThread(THREAD_NAME))
        self._inside, self._across = inside, across

    def takes(self, tensor: Tensor) -> bool:
        return tensor.dtype in DTYPES and tensor.device.type == "cpu"

    def _reduce_flat_(self, flat: Tensor, op: ReduceOp) -> None:
        hierarchical(self._inside, self._across, flat, op)

    def _release(self) -> None:
        if self._across is not None:
            self._across.close()
        self._inside.close()

    def _release_at_once(self) -> None:
        if self._across is not None:
            self._across.abort()
        self._inside.abort()
