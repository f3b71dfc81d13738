"""The communicator's interface, its value types, the checks of its arguments, and counted traffic.

Conventions: a trailing underscore means that the tensor is changed in place. Every rank of a
communicator calls the same collectives in the same order. Reductions add in an order that does not
depend on timing, so two runs give the same bits. A communicator lives in a worker and is used from
one thread, unless it says otherwise. Arguments are checked alike for every backend.

Traffic is the bytes and messages that a rank sends. Our own protocols count each message when it is
sent. The internals of Horovod, gloo and NCCL are not visible, so their collectives count what the
algorithm moves: a ring for reductions and gathers, a chain for broadcasts. Threads count as if they
were processes. `dml.compare` shows these numbers.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import TracebackType
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from sparkdml.errors import ParameterError


class Traffic:
    """The sums of one rank; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = self._messages = 0
        self._taken = (0, 0)

    def sent(self, num_bytes: int, messages: int = 1) -> None:
        """Count bytes and messages that were or are about to be sent."""
        with self._lock:
            self._bytes += num_bytes
            self._messages += messages

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def messages(self) -> int:
        return self._messages

    def take(self) -> tuple[int, int]:
        """Return the bytes and messages since the last call."""
        with self._lock:
            now, before = (self._bytes, self._messages), self._taken
            self._taken = now
        return now[0] - before[0], now[1] - before[1]

    def allreduced(self, num_bytes: int, size: int) -> None:
        """Count a ring: a reduce-scatter, then an allgather, of one n-th at a time."""
        self.sent(2 * num_bytes * (size - 1) // size, 2 * (size - 1))

    def broadcasted(self, num_bytes: int, size: int) -> None:
        """Count a chain, where every rank but the last forwards the data: the mean over ranks."""
        self.sent(num_bytes * (size - 1) // size, int(size > 1))

    def gathered(self, own_bytes: int, size: int) -> None:
        """Count a ring, where each piece visits every rank, as if all had this one's length."""
        self.sent(own_bytes * (size - 1), size - 1)

    def scattered(self, num_bytes: int, size: int) -> None:
        """Count one part sent to each other rank."""
        self.sent(num_bytes * (size - 1) // size, size - 1)


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


REDUCE_OPS: tuple[str, ...] = get_args(ReduceOp)


def check_reduction(tensor: Tensor, op: str) -> None:
    if op not in REDUCE_OPS:
        raise ParameterError("op", op, f"one of {', '.join(REDUCE_OPS)}")
    dtype = tensor.dtype
    if dtype.is_floating_point:
        return
    if dtype == torch.bool:
        raise ParameterError("tensor.dtype", dtype, "a numeric dtype", "Use uint8 with min or max.")
    if dtype.is_complex:
        raise ParameterError("tensor.dtype", dtype, "real", "Reduce torch.view_as_real(tensor).")
    if dtype in (torch.uint32, torch.uint64):
        raise ParameterError("tensor.dtype", dtype, "a signed or small integer dtype", "Use int64.")
    if op == "mean":
        raise ParameterError(
            "tensor.dtype", dtype, "floating point for op='mean'", "Convert it, or use op='sum'."
        )


def check_scatterable(tensor: Tensor) -> None:
    if tensor.dim() == 0:
        raise ParameterError(
            "tensor", "a tensor without dimensions", "a tensor with at least one dimension"
        )


def check_rank(parameter: str, value: int, size: int) -> None:
    if not 0 <= value < size:
        raise ParameterError(parameter, value, f"a rank from 0 to {size - 1}")


def check_peer(parameter: str, value: int, rank: int, size: int) -> None:
    if not 0 <= value < size or value == rank:
        allowed = f"a rank from 0 to {size - 1} other than this one ({rank})"
        raise ParameterError(parameter, value, allowed)


def check_one_for_each_rank(tensors: Sequence[Tensor], size: int) -> None:
    if len(tensors) != size:
        allowed = f"one tensor for each of the {size} ranks"
        raise ParameterError("tensors", f"{len(tensors)} tensors", allowed)


def check_one_dtype(tensors: Sequence[Tensor]) -> None:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        found = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ParameterError("tensors", found, "of one dtype")


def check_scattered(tensors: Sequence[Tensor] | None, rank: int, size: int, root: int) -> None:
    """Check that the root passes one tensor per rank, and the other ranks None."""
    check_rank("root", root, size)
    if rank != root:
        if tensors is not None:
            raise ParameterError("tensors", tensors, f"None on every rank but the root ({root})")
        return
    if tensors is None:
        raise ParameterError("tensors", None, f"one tensor for each rank on the root ({root})")
    check_one_for_each_rank(tensors, size)
    check_one_dtype(tensors)
