"""The communicator's interface, its value types, and reduction in rank order.

Conventions: a trailing underscore means that the tensor is changed in place. Every rank of a
communicator calls the same collectives in the same order. Reductions add in an order that does not
depend on timing, so two runs give the same bits. A communicator lives in a worker and is used from
one thread, unless it says otherwise.
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

NATIVE = "native"  # the topology of a backend's own reduction


@dataclass(frozen=True)
class World:
    """One rank's position among all ranks, and what a backend needs to find the others."""

    rank: int
    size: int
    hosts: tuple[str, ...]  # the host of every rank, in rank order
    device: str = "cpu"  # "cpu" or "cuda:N"
    rendezvous_host: str = "127.0.0.1"  # the address on which the driver's stores listen
    store_port: int = 0  # torch's TCPStore
    kv_port: int = 0  # the key-value store that Horovod's C++ client uses
    interface: str | None = None  # the network interface to bind to, if known

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
        """The ranks with the same local rank on each host, in order of host."""
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
    """Messages between two ranks: a separate interface, since not every backend has it."""

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None: ...
    def recv_(self, tensor: Tensor, source: int | None = None, tag: int = 0) -> int:
        """Fill `tensor` and return the sender's rank; `source=None` receives from any rank."""
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
    topology = NATIVE  # how it reduces, for display

    @cached_property
    def traffic(self) -> Traffic:
        """What this rank has sent through it and through groups split from it."""
        return Traffic()

    def count_into(self, traffic: Traffic) -> None:
        """Count what is sent from now on into `traffic`."""
        self.traffic = traffic

    def carries(self, tensor: Tensor) -> bool:
        """Whether the tensor is reduced in its own dtype, not in a wider one."""
        return True

    @abstractmethod
    def allreduce_async_(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Begin to reduce a tensor over all ranks, in place; the result is there after a `wait`."""

    def repeated(self, tensor: Tensor, op: ReduceOp = "sum") -> Callable[[], Work]:
        """Return a function that repeats `allreduce_async_` of one tensor, checked only once."""
        return partial(self.allreduce_async_, tensor, op)

    def allreduce_(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce a tensor over all ranks, in place: sum, mean, min, max or product."""
        self.allreduce_async_(tensor, op).wait()
        return tensor

    def grouped_allreduce_(self, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> None:
        """Reduce several tensors; all reductions are started before the first is awaited."""
        for work in [self.allreduce_async_(tensor, op) for tensor in tensors]:
            work.wait()

    @abstractmethod
    def broadcast_(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Fill the tensor with that of the root."""

    @abstractmethod
    def allgather(self, tensor: Tensor, lengths: Sequence[int] | None = None) -> list[Tensor]:
        """Return every rank's tensor, in rank order. The first dimension may differ between ranks.

        Pass the first dimensions of all ranks as `lengths`, if known: then no sizes are exchanged
        ahead, which saves a round trip. Either all ranks pass the same `lengths`, or none does.
        Each rank checks its own tensor against its own length before sending. The caller must
        ensure that ranks agree on `lengths`, the dtype and the other dimensions, as not every
        backend detects a mismatch.
        """

    @abstractmethod
    def alltoall(
        self, tensors: Sequence[Tensor], lengths: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Send `tensors[r]` to rank r, and return the received ones in rank order, of any size.

        Pass the first dimensions of the received tensors as `lengths`, if known, as for
        `allgather`; then all ranks do, each its own, and the other dimensions must be equal.
        """

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Return this rank's part of the reduced tensor, split along dim 0 like `tensor_split`."""

    @abstractmethod
    def reduce_(self, tensor: Tensor, root: int = 0, op: ReduceOp = "sum") -> Tensor:
        """Reduce to `root`; on other ranks, the content is undefined afterwards."""

    @abstractmethod
    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        """Return every rank's tensor on `root`, None elsewhere. The first dimension may differ."""

    @abstractmethod
    def scatter(self, tensors: Sequence[Tensor] | None, root: int = 0) -> Tensor:
        """Send `tensors[r]` of the root to rank r; the other ranks pass None."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called it."""

    @abstractmethod
    def split(self, color: int, key: int | None = None) -> Communicator:
        """Return a communicator of the ranks with the same color, ordered by key, then rank."""

    @property
    def point_to_point(self) -> PointToPoint | None:
        """Messages between two ranks, or None if the backend has none (Horovod)."""
        return None

    def check(self) -> None:  # noqa: B027
        """Raise CommunicationError if the run is known to have failed.

        For code that waits for a peer by other means; a backend without an alarm never raises.
        """

    @abstractmethod
    def close(self) -> None:
        """Close in order, together with the other ranks. A second call does nothing."""

    def abort(self) -> None:
        """Close immediately after a failure, without waiting for peers that may be gone."""
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


# The in-place operation by which each op adds one more tensor to a total.
IN_PLACE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda total, other: total.add_(other),
    "mean": lambda total, other: total.add_(other),
    "min": lambda total, other: torch.minimum(total, other, out=total),
    "max": lambda total, other: torch.maximum(total, other, out=total),
    "product": lambda total, other: total.mul_(other),
}


def reduce_in_rank_order(tensors: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """Return the reduction as a new tensor; the arguments are not changed."""
    total = tensors[0].detach().clone(memory_format=torch.contiguous_format)
    combine = IN_PLACE[op]
    for tensor in tensors[1:]:
        combine(total, tensor.detach())
    return total.div_(len(tensors)) if op == "mean" else total


def members(colors: Sequence[int], keys: Sequence[int], rank: int) -> list[int]:
    """Return the ranks with this rank's color, ordered by key, then by rank."""
    mine = [other for other, color in enumerate(colors) if color == colors[rank]]
    return sorted(mine, key=lambda other: (keys[other], other))
