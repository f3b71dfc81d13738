"""The communicator of a run with one worker, where every collective is trivial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from sparkdml.comm.base import (
    Communicator,
    PointToPoint,
    ReduceOp,
    Work,
    check_one_for_each_rank,
    check_rank,
    check_reduction,
    check_scatterable,
    check_scattered,
)
from sparkdml.comm.layout import known_layouts
from sparkdml.errors import ParameterError


class _Done:
    def wait(self) -> None:
        return


class _NoPeers:
    """Point to point with one rank: the interface exists, but every call raises."""

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> NoReturn:
        raise no_peers("to", to)

    def recv_(self, tensor: Tensor, source: int | None = None, tag: int = 0) -> NoReturn:
        raise no_peers("source", source)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> NoReturn:
        raise no_peers("to", to)

    def irecv_(self, tensor: Tensor, source: int, tag: int = 0) -> NoReturn:
        raise no_peers("source", source)


def no_peers(parameter: str, rank: int | None) -> ParameterError:
    return ParameterError(parameter, rank, "another rank, but there is only one,", "Add workers.")


class SingleCommunicator(Communicator):
    """One rank: every reduction leaves the tensor as it is, every gather returns a copy of it."""

    rank = 0
    size = 1

    def allreduce_async_(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        check_reduction(tensor, op)
        return _Done()

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Tensor:
        check_rank("root", root, self.size)
        return tensor

    def allgather(self, tensor: Tensor, lengths: Sequence[int] | None = None) -> list[Tensor]:
        if lengths is not None:
            known_layouts(tensor, lengths, self.rank, self.size)
        return [tensor.detach().clone()]

    def alltoall(
        self, tensors: Sequence[Tensor], lengths: Sequence[int] | None = None
    ) -> list[Tensor]:
        check_one_for_each_rank(tensors, self.size)
        return self.allgather(tensors[0], lengths)

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        check_reduction(tensor, op)
        check_scatterable(tensor)
        return tensor.detach().clone()

    def reduce_(self, tensor: Tensor, root: int = 0, op: ReduceOp = "sum") -> Tensor:
        check_rank("root", root, self.size)
        return self.allreduce_(tensor, op)

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        check_rank("root", root, self.size)
        return [tensor.detach().clone()]

    def scatter(self, tensors: Sequence[Tensor] | None, root: int = 0) -> Tensor:
        check_scattered(tensors, self.rank, self.size, root)
        assert tensors is not None
        return tensors[0].detach().clone()

    def barrier(self) -> None:
        return

    def split(self, color: int, key: int | None = None) -> Communicator:
        return SingleCommunicator()

    @property
    def point_to_point(self) -> PointToPoint:
        return _NoPeers()

    def close(self) -> None:
        return
