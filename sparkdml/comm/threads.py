"""A communicator whose ranks are threads of one process, for testing strategies in milliseconds.

It reduces in rank order, and raises when ranks call different collectives. The ranks share one
`ThreadHub`, which holds their contributions, messages and failures.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparkdml.comm.base import (
    Communicator,
    PointToPoint,
    ReduceOp,
    Traffic,
    Work,
    check_one_dtype,
    check_one_for_each_rank,
    check_peer,
    check_rank,
    check_reduction,
    check_scatterable,
    check_scattered,
    members,
    reduce_in_rank_order,
)
from sparkdml.comm.layout import Layout, check_alike, known_layouts
from sparkdml.errors import CommunicationError, ParameterError

Result = TypeVar("Result")


@dataclass
class _Collective:
    """One collective call: each rank's call and contribution, and which ranks have the result."""

    calls: dict[int, str] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    num_taken: int = 0


@dataclass
class _Mailbox:
    """Messages from one rank to another with the same tag; receivers claim them in order."""

    messages: dict[int, Tensor] = field(default_factory=dict)
    num_arrived: int = 0
    num_claimed: int = 0

    def arrive(self, tensor: Tensor) -> None:
        self.messages[self.num_arrived] = tensor
        self.num_arrived += 1

    def claim(self) -> int:
        self.num_claimed += 1
        return self.num_claimed - 1

    @property
    def has_unclaimed(self) -> bool:
        return self.num_claimed < self.num_arrived

    def take(self, number: int) -> Tensor | None:
        return self.messages.pop(number, None)


class ThreadHub:
    """Shared by all ranks of a run. A wait ends with an error, never with a hang.

    `who` is always a rank of the whole world, so that a departed rank is noticed in every group
    that it belonged to.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._collectives: dict[tuple[str, int], _Collective] = {}
        self._mail: defaultdict[tuple[str, int, int, int], _Mailbox] = defaultdict(_Mailbox)
        self._departed: set[int] = set()
        self._failure: str | None = None

    def fail(self, reason: str) -> None:
        """Make all waits raise; the first reason is kept."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def depart(self, who: int) -> None:
        """Note that this rank will make no more calls."""
        with self._changed:
            self._departed.add(who)
            self._changed.notify_all()

    def deposit(self, group: str, sequence: int, who: int, call: str, value: Any) -> None:
        with self._changed:
            collective = self._collectives.setdefault((group, sequence), _Collective())
            collective.calls[who] = call
            collective.values[who] = value
            self._changed.notify_all()

    def collect(self, group: str, sequence: int, members: Sequence[int]) -> list[Any]:
        """Wait for every member's contribution, and return them in the order of `members`."""
        key = (group, sequence)

        def all_arrived() -> list[Any] | None:
            collective = self._collectives[key]
            missing = [who for who in members if who not in collective.values]
            self._check_not_departed(missing, all_needed=True)
            return None if missing else [collective.values[who] for who in members]

        with self._changed:
            values = self._wait_until(all_arrived, f"call {sequence} of group {group!r}")
            collective = self._collectives[key]
            collective.num_taken += 1
            if collective.num_taken == len(members):
                del self._collectives[key]
            if len(set(collective.calls.values())) > 1:
                calls = ", ".join(f"rank {who}: {collective.calls[who]}" for who in members)
                raise CommunicationError(f"ranks called different collectives: {calls}")
            return values

    def post(self, group: str, source: int, to: int, tag: int, tensor: Tensor) -> None:
        with self._changed:
            self._check_not_departed([to], all_needed=True)
            self._mail[group, source, to, tag].arrive(tensor)
            self._changed.notify_all()

    def claim(self, group: str, source: int, to: int, tag: int) -> int:
        """Claim the number of the next unclaimed message."""
        with self._changed:
            return self._mail[group, source, to, tag].claim()

    def receive(self, group: str, source: int, to: int, tag: int, number: int) -> Tensor:
        def it_arrived() -> Tensor | None:
            message = self._mail[group, source, to, tag].take(number)
            if message is None:
                self._check_not_departed([source], all_needed=True)
            return message

        with self._changed:
            return self._wait_until(it_arrived, f"a message with tag {tag} to rank {to}")

    def receive_any(
        self, group: str, sources: Sequence[int], to: int, tag: int
    ) -> tuple[int, Tensor]:
        """Receive the oldest unclaimed message of the first source that has one."""

        def any_arrived() -> tuple[int, Tensor] | None:
            for source in sources:
                box = self._mail[group, source, to, tag]
                if box.has_unclaimed:
                    message = box.take(box.claim())
                    assert message is not None
                    return source, message
            self._check_not_departed(sources, all_needed=False)
            return None

        with self._changed:
            return self._wait_until(any_arrived, f"a message with tag {tag} to rank {to}")

    def _wait_until(self, attempt: Callable[[], Result | None], what: str) -> Result:
        results: list[Result] = []

        def attempted() -> bool:
            if self._failure is not None:
                raise CommunicationError(self._failure)
            result = attempt()
            if result is not None:
                results.append(result)
            return bool(results)

        if not self._changed.wait_for(attempted, self._timeout_seconds):
            raise CommunicationError(
                f"timed out after {self._timeout_seconds} s (timeout_seconds) waiting for {what}"
            )
        return results[0]

    def _check_not_departed(self, needed: Sequence[int], *, all_needed: bool) -> None:
        departed = [who for who in needed if who in self._departed]
        if departed and (all_needed or len(departed) == len(needed)):
            raise CommunicationError(f"rank {departed[0]} has already left")


