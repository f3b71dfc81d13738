"""Synchronous SGD on ranks of different speed: each computes as many rows as it can in the time.

The rows of every step are those of `AllReduce`: an equal part of each worker's own. Only who
computes them changes: what is too much for a slow rank is read and computed by quicker ones. The
gradients are sums with weights, so the result is that of AllReduce, whatever the speeds were; to
the last bits it is not, as the order of additions differs. (Batch sizes by speed as in Chen et al.
2020, "Semi-dynamic load balancing", and Tyagi and Sharma 2020, "Taming resource heterogeneity in
distributed ML training with dynamic batching"; here with the rows moving, too.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from sparkdml.compression.base import Compression
from sparkdml.errors import ParameterError
from sparkdml.feed.agreement import check_any_full
from sparkdml.feed.batch import Batch
from sparkdml.feed.shared_rows import Piece, Pool, divide, hand_over, smooth
from sparkdml.runtime.protocol.roles import Role
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.training.epoch import Epoch
from sparkdml.training.task import Task, Totals
from sparkdml.training.training import Training

MOVED_ROWS = "moved_rows"


class AdaptiveBalance(AllReduce):
    """`AllReduce` for mixed machines: a rank's part of each step follows its measured speed.

    The rows of a step stay the same, and each row comes once an epoch. How many of them were
    computed by another rank than the one that owns them is in the history, as `moved_rows`. Workers
    on one host read each other's rows from the same memory; on others, over a wire. All rows are
    read from Spark before the first step.

    Args:
        every: how many steps lie between two looks at the speeds.
        backend, bucket_bytes, topology, compression: as in `AllReduce`.
    """

    columns = (MOVED_ROWS,)

    def __init__(
        self,
        every: int = 8,
        backend: str = "auto",
        bucket_bytes: int = 8 << 20,
        topology: str = "auto",
        compression: Compression | None = None,
    ) -> None:
        if every < 1:
            raise ParameterError("every", every, "at least 1")
        super().__init__(backend, bucket_bytes, topology, compression)
        self.every = every

    def roles(self, num_workers: int) -> list[Role]:
        return [Role("worker", num_workers, reads="leases")]  # the rows move

    def start(self, training: Training) -> None:
        super().start(training)
        self._speeds = [1.0] * training.ctx.size
        self._stopwatch = Stopwatch(training.ctx.device)

    def agree(self, task: Task) -> Totals:
        self._stopwatch.stop()  # what follows is waiting for others
        return super().agree(task)

    def overlap_work(self) -> None:
        """Nothing: the time of a step is measured from when its batch is there."""

    def batches(self, training: Training, epoch: Epoch) -> Iterator[Batch]:
        ctx = training.ctx
        pool: Pool = ctx.pool(epoch.number, training.schedule.shuffle, epoch.start)
        starts, parts = [0] * ctx.size, [training.rows_of(rank) for rank in range(ctx.size)]
        epoch.used_rows = 0
        epoch.measured.setdefault(MOVED_ROWS, 0.0)
        if pool.drops_last and not any(map(int.__ge__, pool.counts, parts)) and not epoch.steps:
            list(check_any_full(iter(()), parts[ctx.rank], ctx))  # raises, on every rank
        while any(sizes_of(pool, starts, parts)):
            rows_before = int(epoch.own_rows)
            steps = self._plan(pool, starts, parts)
            own = (pieces[ctx.rank] for _, pieces in steps if pieces[ctx.rank])
            delivered = pool.batches(own, rows_before)
            for sizes, pieces in steps:
                batch = next(delivered) if pieces[ctx.rank] else Batch.empty()
                epoch.used_rows += sizes[ctx.rank]
                epoch.measured[MOVED_ROWS] += num_moved(pieces)
                self._stopwatch.start(batch.num_rows)
                yield batch
            self._measure(training)

    def _plan(
        self, pool: Pool, starts: list[int], parts: list[int]
    ) -> list[tuple[list[int], list[list[Piece]]]]:
        """The next steps: how many rows each owner brings, and who computes which of them."""
        steps = []
        for _ in range(self.every):
            sizes = sizes_of(pool, starts, parts)
            if any(sizes):
                counts = divide(sum(sizes), self._speeds)
                steps.append((sizes, hand_over(starts, sizes, counts)))
                starts[:] = map(int.__add__, starts, sizes)
        return steps

    def _measure(self, training: Training) -> None:
        """All ranks learn all speeds, and so divide the next steps alike."""
        own = torch.tensor(self._stopwatch.take(), dtype=torch.float64, device=training.ctx.device)
        found = torch.stack(training.ctx.comm.allgather(own.unsqueeze(0))).squeeze(1).tolist()
        seconds, rows = [one[0] for one in found], [one[1] for one in found]
        self._speeds = smooth(self._speeds, seconds, rows)

    def __repr__(self) -> str:
        return super().__repr__().replace("AllReduce(", f"AdaptiveBalance(every={self.every}, ", 1)


class Stopwatch:
    """Seconds that a rank computed, and on how many rows; without its waiting for others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started, self._batch_rows = 0.0, 0
        self._seconds, self._rows = 0.0, 0

    def start(self, num_rows: int) -> None:
        self._started, self._batch_rows = time.perf_counter(), num_rows

    def stop(self) -> None:
        if not self._batch_rows:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds += time.perf_counter() - self._started
        self._rows += self._batch_rows
        self._batch_rows = 0

    def take(self) -> tuple[float, float]:
        """Seconds and rows since the last call."""
        taken = self._seconds, float(self._rows)
        self._seconds, self._rows = 0.0, 0
        return taken


def sizes_of(pool: Pool, starts: list[int], parts: list[int]) -> list[int]:
    """How many rows each owner brings to the next step."""
    left = [count - start for count, start in zip(pool.counts, starts, strict=True)]
    if pool.drops_last:
        return [part if part <= rest else 0 for part, rest in zip(parts, left, strict=True)]
    return [min(part, rest) for part, rest in zip(parts, left, strict=True)]


def num_moved(pieces: list[list[Piece]]) -> int:
    return sum(
        stop - start for rank, own in enumerate(pieces) for o, start, stop in own if o != rank
    )
