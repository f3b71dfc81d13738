"""A communicator that passes everything on to another: what subclasses change is theirs alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparkdml.comm.base import Communicator, PointToPoint, ReduceOp, Work
from sparkdml.comm.traffic import Traffic


class DelegatingCommunicator(Communicator):
    """The same as `base`, which is borrowed: closing this one does not close it."""

    def __init__(self, base: Communicator) -> None:
        self.base = base
        self.rank, self.size = base.rank, base.size
        self.traffic = base.traffic

    def before(self) -> None:
        """Called before anything is passed on."""

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