def run_threads(
    size: int, fn: Callable[[Communicator], Result], timeout_seconds: float = 60.0
) -> list[Result]:
    """Run `fn(comm)` on every rank and return the results in rank order.

    When a rank raises, the others are released with a CommunicationError, and the first error is
    raised here. A wait of more than `timeout_seconds` also counts as an error.
    """
    if size < 1:
        raise ParameterError("size", size, "at least 1")
    hub = ThreadHub(timeout_seconds)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run_rank(rank: int) -> None:
        try:
            with ThreadsCommunicator(hub, "world", range(size), rank) as comm:
                results[rank] = fn(comm)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run_rank, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(size)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        hub.fail("the run was interrupted")
        raise
    if errors:
        # The ranks that were released are effects; the cause is the first error of another kind.
        causes = [error for error in errors if not isinstance(error, CommunicationError)]
        raise (causes or errors)[0]
    return [results[rank] for rank in range(size)]


class _Pending:
    """An allreduce in flight, which is computed when this rank waits for it."""

    def __init__(self, collect: Callable[[], list[Tensor]], target: Tensor, op: ReduceOp) -> None:
        self._collect: Callable[[], list[Tensor]] | None = collect
        self._target, self._op = target, op

    def wait(self) -> None:
        if self._collect is not None:
            collect, self._collect = self._collect, None
            self._target.copy_(reduce_in_rank_order(collect(), self._op))


class _Sent:
    def wait(self) -> None:
        return


class _Receiving:
    def __init__(self, receive: Callable[[], object]) -> None:
        self._receive: Callable[[], object] | None = receive

    def wait(self) -> None:
        if self._receive is not None:
            receive, self._receive = self._receive, None
            receive()


