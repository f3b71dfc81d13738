"""Synchronous SGD with backup workers: n + b compute, the first n gradients of a step count.

Later ones are dropped, and their senders continue with the current parameters (Chen et al. 2016,
"Revisiting distributed synchronous SGD", arXiv 1604.00981). The rows of a dropped gradient are
skipped in that epoch, as are the rows that slow workers have left when n workers have none. One
that has more rows than others and keeps up with them is waited for: nothing of it is skipped.

The root adds the gradients up, on a thread of rank 0. It knows nothing of wires: gradients arrive
by a call, and answers leave by one. Every rank gets every step's sum, in order, so that all models
stay alike, those of late ranks too: they find several sums waiting, and continue from there.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from sparkdml.comm.base import Communicator, reduce_in_rank_order
from sparkdml.comm.peers import Watched, join, messages_of, open_peers
from sparkdml.errors import CommunicationError, ParameterError
from sparkdml.network.timeouts import PEERS_LOOK_SECONDS
from sparkdml.runtime.protocol.roles import Role
from sparkdml.strategies.base import Strategy, check_backend
from sparkdml.strategies.replicas import make_alike
from sparkdml.training.epoch import Epoch
from sparkdml.training.totals import ROWS, VOTES
from sparkdml.training.training import Training

Gradient = list[Tensor]  # buckets; the last one ends with the stats
Reply = Callable[[int, Sequence[Gradient]], None]


@dataclass
class Root:
    """`reply(rank, sums)` is called once for each gradient that arrived, from any thread.

    Args:
        size: of all ranks.
        num_needed: how many gradients make a step.
        num_stats: how many numbers at the end of the last bucket are the stats.
        max_lag: how many steps the slowest rank may be behind. At that, it is waited for.
    """

    size: int
    num_needed: int
    num_stats: int
    max_lag: int
    reply: Reply
    step: int = 0  # the one that gradients are collected for
    num_dropped: int = 0  # gradients
    _arrived: dict[int, Gradient] = field(default_factory=dict)
    _sums: dict[int, Gradient] = field(default_factory=dict)  # of steps that a rank still needs
    _at: dict[int, int] = field(default_factory=dict)  # the step that each rank is computing
    _late: set[int] = field(default_factory=set)  # ranks whose last gradient in a race was dropped
    _late_votes: Tensor | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._at = dict.fromkeys(range(self.size), 0)

    def arrive(self, rank: int, step: int, gradient: Gradient) -> None:
        """A rank's gradient of a step; kept, so it must not be changed any more."""
        with self._lock:
            assert step == self._at[rank] <= self.step, "ranks send what they were told to compute"
            if step < self.step:
                self._late.add(rank)
                self._drop(gradient)
                self._answer(rank)
            else:
                self._arrived[rank] = gradient
            while self._is_enough() and self._check_none_lost():
                self._finish_step()

    def _is_enough(self) -> bool:
        """Whether the step can do without the rest.

        A rank without rows answers at once, and must not take the place of one that has some and
        keeps up. Those that are behind, or were in the last race, are not waited for.
        """
        if len(self._arrived) < self.num_needed:
            return False
        missing = self._at.keys() - self._arrived.keys()
        return self._num_with_rows() >= self.num_needed or all(
            rank in self._late or self._at[rank] < self.step for rank in missing
        )

    def _num_with_rows(self) -> int:
        return sum(bool(self._stats(one)[ROWS]) for one in self._arrived.values())

    def _check_none_lost(self) -> bool:
        missing = [at for rank, at in self._at.items() if rank not in self._arrived]
        return not missing or self.step - min(missing) < self.max_lag

    def _drop(self, gradient: Gradient) -> None:
        """Its rows are skipped. A wish for a checkpoint or for the end is heard all the same."""
        self.num_dropped += 1
        votes = self._stats(gradient)[VOTES]
        self._late_votes = votes.clone() if self._late_votes is None else self._late_votes + votes

    def _finish_step(self) -> None:
        if self._num_with_rows() >= self.num_needed:  # else there was no slower rank
            self._late.difference_update(self._arrived)
        ranks = sorted(self._arrived)  # added in rank order: the same bits for the same arrivals
        parts = zip(*(self._arrived[rank] for rank in ranks), strict=True)
        total = [reduce_in_rank_order(list(buckets), "sum") for buckets in parts]
        if self._late_votes is not None:
            self._stats(total)[VOTES] += self._late_votes
            self._late_votes = None
        self._sums[self.step] = total
        self._arrived = {}
        self.step += 1
        for rank in ranks:
            self._answer(rank)

    def _answer(self, rank: int) -> None:
        sums = [self._sums[step] for step in range(self._at[rank], self.step)]
        self._at[rank] = self.step
        self.reply(rank, sums)
        for step in [one for one in self._sums if one < min(self._at.values())]:
            del self._sums[step]

    def _stats(self, gradient: Gradient) -> Tensor:
        return gradient[-1][-self.num_stats :]


