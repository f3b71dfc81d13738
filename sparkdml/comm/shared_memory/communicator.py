"""A communicator whose ranks, on one host, reduce and broadcast through shared memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from sparkdml.comm.base import Communicator, ReduceOp, Work, check_rank, check_reduction
from sparkdml.comm.in_order import InOrder
from sparkdml.comm.own_allreduce import OwnAllreduce, in_flat
from sparkdml.comm.shared_memory.exchange import DTYPES, Exchange, Reduction
from sparkdml.comm.shared_memory.hosts import find_host


class SharedMemoryCommunicator(OwnAllreduce):
    """Created by `open`. The base handles GPU tensors, and all calls but allreduce, reduce and
    broadcast.

    An allreduce runs when a thread waits for it: it only copies and adds on this rank's own core,
    which backward needs as well, so a thread for it would only compete with backward. But other
    ranks can read this rank's data as soon as it is written: if no other call is in flight, the
    first chunk of a tensor is written at once, so that a rank that computes before it waits does
    not delay the others.
    """

    topology = "shared-memory"

    def __init__(self, base: Communicator, exchange: Exchange, owns_base: bool = False) -> None:
        super().__init__(base, InOrder())
        self._exchange, self._owns_base = exchange, owns_base

    @classmethod
    def open(cls, base: Communicator) -> SharedMemoryCommunicator | None:
        """Return None on every rank unless all ranks of `base`, at least two, share memory."""
        host = find_host(base)
        if host.exchange is not None and host.is_whole_world:
            return cls(base, host.exchange)
        host.close()
        return None

    def takes(self, tensor: Tensor) -> bool:
        return tensor.dtype in DTYPES and tensor.device.type == "cpu"

    def allreduce_async_(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return self.repeated(tensor, op)()

    def repeated(self, tensor: Tensor, op: ReduceOp = "sum") -> Callable[[], Work]:
        check_reduction(tensor, op)
        is_in_memory = tensor.is_contiguous() and not tensor.is_neg()
        is_plain = is_in_memory and tensor.numel() > 0 and op != "mean"
        if not (is_plain and self.takes(tensor)):
            return partial(super().allreduce_async_, tensor, op)
        reduction = Reduction(self._exchange, tensor.detach().view(-1), op)

        def finish() -> None:
            self.traffic.sent(reduction.num_bytes)  # once, as all other ranks read the same memory
            reduction.finish()

        def begin() -> Work:
            self._check_open()
            if self._order.is_idle:
                reduction.begin()
            return self._order.begin(finish)

        return begin

    def _reduce_flat_(self, flat: Tensor, op: ReduceOp) -> None:
        self.traffic.sent(flat.nbytes)
        self._exchange.reduce_(flat, op)

    def reduce_(self, tensor: Tensor, root: int = 0, op: ReduceOp = "sum") -> Tensor:
        check_rank("root", root, self.size)
        return self.allreduce_(tensor, op)

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Tensor:
        check_rank("root", root, self.size)
        if not self.takes(tensor):
            return super().broadcast_(tensor, root)
        self._check_open()
        if tensor.numel() > 0:
            if self.rank == root:
                self.traffic.sent(tensor.nbytes)
            send = partial(self._exchange.broadcast_, root=root)
            self._order.do(lambda: in_flat(tensor, send))
        return tensor

    def _release(self) -> None:
        if self._order.is_at_rest:
            self._exchange.close()
        else:
            self._exchange.leave()
        if self._owns_base:
            self.base.close()

    def _release_at_once(self) -> None:
        self._exchange.leave()
        if self._owns_base:
            self.base.abort()