class ThreadsCommunicator(Communicator):
    """One rank of a group; `ranks` are its members' ranks in the world, in the group's order."""

    def __init__(self, hub: ThreadHub, group: str, ranks: Sequence[int], rank: int) -> None:
        self.rank, self.size = rank, len(ranks)
        self._hub, self._group, self._ranks = hub, group, tuple(ranks)
        self._sequence = 0
        self._closed = False

    def _begin(self, call: str, value: Any) -> Callable[[], list[Any]]:
        """Contribute a value; the returned function waits for those of all ranks."""
        if self._closed:
            raise CommunicationError("this communicator is closed")
        sequence = self._sequence
        self._sequence += 1
        self._hub.deposit(self._group, sequence, who=self._ranks[self.rank], call=call, value=value)
        return lambda: self._hub.collect(self._group, sequence, self._ranks)

    def _exchange(self, call: str, value: Any) -> list[Any]:
        return self._begin(call, value)()

    def allreduce_async_(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        check_reduction(tensor, op)
        self.traffic.allreduced(tensor.nbytes, self.size)
        call = f"allreduce({_describe(tensor)}, {op})"
        return _Pending(self._begin(call, _copy(tensor)), tensor.detach(), op)

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Tensor:
        check_rank("root", root, self.size)
        self.traffic.broadcasted(tensor.nbytes, self.size)
        call = f"broadcast({_describe(tensor)}, root={root})"
        values = self._exchange(call, _copy(tensor) if self.rank == root else None)
        if self.rank != root:
            tensor.detach().copy_(values[root])
        return tensor

    def allgather(self, tensor: Tensor, lengths: Sequence[int] | None = None) -> list[Tensor]:
        call = "allgather"
        if lengths is not None:
            known_layouts(tensor, lengths, self.rank, self.size)
            call = f"allgather(lengths={list(lengths)})"
        self.traffic.gathered(tensor.nbytes, self.size)
        return self._gather(call, tensor)

    def alltoall(
        self, tensors: Sequence[Tensor], lengths: Sequence[int] | None = None
    ) -> list[Tensor]:
        check_one_for_each_rank(tensors, self.size)
        check_one_dtype(tensors)
        call, expected = "alltoall", None
        if lengths is not None:
            check_alike([Layout.of(tensor) for tensor in tensors])
            expected = known_layouts(tensors[self.rank], lengths, self.rank, self.size)
            call = "alltoall(lengths)"
        self._count_sent(tensors)
        rows = self._exchange(call, [_copy(tensor) for tensor in tensors])
        received = [row[self.rank] for row in rows]
        found = [Layout.of(tensor) for tensor in received]
        check_alike([Layout(layout.dtype, ()) for layout in found])
        if expected is not None and found != expected:
            allowed = f"those of the received tensors: {[layout.shape for layout in found]}"
            raise ParameterError("lengths", lengths, allowed)
        return received

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        check_reduction(tensor, op)
        check_scatterable(tensor)
        self.traffic.scattered(tensor.nbytes, self.size)
        values = self._exchange(f"reduce_scatter({_describe(tensor)}, {op})", _copy(tensor))
        parts = [torch.tensor_split(value, self.size)[self.rank] for value in values]
        return reduce_in_rank_order(parts, op)

    def reduce_(self, tensor: Tensor, root: int = 0, op: ReduceOp = "sum") -> Tensor:
        check_rank("root", root, self.size)
        return self.allreduce_(tensor, op)

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        check_rank("root", root, self.size)
        self.traffic.sent(tensor.nbytes if self.rank != root else 0, int(self.rank != root))
        values = self._gather(f"gather(root={root})", tensor)
        return values if self.rank == root else None

    def scatter(self, tensors: Sequence[Tensor] | None, root: int = 0) -> Tensor:
        check_scattered(tensors, self.rank, self.size, root)
        value = None if tensors is None else [_copy(tensor) for tensor in tensors]
        if self.rank == root and tensors is not None:
            self._count_sent(tensors)
        part: Tensor = self._exchange(f"scatter(root={root})", value)[root][self.rank]
        return part

    def barrier(self) -> None:
        self._exchange("barrier", None)

    def split(self, color: int, key: int | None = None) -> ThreadsCommunicator:
        sequence = self._sequence
        choices = self._exchange("split", (color, self.rank if key is None else key))
        colors, keys = [color for color, _ in choices], [key for _, key in choices]
        mine = members(colors, keys, self.rank)
        group = ThreadsCommunicator(
            self._hub,
            f"{self._group}/{sequence}.{color}",
            [self._ranks[rank] for rank in mine],
            mine.index(self.rank),
        )
        group.count_into(self.traffic)
        return group

    @property
    def point_to_point(self) -> PointToPoint:
        return _Messages(
            self._hub, self._group, ranks=self._ranks, rank=self.rank, traffic=self.traffic
        )

    def close(self) -> None:
        # Only closing the world's communicator ends a rank; it may close a group and continue.
        if not self._closed and self._group == "world":
            self._hub.depart(self._ranks[self.rank])
        self._closed = True

    def abort(self) -> None:
        self._hub.fail(f"rank {self._ranks[self.rank]} aborted")
        self.close()

    def _count_sent(self, tensors: Sequence[Tensor]) -> None:
        """Count one message to each other rank."""
        others = [tensor.nbytes for rank, tensor in enumerate(tensors) if rank != self.rank]
        self.traffic.sent(sum(others), len(others))

    def _gather(self, call: str, tensor: Tensor) -> list[Tensor]:
        values: list[Tensor] = self._exchange(call, _copy(tensor))
        check_alike([Layout.of(value) for value in values])
        # Each rank gets its own copies, as it would from another process.
        return [value.clone() for value in values]


class _Messages:
    """Buffered messages: a send does not wait for the receiver."""

    def __init__(
        self, hub: ThreadHub, group: str, ranks: Sequence[int], rank: int, traffic: Traffic
    ) -> None:
        self._hub, self._group, self._ranks, self._rank = hub, group, ranks, rank
        self._me, self._traffic = ranks[rank], traffic

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        check_peer("to", to, self._rank, len(self._ranks))
        self._traffic.sent(tensor.nbytes)
        self._hub.post(self._group, self._me, to=self._ranks[to], tag=tag, tensor=_copy(tensor))

    def recv_(self, tensor: Tensor, source: int | None = None, tag: int = 0) -> int:
        if source is not None:
            self.irecv_(tensor, source, tag).wait()
            return source
        others = [who for who in self._ranks if who != self._me]
        who, received = self._hub.receive_any(self._group, others, self._me, tag)
        _fill(tensor, received)
        return self._ranks.index(who)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        self.send(tensor, to, tag)
        return _Sent()

    def irecv_(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        check_peer("source", source, self._rank, len(self._ranks))
        who = self._ranks[source]
        number = self._hub.claim(self._group, who, self._me, tag)
        return _Receiving(
            lambda: _fill(
                tensor, self._hub.receive(self._group, who, to=self._me, tag=tag, number=number)
            )
        )


def _fill(tensor: Tensor, received: Tensor) -> None:
    if received.shape != tensor.shape or received.dtype != tensor.dtype:
        allowed = f"like the message, which is {_describe(received)}"
        raise ParameterError("tensor", _describe(tensor), allowed)
    tensor.detach().copy_(received)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
