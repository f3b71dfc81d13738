"""Between the ranks and the root of `first_arrivals`, which lives on a thread of rank 0."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from sparkdml.comm.base import Communicator
from sparkdml.errors import CommunicationError
from sparkdml.strategies.first_arrivals import Gradient, Root
from sparkdml.strategies.peers import LOOK_SECONDS, Watched, join, messages_of, open_peers

HEADER, BODY = 0, 1  # tags
FAREWELL = -1  # in place of a step
JOIN_SECONDS = 1.0  # after a failure


class Ask(Protocol):
    """One rank's way to the root. A context manager; every rank opens it."""

    def send(self, step: int) -> Iterator[None]:
        """Send what is in the buckets; for each sum that comes back, put there: one item."""
        ...

    def __enter__(self) -> Ask: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class FarRoot:
    """For every rank but the first."""

    def __init__(self, comm: Communicator, buckets: Sequence[Tensor]) -> None:
        self._buckets = buckets
        self._peers = open_peers(comm)
        self._messages = messages_of(self._peers)
        self._watched: Watched[Sequence[Gradient]] = Watched(comm, "sparkdml-root")

    def send(self, step: int) -> Iterator[None]:
        for gradient in self._watched.call(partial(self._exchange, step)):
            for bucket, part in zip(self._buckets, gradient, strict=True):
                bucket.copy_(part)
            yield

    def _exchange(self, step: int) -> Sequence[Gradient]:
        self._messages.send(torch.tensor([step]), 0, HEADER)
        for bucket in self._buckets:
            self._messages.send(bucket.cpu(), 0, BODY)
        count = torch.zeros(1, dtype=torch.int64)
        self._messages.recv_(count, 0, HEADER)
        sums = [empty_like(self._buckets) for _ in range(int(count))]
        for gradient in sums:
            for part in gradient:
                self._messages.recv_(part, 0, BODY)
        return sums

    def __enter__(self) -> FarRoot:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._messages.send(torch.tensor([FAREWELL]), 0, HEADER)
            self._peers.close()
        else:
            self._peers.abort()  # wakes the thread
        self._watched.close(JOIN_SECONDS)


class NearRoot:
    """For the first rank: the root itself, and the thread on which the others' gradients arrive."""

    def __init__(
        self,
        comm: Communicator,
        buckets: Sequence[Tensor],
        num_needed: int,
        num_stats: int,
        max_lag: int,
    ) -> None:
        self._buckets, self._comm = buckets, comm
        self._peers = open_peers(comm)
        self._messages = messages_of(self._peers)
        self._own: queue.Queue[Sequence[Gradient]] = queue.Queue()
        self._error: BaseException | None = None
        self.root = Root(comm.size, num_needed, num_stats, max_lag, self._reply)
        self._thread = threading.Thread(target=self._receive, name="sparkdml-root", daemon=True)

    def send(self, step: int) -> Iterator[None]:
        # Cloned: the buckets are filled anew while the root may still hold the gradient.
        self.root.arrive(0, step, [bucket.to("cpu", copy=True) for bucket in self._buckets])
        for gradient in self._wait():
            for bucket, part in zip(self._buckets, gradient, strict=True):
                bucket.copy_(part)
            yield

    def _wait(self) -> Sequence[Gradient]:
        while True:
            try:
                return self._own.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                self._check()
                self._comm.check()

    def _check(self) -> None:
        if self._error is not None:
            raise CommunicationError(f"a gradient did not arrive: {self._error}") from self._error

    def _reply(self, rank: int, sums: Sequence[Gradient]) -> None:
        if rank == 0:
            self._own.put(sums)
            return
        self._messages.send(torch.tensor([len(sums)]), rank, HEADER)
        for gradient in sums:
            for part in gradient:
                self._messages.send(part, rank, BODY)

    def _receive(self) -> None:
        step, num_here = torch.zeros(1, dtype=torch.int64), self._peers.size - 1
        try:
            while num_here:
                rank = self._messages.recv_(step, None, HEADER)
                if int(step) == FAREWELL:
                    num_here -= 1
                    continue
                gradient = empty_like(self._buckets)
                for part in gradient:
                    self._messages.recv_(part, rank, BODY)
                self.root.arrive(rank, int(step), gradient)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> NearRoot:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._peers.abort()  # wakes the thread
            self._thread.join(JOIN_SECONDS)
            return
        join(self._thread, self._comm)  # which ends with the others' farewells
        self._check()
        self._peers.close()


def empty_like(buckets: Sequence[Tensor]) -> Gradient:
    """In the host's memory, by way of which messages go."""
    return [torch.empty_like(bucket, device="cpu") for bucket in buckets]