HEADER, BODY = 0, 1  # tags
FAREWELL = -1  # in place of a step
JOIN_SECONDS = 1.0  # after a failure


class Ask(Protocol):
    """One rank's way to the root. A context manager; every rank opens it."""

    def send(self, step: int) -> Iterator[None]:
        """Send what is in the buckets; yield one item for each sum, once it is in its bucket."""
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
        self.root = Root(
            comm.size, num_needed, num_stats=num_stats, max_lag=max_lag, reply=self._reply
        )
        self._thread = threading.Thread(target=self._receive, name="sparkdml-root", daemon=True)

    def send(self, step: int) -> Iterator[None]:
        # Cloned: the buckets are refilled while the root may still hold the gradient.
        self.root.arrive(0, step, [bucket.to("cpu", copy=True) for bucket in self._buckets])
        for gradient in self._wait():
            for bucket, part in zip(self._buckets, gradient, strict=True):
                bucket.copy_(part)
            yield

    def _wait(self) -> Sequence[Gradient]:
        while True:
            try:
                return self._own.get(timeout=PEERS_LOOK_SECONDS)
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


SKIPPED_ROWS = "skipped_rows"


class BackupWorkers(Strategy):
    """Like `AllReduce`, but each step ignores the `backup` gradients that arrive last.

    Rows are lost by it: how many is in the history, as `skipped_rows`, and said at the end of each
    epoch. Of a worker that is always slow most rows are skipped; `AdaptiveBalance` loses none. The
    sum of a step goes through one rank. Two runs are the same only if nothing is dropped.

    Args:
        backup: how many of the workers' gradients are not waited for; `numWorkers` counts all.
        max_lag: how many steps a slow worker may be behind, before it is waited for: as many
            gradients are kept for it in memory.
        backend: "horovod", "torch", "mpi", or "auto", as in `AllReduce`. Gradients go by torch.
    """

    columns = (SKIPPED_ROWS,)

    def __init__(self, backup: int = 1, max_lag: int = 16, backend: str = "auto") -> None:
        if backup < 0:
            raise ParameterError("backup", backup, "at least 0")
        if max_lag < 1:
            raise ParameterError("max_lag", max_lag, "at least 1")
        self.backup, self.max_lag = backup, max_lag
        self.backend = check_backend(backend)

    def roles(self, num_workers: int) -> list[Role]:
        return [Role("worker", num_workers)]

    def run(self, role: str, training: Training) -> None:
        make_alike(training.task, training.ctx.comm)
        self._step = 0  # of this submission
        with self._open(training) as root:
            for epoch in training.epochs(self):
                for batch in epoch:
                    training.task.grad(batch)
                    training.clock.lap("compute")
                    if not self._apply_sums(training, epoch, root):
                        break  # none of the first ranks had a row left
                self._count_skipped(training, epoch)

    def _open(self, training: Training) -> Ask:
        comm, params = training.ctx.comm, training.task.params
        buckets = [bucket.tensor for bucket in params.buckets(sys.maxsize)]
        if comm.rank:
            return FarRoot(comm, buckets)
        needed = self._num_needed(comm.size)
        if comm.size <= self.backup:
            training.note(f"{self!r} with {comm.size} workers waits for one gradient a step")
        return NearRoot(
            comm, buckets, num_needed=needed, num_stats=len(params.stats), max_lag=self.max_lag
        )

    def _num_needed(self, size: int) -> int:
        return max(1, size - self.backup)

    def _apply_sums(self, training: Training, epoch: Epoch, root: Ask) -> bool:
        """The sum of this step; those of more steps, where this rank was late."""
        task = training.task
        for number, _ in enumerate(root.send(self._step)):
            if number:
                training.spans.start_step(training.step + 1)
            self._step += 1
            totals = task.totals()
            training.clock.lap("communication")
            training.spans.lap("communication")
            if not epoch.count(totals):
                return False
            task.apply(totals)
            training.spans.lap("optimizer")
            epoch.tick()
        return True

    def _count_skipped(self, training: Training, epoch: Epoch) -> None:
        if training.is_replayed:
            return
        own = training.ctx.data.num_rows_in(epoch.number, training.rows_per_step)
        total = torch.tensor([float(own)], dtype=torch.float64, device=training.ctx.device)
        total_rows = training.ctx.comm.allreduce_(total).item()
        skipped = 0.0 if training.is_interrupted else total_rows - epoch.totals.rows
        epoch.measured[SKIPPED_ROWS] = skipped
        if skipped:
            training.note(
                f"epoch {epoch.number + 1}: {skipped:,.0f} of {total_rows:,.0f} rows were skipped, "
                f"as their gradients came after the first {self._num_needed(training.ctx.size)} of "
                "a step, or not at all"
            )

    def __repr__(self) -> str:
        return f"BackupWorkers(backup={self.backup}, max_lag={self.max_lag})"
