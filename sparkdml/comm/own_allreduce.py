"""Base classes for communicators that wrap another one and replace its allreduce."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from sparkdml.comm.base import Communicator, PointToPoint, ReduceOp, Traffic, Work, check_reduction
from sparkdml.comm.composed import Done
from sparkdml.comm.in_order import InOrder
from sparkdml.comm.layout import in_memory
from sparkdml.errors import CommunicationError


class DelegatingCommunicator(Communicator):
    """Delegates every call to `base`, which it does not own: closing it leaves `base` open."""

    def __init__(self, base: Communicator) -> None:
        self.base = base
        self.rank, self.size = base.rank, base.size
        self.traffic = base.traffic

    def before(self) -> None:
        """Hook that is called before every delegated call."""

    def carries(self, tensor: Tensor) -> bool:
        return self.base.carries(tensor)

    def allreduce_async_(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        self.before()
        return self.base.allreduce_async_(tensor, op)

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Tensor:
        self.before()
        return self.base.broadcast_(tensor, root)

    def allgather(self, tensor: Tensor, lengths: Sequence[int] | None = None) -> list[Tensor]:
        self.before()
        return self.base.allgather(tensor, lengths)

    def alltoall(
        self, tensors: Sequence[Tensor], lengths: Sequence[int] | None = None
    ) -> list[Tensor]:
        self.before()
        return self.base.alltoall(tensors, lengths)

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        self.before()
        return self.base.reduce_scatter(tensor, op)

    def reduce_(self, tensor: Tensor, root: int = 0, op: ReduceOp = "sum") -> Tensor:
        self.before()
        return self.base.reduce_(tensor, root, op)

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        self.before()
        return self.base.gather(tensor, root)

    def scatter(self, tensors: Sequence[Tensor] | None, root: int = 0) -> Tensor:
        self.before()
        return self.base.scatter(tensors, root)

    def barrier(self) -> None:
        self.before()
        self.base.barrier()

    def split(self, color: int, key: int | None = None) -> Communicator:
        self.before()
        return self.base.split(color, key)

    @property
    def point_to_point(self) -> PointToPoint | None:
        return self.base.point_to_point

    def count_into(self, traffic: Traffic) -> None:
        self.base.count_into(traffic)
        self.traffic = traffic

    def check(self) -> None:
        self.base.check()

    def close(self) -> None:
        return


class OwnAllreduce(DelegatingCommunicator):
    """Replaces allreduce; subclasses implement `_reduce_flat_`.

    Reductions run in the order in which they were begun, and before any delegated call. So a rank
    that waits for an allreduce at once and a rank that first enters a barrier don't deadlock.
    """

    def __init__(self, base: Communicator, order: InOrder) -> None:
        super().__init__(base)
        self._order = order
        self._closed = False

    @abstractmethod
    def takes(self, tensor: Tensor) -> bool:
        """Whether the tensor is reduced here or by the base; the same on every rank."""

    @abstractmethod
    def _reduce_flat_(self, flat: Tensor, op: ReduceOp) -> None:
        """Reduce a flat, contiguous, non-empty tensor in place; op is not mean."""

    def carries(self, tensor: Tensor) -> bool:
        return self.takes(tensor) or super().carries(tensor)

    def before(self) -> None:
        self._check_open()
        self._order.finish()

    def allreduce_async_(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        check_reduction(tensor, op)
        self._check_open()
        if not self.takes(tensor):
            return super().allreduce_async_(tensor, op)
        if tensor.numel() == 0:
            return Done()
        return self._order.begin(lambda: self._reduce_(tensor, op))

    def allreduce_(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        check_reduction(tensor, op)
        self._check_open()
        if not self.takes(tensor):
            self._order.finish()
            return self.base.allreduce_(tensor, op)
        if tensor.numel() > 0:
            self._order.do(lambda: self._reduce_(tensor, op))
        return tensor

    def _reduce_(self, tensor: Tensor, op: ReduceOp) -> None:
        if op == "mean":
            in_flat(tensor, lambda flat: self._reduce_flat_(flat, "sum"))
            tensor.detach().div_(self.size)
        else:
            in_flat(tensor, lambda flat: self._reduce_flat_(flat, op))

    def _check_open(self) -> None:
        if self._closed:
            raise CommunicationError("this communicator is closed")

    def close(self) -> None:
        """Close only its own resources; the base stays open."""
        if not self._closed:
            self._closed = True
            self._order.close()
            self._release()

    def abort(self) -> None:
        if not self._closed:
            self._closed = True
            self._release_at_once()
            self._order.close()

    def _release(self) -> None:
        """Release the subclass's resources; every rank calls it."""

    def _release_at_once(self) -> None:
        """Release the resources after a failure, without waiting for peers that may be gone."""
        self._release()


def in_flat(tensor: Tensor, change: Callable[[Tensor], None]) -> None:
    """Apply `change` to the content as one contiguous vector, copying if the strides require it."""
    target = tensor.detach() if tensor.requires_grad else tensor
    buffer = in_memory(target)
    change(buffer.view(-1))
    if buffer is not target:
        target.copy_(buffer)
