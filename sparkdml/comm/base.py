"""The communicator's interface and its value types.

Conventions: a trailing underscore means that the tensor is changed in place. Every rank of a
communicator calls the same collectives in the same order. Reductions add in an order that does not
depend on timing, so two runs give the same bits.

Reducing tensors that are all at hand: in rank order, so that two runs give the same bits.

Who belongs together after a split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import TracebackType
from typing import Literal, Protocol

import torch
from torch import Tensor

from sparkdml.comm.traffic import Traffic

ReduceOp = Literal["sum", "mean", "min", "max", "product"]

NATIVE = "native"  # the topology of a backend that reduces in its own way


@dataclass(frozen=True)
class World:
    """Where one rank stands, and all that a backend needs to find the other ranks."""

    rank: int
    size: int
    hosts: tuple[str, ...]  # the host of every rank, in rank order
    device: str = "cpu"  # "cpu" or "cuda:N"
    rendezvous_host: str = "127.0.0.1"  # where the driver's stores listen
    store_port: int = 0  # torch's TCPStore
    kv_port: int = 0  # the key-value store that Horovod's C++ client speaks to
    interface: str | None = None  # the network interface to bind to, where it is known

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on this rank's host, in rank order."""
        here = self.hosts[self.rank]
        return tuple(rank for rank, host in enumerate(self.hosts) if host == here)

    @property
    def local_rank(self) -> int:
        return self.local_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        return len(self.local_ranks)

    @property
    def cross_ranks(self) -> tuple[int, ...]:
        """The ranks that have this rank's local rank on their own host, in order of host."""
        seen: dict[str, int] = {}
        peers = []
        for rank, host in enumerate(self.hosts):
            if seen.setdefault(host, 0) == self.local_rank:
                peers.append(rank)
            seen[host] += 1
        return tuple(peers)


class Work(Protocol):
    """A collective under way. After `wait` returns, the tensor holds the result."""

    def wait(self) -> None: ...


class PointToPoint(Protocol):
    """Messages between two ranks: an ability of its own, since not every backend has it."""

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None: ...
    def recv_(self, tensor: Tensor, source: int | None = None, tag: int = 0) -> int:
        """Fill `tensor` and return the sender's rank; `source=None` receives from anyone."""
        ...

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work: ...
    def irecv_(self, tensor: Tensor, source: int, tag: int = 0) -> Work: ...


class Communicator(ABC):
    """Collectives among `size` ranks. As a context manager it closes, or aborts on an exception.

    Every rank calls the same collectives in the same order, with tensors of the same shapes.

    Attributes:
        rank: this rank's, from 0.
        size: how many ranks there are.
        traffic: what this rank has sent: `.bytes` and `.messages`.
    """

    rank: int
    size: int
    topology = NATIVE  # how it reduces, for those who watch

    @cached_property
    def traffic(self) -> Traffic:
        """What this rank has sent through it, and through what was split from it."""
        return Traffic()

    def count_into(self, traffic: Traffic) -> None:
        """Add to these sums from now on."""
        self.traffic = traffic

    def carries(self, tensor: Tensor) -> bool:
        """Whether it would be reduced in its own type, not in a wider one."""
        return True

    @abstractmethod
    def allreduce_async_(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Begin to reduce a tensor over all ranks, in place; the result is there after a `wait`."""

    def repeated(self, tensor: Tensor, op: ReduceOp = "sum") -> Callable[[], Work]:
        """`allreduce_async_` of one tensor, to be called again and again: the checks come first."""
        return partial(self.allreduce_async_, tensor, op)

    def allreduce_(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce a tensor over all ranks, in place: sum, mean, min, max or product."""
        self.allreduce_async_(tensor, op).wait()
        return tensor

    def grouped_allreduce_(self, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> None:
        """Reduce several tensors at once; all of them are under way before the first is awaited."""
        for work in [self.allreduce_async_(tensor, op) for tensor in tensors]:
            work.wait()

    @abstractmethod
    def broadcast_(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Fill the tensor with that of the root."""

    @abstractmethod
    def allgather(self, tensor: Tensor, lengths: Sequence[int] | None = None) -> list[Tensor]:
        """Every rank's tensor, in rank order. The first dimension may differ from rank to rank.

        Who knows those first dimensions beforehand gives them as `lengths`, in rank order: then no
        sizes travel ahead, which saves a round. Either all ranks give them, and the same ones, or
        none does. Each compares its own tensor with its own length, and raises before anything is
        sent; that the ranks agree, also on the dtype and the other dimensions, is up to the caller,
        as not every backend would notice.
        """

    @abstractmethod
    def alltoall(
        self, tensors: Sequence[Tensor], lengths: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Send `tensors[r]` to rank r; what comes back is in rank order. Sizes may differ.

        Who knows the first dimensions of what comes back gives them as `lengths`, as for
        `allgather`, and so do all ranks, each its own; the other dimensions are then alike.
        """

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """This rank's part of the reduced tensor, cut along dim 0 as `torch.tensor_split` cuts."""

    @abstractmethod
    def reduce_(self, tensor: Tensor, root: int = 0, op: ReduceOp = "sum") -> Tensor:
        """The reduced tensor at `root`; elsewhere the content is undefined afterwards."""

    @abstractmethod
    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        """Every rank's tensor at `root`, None elsewhere. The first dimension may differ."""

    @abstractmethod
    def scatter(self, tensors: Sequence[Tensor] | None, root: int = 0) -> Tensor:
        """Rank r receives `tensors[r]` of the root; the others pass None."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called it."""

    @abstractmethod
    def split(self, color: int, key: int | None = None) -> Communicator:
        """A communicator for the ranks that gave the same color, ordered by key, then by rank."""

    @property
    def point_to_point(self) -> PointToPoint | None:
        """Messages between two ranks, or None where the backend has none (Horovod)."""
        return None

    def check(self) -> None:  # noqa: B027
        """Raise CommunicationError if the run is known to have failed.

        For those that wait for a peer by other means; a backend that knows of nothing raises never.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave in good order; every rank calls it. A second call does nothing."""

    def abort(self) -> None:
        """Leave at once after a failure, without waiting for peers that may be gone."""
        self.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()


# How each op takes one more tensor into a total.
IN_PLACE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda total, other: total.add_(other),
    "mean": lambda total, other: total.add_(other),
    "min": lambda total, other: torch.minimum(total, other, out=total),
    "max": lambda total, other: torch.maximum(total, other, out=total),
    "product": lambda total, other: total.mul_(other),
}


def reduce_in_rank_order(tensors: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """A new tensor; those given are not changed."""
    total = tensors[0].detach().clone(memory_format=torch.contiguous_format)
    combine = IN_PLACE[op]
    for tensor in tensors[1:]:
        combine(total, tensor.detach())
    return total.div_(len(tensors)) if op == "mean" else total


def members(colors: Sequence[int], keys: Sequence[int], rank: int) -> list[int]:
    """The ranks that gave this rank's color, ordered by key, then by rank."""
    mine = [other for other, color in enumerate(colors) if color == colors[rank]]
    return sorted(mine, key=lambda other: (keys[other], other))
